"""Waiting for a condition with a deadline: nothing in a test sleeps for a fixed time and hopes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any


def until(condition: Callable[[], Any], timeout: float = 10.0, what: str = "") -> Any:
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
    condition: Callable[[], Any] | Callable[[], Awaitable[Any]], timeout: float = 10.0
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
