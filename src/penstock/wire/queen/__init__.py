"""Queen MQ's HTTP API: its names for our fields, and the operations that only its clients and its
Console use. No other package has these names.
"""
