"""Consumers that run for as long as a test needs them."""

import asyncio
from typing import Any

from penstock import Client
from tests.support.wait import eventually


async def consume_until(client: Client, done: Any) -> None:
    """Run the consumers until `done()` is true."""
    running = asyncio.create_task(client.run(handle_signals=False))
    try:
        await eventually(done)
    finally:
        client.stop()
        await running
