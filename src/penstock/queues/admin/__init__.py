"""Inspect and change queues and their options, groups, stored messages, dead letters, traces and
figures. Each module is one noun; pushes and pops use none of them.
"""
