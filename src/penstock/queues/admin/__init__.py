"""What people look at and change: queues and their options, groups, stored messages, dead letters,
traces, figures. Each module is one noun; none of them is on the way of a push or a pop.
"""
