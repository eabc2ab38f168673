"""Offset-addressed logs on disk, their retention, and consumer groups on them."""
