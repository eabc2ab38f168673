"""Waiting for a condition with a deadline: nothing in a test sleeps for a fixed time and hopes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

# After which a test's database counts as down, unless the test is about that: a machine that is busy
# with other things is no outage, and what is really gone refuses connections at once.
DATABASE_TIMEOUT = 30.0


def until(condition: Callable[[], Any], timeout: float = 60.0, what: str = "") -> Any:
    """Return the condition's first true value, or fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {timeout} s: {what or condition}")
        time.sleep(0.01)


async def eventually(
    condition: Callable[[], Any] | Callable[[], Awaitable[Any]], timeout: float = 60.0
) -> Any:
    """The same inside a coroutine; the condition may be a coroutine function."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {timeout} s: {condition}")
        await asyncio.sleep(0.01)
