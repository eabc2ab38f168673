"""What both ends must agree on, whoever writes and whoever reads. Imports nothing of the broker."""
