"""What a person watching the broker wants to know, sampled while somebody watches."""

from penstock.monitor.sampler import Sampler
from penstock.monitor.state_metrics import StateMetrics

__all__ = ["Sampler", "StateMetrics"]
