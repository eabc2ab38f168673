"""Waiting for a condition with a deadline: nothing in a test sleeps for a fixed time and hopes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
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


class Stopwatch:
    """Measure how long something takes on a machine that has a CPU to give.

    Limits of time are promises about the product. On a machine that is busy with other work,
    processes also wait for a CPU, and that says nothing about it. So the time in which some process
    waited for one does not count. A quiet machine has none of it, and there the limits are strict.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._waited = _waited_for_cpu()

    @property
    def waited(self) -> float:
        """Seconds since the start in which some process waited for a CPU."""
        return _waited_for_cpu() - self._waited

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began - self.waited


def _waited_for_cpu() -> float:
    try:
        some = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    except OSError:  # a kernel without it: every second counts
        return 0.0
    return int(some.rpartition("total=")[2]) / 1e6
