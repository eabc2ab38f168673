"""Queen MQ's HTTP API: its names for our facts, and the operations that only its
clients and its Console use. Nothing else in Penstock knows these words.
"""
