"""Files, locks, journals of lines, disk space and background work: what every package that touches
the disk uses, and nothing that knows what a log is.
"""
