"""A shop: a web application, a worker, a nightly report and live events (see README.md)."""
