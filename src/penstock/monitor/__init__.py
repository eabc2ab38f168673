"""Sample the state of the broker for the Console, `penstock top` and metrics."""

from penstock.monitor.sampler import Sampler
from penstock.monitor.state_metrics import StateMetrics

__all__ = ["Sampler", "StateMetrics"]
