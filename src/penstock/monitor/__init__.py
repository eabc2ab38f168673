"""What a person watching the broker wants to know, sampled while somebody watches and not otherwise."""

from penstock.monitor.sampler import Sampler

__all__ = ["Sampler"]
