"""The event loop behind the plain clients."""

import asyncio
import gc
import signal
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.client.portal import Portal
from penstock.errors import InvalidRequest


@pytest.fixture
def portal() -> Iterator[Portal]:
    portal = Portal()
    yield portal
    portal.close()


@pytest.fixture
def interruptible() -> Iterator[None]:
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a runner in the background ignores it
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_call_although_the_signal_woke_another_thread(
    portal: Portal, interruptible: None
) -> None:
    ended = threading.Event()

    async def endless() -> None:
        portal_thread = threading.get_ident()
        asyncio.get_running_loop().call_later(
            0.05, signal.pthread_kill, portal_thread, signal.SIGINT
        )
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        portal.call(endless)
    assert ended.is_set()


def test_a_timeout_of_the_call_itself_is_passed_on(portal: Portal) -> None:
    async def late() -> None:
        raise TimeoutError("no answer")

    with pytest.raises(TimeoutError, match="no answer"):
        portal.call(late)


def test_an_iterator_left_behind_is_harmless_once_the_portal_is_closed(
    portal: Portal, recwarn: pytest.WarningsRecorder
) -> None:
    async def numbers() -> AsyncIterator[int]:
        yield 1
        yield 2

    gc.collect()  # what other tests left behind may warn as well
    recwarn.clear()
    iterator = portal.iterate(numbers())
    assert next(iterator) == 1
    portal.close()
    del iterator
    assert not recwarn.list


def test_a_call_from_inside_the_loop_is_refused_instead_of_waiting_for_itself(
    portal: Portal,
) -> None:
    async def inner() -> None: ...

    async def outer() -> None:
        portal.call(inner)

    with pytest.raises(InvalidRequest, match="inside its own event loop"):
        portal.call(outer)
