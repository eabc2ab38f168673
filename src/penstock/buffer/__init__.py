"""QoS 0 and failover files in front of the queues."""

from penstock.buffer.buffer import Buffer

__all__ = ["Buffer"]
