"""The HTTP server: a thin asyncio protocol on httptools."""
