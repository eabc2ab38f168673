"""Routes: send queue, workers, breaker, backoff, destinations."""
