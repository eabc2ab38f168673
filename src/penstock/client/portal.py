"""The base of the blocking clients: they run the async calls on an event loop in a background
thread.

`Portal` is the machinery: one daemon thread with one loop, `call` runs a coroutine there and gives
its result back, `iterate` turns an async iterator into a plain one. A facade holds a portal and the
async object; `blocking`, `iterating` and `wrapping` make its methods of the async
object's, with their signatures.
"""

import asyncio
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from penstock.errors import InvalidRequest, Unavailable

try:  # faster where it is installed
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop  # type: ignore[assignment]

S = TypeVar("S")
T = TypeVar("T")
F = TypeVar("F")
A = TypeVar("A")
P = ParamSpec("P")
CANCEL_SECONDS = 5.0  # seconds that an interrupted call may take to end
CLOSED = "the client is closed (or was made before a fork: make one in each process)"
# A signal that arrives just before the main thread waits does not wake it, so it polls.
SIGNAL_POLL_SECONDS = 0.25


class Portal:
    """An event loop in a background thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop = new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="penstock-client", daemon=True
        )
        self._thread.start()

    def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` to its end in the portal's thread. Ctrl-C cancels it there and waits until
        it has ended, so that it does not run beside what the caller does next.
        """
        outcome: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        async def run() -> T:
            return await function(*args, **kwargs)

        def begin() -> None:
            tasks.append(self._loop.create_task(run()))
            tasks[0].add_done_callback(finish)

        def finish(task: asyncio.Task[T]) -> None:
            error = CancelledError() if task.cancelled() else task.exception()
            if error is None:
                outcome.set_result(task.result())
            else:
                outcome.set_exception(error)

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        if not self._thread.is_alive():
            raise Unavailable(CLOSED)
        if threading.current_thread() is self._thread:
            raise InvalidRequest(
                "a plain client cannot be used inside its own event loop, where an async handler"
                " runs: make the handler a plain function, or use penstock.Client"
            )
        try:
            try:
                self._loop.call_soon_threadsafe(begin)
            except RuntimeError:  # closed by another thread in this very moment
                raise Unavailable(CLOSED) from None
            while True:
                try:
                    return outcome.result(SIGNAL_POLL_SECONDS)
                except TimeoutError:
                    if outcome.done():  # the call's own
                        return outcome.result()
                    if not self._thread.is_alive():  # closed, or lost in a fork
                        raise Unavailable(CLOSED) from None
        except BaseException:
            if not outcome.done() and self._thread.is_alive():
                self._loop.call_soon_threadsafe(cancel)
                wait([outcome], CANCEL_SECONDS)
            raise

    def soon(self, function: Callable[[], object]) -> None:
        """Schedule `function` on the loop, without waiting for it."""
        self._loop.call_soon_threadsafe(function)

    def make(self, build: Callable[[], T]) -> T:
        """Build an object that belongs to the loop."""

        async def in_loop() -> T:
            return build()

        return self.call(in_loop)

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """Yield the items of an async iterator, and close it with this generator."""
        try:
            while True:
                try:
                    yield self.call(source.__anext__)
                except StopAsyncIteration:
                    return
        finally:
            close = getattr(source, "aclose", None)
            # this generator may be collected after the portal was closed
            if close is not None and self._thread.is_alive():
                self.call(close)

    def close(self) -> None:
        """Stop the loop. Calls in progress from other threads are cancelled."""
        if not self._thread.is_alive():
            return
        self.call(_cancel_rest)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def opened(build: Callable[[], T]) -> tuple[Portal, T]:
    """Return a portal and an object on its loop. The portal is closed if that fails."""
    portal = Portal()
    try:
        return portal, portal.make(build)
    except BaseException:
        portal.close()
        raise


async def _cancel_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def taking(
    method: Callable[Concatenate[S, P], Any],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Give a facade's method the parameters of the async object's method."""
    return functools.wraps(method)


def blocking(
    method: Callable[Concatenate[S, P], Awaitable[T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return a facade's method that runs the async one to its end."""

    @functools.wraps(method)
    def call(self: "Facade[S]", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._portal.call(method, self._async, *args, **kwargs)

    return call


def blocking_as(
    method: Callable[Concatenate[S, P], Awaitable[Any]], result: type[T]
) -> Callable[Concatenate[Any, P], T]:
    """Like `blocking`, with another result type for blocking code."""
    del result  # for type checkers only
    return blocking(method)


def forwarding(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a facade's method that calls the async object's, which needs no loop."""

    @functools.wraps(method)
    def call(self: "Facade[S]", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._async, *args, **kwargs)

    return call


def iterating(
    method: Callable[Concatenate[S, P], AsyncIterator[Any]], item: type[T]
) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """Return a facade's method that iterates over the async one, yielding `item`s."""
    del item  # for type checkers only

    @functools.wraps(method)
    def call(self: "Facade[S]", /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._portal.iterate(method(self._async, *args, **kwargs))

    return call


def wrapping(
    facade: Callable[[Portal, A], F], method: Callable[Concatenate[S, P], A]
) -> Callable[Concatenate[Any, P], F]:
    """Return a facade's method that wraps the async one's result in a facade."""

    @functools.wraps(method)
    def call(self: "Facade[S]", /, *args: P.args, **kwargs: P.kwargs) -> F:
        made = self._portal.make(lambda: method(self._async, *args, **kwargs))
        return facade(self._portal, made)

    return call


class Facade(Generic[S]):
    """Holds a portal and the async object that lives on its loop."""

    def __init__(self, portal: Portal, behind: S) -> None:
        self._portal = portal
        self._async = behind


class ClosingFacade(ABC, Facade[S]):
    """A facade that is a context manager, which closes it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> Any:
        """Close the async object."""
