"""The append-only log on disk: layout, segments, writer, reader, verification, recovery. It is
independent of brokers.
"""
