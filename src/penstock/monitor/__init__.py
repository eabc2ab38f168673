"""What a person watching the broker wants to know, sampled while somebody watches."""

from penstock.monitor.sampler import Sampler

__all__ = ["Sampler"]
