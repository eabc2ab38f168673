"""What `make bench B=peers` is made of: the peers, their thin clients, and rounds that also count
CPU time.
"""
