"""Append-only files: framing, segments, fsync policy, recovery, locks. Knows bytes, not brokers."""
