"""Hooks: generators of the program that run around each call of a handler, or around `run`.

The code before `yield` runs before the call, the code after it runs after the call. An exception of
the handler is raised at the `yield`. Async generators run in the event loop, plain ones too, so
they must not block for long.
"""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

from penstock.errors import InvalidRequest

Hook = Callable[..., AbstractAsyncContextManager[Any]]


def hook_of(function: Callable[..., Any]) -> Hook:
    """Return the context manager that a generator function makes."""
    if inspect.isasyncgenfunction(function):
        return asynccontextmanager(function)
    if not inspect.isgeneratorfunction(function):
        raise InvalidRequest(f"{function.__qualname__} has no yield: a hook is a generator")
    plain = contextmanager(function)

    @asynccontextmanager
    async def in_loop(*arguments: Any) -> AsyncIterator[Any]:
        with plain(*arguments) as value:
            yield value

    return in_loop
