"""Files, locks, line journals, disk space and background tasks. Nothing here knows topics or
queues.
"""
