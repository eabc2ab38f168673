"""A client that failed to produce once can produce again: the broker does not wait for the batch
that failed.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.client import Client, SyncClient, SyncTopicClient, TopicClient
from penstock.errors import TooLarge, Unauthorized, Unavailable
from tests.client.test_topics import Proxy, everything
from tests.support.served import serving, serving_in_thread
from tests.support.tokens import SECRET, token
from tests.support.wait import eventually

TOO_LARGE = b"x" * 2000
NO_BROKER = "http://127.0.0.1:1"  # the HTTP port is not needed when the topics' port is given
Produce = Callable[..., Awaitable[int]]


@asynccontextmanager
async def produce_with(kind: str, address: str, timeout: float = 30.0) -> AsyncIterator[Produce]:
    """`produce` to the topic "a" as this client has it."""
    if kind == "Client":
        async with Client(NO_BROKER, topics=f"tcp://{address}", timeout=timeout) as client:
            yield client.topic("a").produce
    else:
        async with TopicClient(address, timeout=timeout) as topics:
            yield lambda *payloads: topics.produce("a", *payloads)


@pytest.mark.parametrize("kind", ["Client", "TopicClient"])
async def test_after_a_batch_that_is_too_large(tmp_path: Path, kind: str) -> None:
    async with (
        serving(tmp_path, max_record=1000) as served,
        produce_with(kind, served.address) as produce,
    ):
        assert await produce(b"one") == 0
        for attempt in (1, 2, 3):
            with pytest.raises(TooLarge):
                await produce(TOO_LARGE)
            assert await produce(b"%d" % attempt, b"after") == 2 * attempt - 1


@pytest.mark.parametrize("kind", ["Client", "TopicClient"])
async def test_after_an_outage(tmp_path: Path, kind: str) -> None:
    async with serving(tmp_path) as served, TopicClient(served.address) as direct:
        proxy = Proxy(served.tcp.port)
        async with (
            proxy.listening() as address,
            produce_with(kind, address, timeout=1.0) as produce,
        ):
            assert await produce(b"one") == 0
            proxy.swallow_answers = True
            with pytest.raises(Unavailable):
                await produce(b"stored, but not answered")
            proxy.swallow_answers = False
            await eventually(lambda: served.topics.require("a").next_offset == 2)
            assert await produce(b"two") == 2
            assert await produce(b"three") == 3
        assert await everything(direct, "a") == [
            b"one", b"stored, but not answered", b"two", b"three",
        ]  # fmt: skip


async def test_after_no_broker_answered_at_all(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        port = served.tcp.port
        client = TopicClient(served.address, timeout=0.3)
        assert await client.produce("a", b"one") == 0
    with pytest.raises(Unavailable):
        await client.produce("a", b"lost")
    async with serving(tmp_path, tcp={"port": port}) as served, client:
        assert await client.produce("a", b"two") == 1
        assert await client.produce("a", b"three") == 2


async def test_after_a_caller_gave_up(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, TopicClient(served.address) as direct:
        proxy = Proxy(served.tcp.port)
        async with proxy.listening() as address, TopicClient(address) as client:
            assert await client.produce("a", b"one") == 0
            proxy.swallow_answers = True
            producing = asyncio.ensure_future(client.produce("a", b"two"))
            await eventually(lambda: served.topics.require("a").next_offset == 2)
            producing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await producing
            proxy.swallow_answers = False
            proxy.cut()
            assert await client.produce("a", b"three") == 2
        assert await everything(direct, "a") == [b"one", b"two", b"three"]


async def test_after_a_producer_was_not_let_in(tmp_path: Path) -> None:
    """Batches that were under way when the token was refused leave no gap for those after them."""
    given = token()
    async with serving(tmp_path, auth={"secret": SECRET}) as served:
        proxy = Proxy(served.tcp.port)
        async with (
            proxy.listening() as address,
            TopicClient(address, token=lambda: given) as client,
        ):
            producer = client.producer("a", max_batch_records=1)
            assert await (await producer.send(b"one")) == 0
            given = "wrong"
            proxy.cut()
            with pytest.raises(Unauthorized):
                await (await producer.send(b"refused"))
            with pytest.raises(Unauthorized):
                await producer.flush()
            given = token()
            assert await (await producer.send(b"two")) == 1
            await producer.close()


@pytest.mark.parametrize("kind", ["SyncClient", "SyncTopicClient"])
def test_plain_code_after_a_batch_that_is_too_large(tmp_path: Path, kind: str) -> None:
    with serving_in_thread(tmp_path, max_record=1000) as served:
        if kind == "SyncClient":
            with SyncClient(NO_BROKER, topics=f"tcp://{served.address}") as client:
                assert_produces_again(client.topic("a").produce)
        else:
            with SyncTopicClient(served.address) as topics:
                assert_produces_again(lambda *payloads: topics.produce("a", *payloads))


def assert_produces_again(produce: Callable[..., int]) -> None:
    assert produce(b"one") == 0
    with pytest.raises(TooLarge):
        produce(TOO_LARGE)
    assert produce(b"two") == 1
    assert produce(b"three") == 2
