"""The append-only log on disk: files, layout, segments, writer, reader, verification, recovery.
Knows bytes, not brokers.
"""
