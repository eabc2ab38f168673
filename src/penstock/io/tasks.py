"""Run blocking calls in a pool of threads, and background loops as supervised tasks.

A background loop handles the errors that it expects. If another error ends it, the error is logged
with its traceback, counted in `penstock_background_restarts_total`, and the loop starts again.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar

from penstock.metrics import Metrics

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger("penstock.background")

FIRST_RESTART_SECONDS, MAX_RESTART_SECONDS = 0.1, 30.0
STABLE_SECONDS = 60.0  # after running this long, the pause is reset
# The pause before background work is repeated after a failure of the disk or of another server. For
# PostgreSQL see `penstock.database.retry`.
RETRY_SECONDS = 1.0


def supervised(
    name: str, loop: Callable[[], Coroutine[Any, Any, None]], metrics: Metrics | None = None
) -> asyncio.Task[None]:
    """Run `loop()` in the background until it returns or is cancelled; restart it if it fails.

    The pauses between restarts grow. Without `metrics`, restarts are logged only.
    """
    return asyncio.create_task(_restarting(name, loop, metrics), name=name)


def repeated(
    name: str, call: Callable[[], None], seconds: float, metrics: Metrics | None = None
) -> asyncio.Task[None]:
    """Call `call()` every `seconds` in the background, also after a call that fails."""

    async def loop() -> None:
        while True:
            await asyncio.sleep(seconds)
            call()

    return supervised(name, loop, metrics)


async def _restarting(
    name: str, loop: Callable[[], Coroutine[Any, Any, None]], metrics: Metrics | None
) -> None:
    pause = FIRST_RESTART_SECONDS
    while True:
        began = time.monotonic()
        try:
            return await loop()
        except Exception:
            if time.monotonic() - began > STABLE_SECONDS:
                pause = FIRST_RESTART_SECONDS
            log.exception("%s failed; it restarts in %.1f s", name, pause)
        if metrics is not None:
            metrics.background_restarts.add(1, name)
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_RESTART_SECONDS)


async def slices(items: Sequence[T], size: int) -> AsyncIterator[Sequence[T]]:
    """Yield the items, `size` at a time, and let other tasks run in between."""
    for begin in range(0, len(items), size):
        if begin:
            await asyncio.sleep(0)
        yield items[begin : begin + size]


async def in_pool(pool: Executor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the function in the pool. Cancelling the caller does not interrupt it."""
    loop = asyncio.get_running_loop()
    return await asyncio.shield(loop.run_in_executor(pool, lambda: function(*args, **kwargs)))


async def cancelled(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancel the tasks that are not None, and wait until they end."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
