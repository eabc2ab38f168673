"""The event loop behind the plain clients."""

import asyncio
import inspect
import signal
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.client import (
    Client,
    Producer,
    PushBuffer,
    Reader,
    SyncClient,
    SyncTopicClient,
    TopicClient,
)
from penstock.client.sync import Portal, SyncProducer, SyncReader
from penstock.client.sync_queues import SyncPushBuffer


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

    iterator = portal.iterate(numbers())
    assert next(iterator) == 1
    portal.close()
    del iterator
    assert not recwarn.list


@pytest.mark.parametrize(
    ("plain", "asynchronous"),
    [
        (SyncClient, Client),
        (SyncTopicClient, TopicClient),
        (SyncPushBuffer, PushBuffer),
        (SyncProducer, Producer),
        (SyncReader, Reader),
    ],
)
def test_a_facade_has_what_its_async_class_has_and_says_what_it_does(
    plain: type, asynchronous: type
) -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    renamed = {"records", "first_offset", "last_offset", "group", "incarnation", "topic"}
    methods = {name for name in public(asynchronous) if callable(getattr(asynchronous, name))}
    assert methods - public(plain) - renamed == set()
    assert [name for name in public(plain) if not inspect.getdoc(getattr(plain, name))] == []
