"""Benchmarks: each capability measured as a ratio against a peer or a floor in the same run."""
