"""The state of the broker for people, sampled while the Console or `penstock top` is open."""

from penstock.monitor.sampler import Sampler
from penstock.monitor.state_metrics import StateMetrics

__all__ = ["Sampler", "StateMetrics"]
