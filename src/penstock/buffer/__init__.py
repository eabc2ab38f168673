"""QoS 0 and failover files in front of the queues."""
