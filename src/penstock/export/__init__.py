"""Routes to destinations: send queue, workers, circuit breaker, backoff."""
