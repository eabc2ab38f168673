"""Work beside the caller: disk calls that may wait long run in a pool of threads, and what runs in
the background is ended in one way."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_pool(pool: Executor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call it in the pool. A cancelled caller does not interrupt the disk work."""
    loop = asyncio.get_running_loop()
    return await asyncio.shield(loop.run_in_executor(pool, lambda: function(*args, **kwargs)))


async def cancelled(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancel what runs in the background, if it does, and wait for its end."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
