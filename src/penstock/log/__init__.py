"""The append-only log on disk: layout, segments, writer, reader, verification, recovery.
Knows bytes, not brokers.
"""
