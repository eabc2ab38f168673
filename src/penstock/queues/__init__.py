"""Queues on PostgreSQL: push, pop, ack, leases, groups, dead letters, retention."""
