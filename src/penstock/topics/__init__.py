"""Topics: local and shared logs, their retention and tier, and consumer groups."""
