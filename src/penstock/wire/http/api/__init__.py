"""The HTTP API, one module per capability, each a list of routes over its part."""
