"""A client that failed to produce once can produce again: the broker does not wait for the batch
that failed.
"""

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.client import Client, SyncClient
from penstock.client import producer as producer_module
from penstock.errors import InvalidRequest, PenstockError, TooLarge, Unauthorized, Unavailable
from tests.client.test_topics import Proxy, everything
from tests.support.served import serving, serving_in_thread
from tests.support.tokens import SECRET, token
from tests.support.wait import eventually

TOO_LARGE = b"x" * 2000


async def test_after_a_batch_that_is_too_large(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, max_record=1000) as served,
        Client(topics=served.address) as client,
    ):
        produce = client.topic("a").produce
        assert await produce(b"one") == 0
        for attempt in (1, 2, 3):
            with pytest.raises(TooLarge):
                await produce(TOO_LARGE)
            assert await produce(b"%d" % attempt, b"after") == 2 * attempt - 1


@pytest.mark.parametrize(
    ("payload", "fields", "wrong"),
    [
        ("text", {}, "a payload is bytes, not str"),
        ("text", {"key": b"k"}, "a payload is bytes, not str"),
        (b"x", {"key": "k", "partition": 0}, "a key is bytes, not str"),
        (b"x", {"headers": [("name", "value")]}, "the value of a header is bytes, not str"),
        (b"x", {"headers": [(b"name", b"value")]}, "the name of a header is text, not bytes"),
        (b"x", {"timestamp": 1.5}, "a timestamp is a time or milliseconds since 1970, not 1.5"),
    ],
)
async def test_after_a_record_with_a_wrong_type(
    tmp_path: Path, payload: Any, fields: Any, wrong: str
) -> None:
    async with (
        serving(tmp_path, format="kafka") as served,
        Client(topics=served.address) as client,
        client.topic("a").producer() as producer,
    ):
        before = await producer.send(b"before")
        with pytest.raises(InvalidRequest, match=wrong):
            await producer.send(payload, **fields)
        assert await (await producer.send(b"after")) == 1
        assert await before == 0


async def test_after_a_bug_while_a_batch_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        serving(tmp_path) as served,
        Client(topics=served.address) as client,
        client.topic("a").producer() as producer,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(producer_module, "produce_frame", Mock(side_effect=RuntimeError("a bug")))
            lost = await producer.send(b"lost")
            with pytest.raises(PenstockError, match="a bug"):
                await producer.flush()
        with pytest.raises(PenstockError, match="a bug"):
            await lost
        assert await (await producer.send(b"after")) == 0


async def test_after_an_outage(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, Client(topics=served.address) as direct:
        proxy = Proxy(served.tcp.port)
        async with (
            proxy.listening() as address,
            Client(topics=address, timeout=1.0) as client,
        ):
            produce = client.topic("a").produce
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
        client = Client(topics=served.address, timeout=0.3)
        assert await client.topic("a").produce(b"one") == 0
    with pytest.raises(Unavailable):
        await client.topic("a").produce(b"lost")
    async with serving(tmp_path, tcp={"port": port}) as served, client:
        assert await client.topic("a").produce(b"two") == 1
        assert await client.topic("a").produce(b"three") == 2


async def test_after_a_caller_gave_up(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, Client(topics=served.address) as direct:
        proxy = Proxy(served.tcp.port)
        async with proxy.listening() as address, Client(topics=address) as client:
            assert await client.topic("a").produce(b"one") == 0
            proxy.swallow_answers = True
            producing = asyncio.ensure_future(client.topic("a").produce(b"two"))
            await eventually(lambda: served.topics.require("a").next_offset == 2)
            producing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await producing
            proxy.swallow_answers = False
            proxy.cut()
            assert await client.topic("a").produce(b"three") == 2
        assert await everything(direct, "a") == [b"one", b"two", b"three"]


async def test_after_a_producer_was_not_let_in(tmp_path: Path) -> None:
    """Batches that were under way when the token was refused leave no gap for those after them."""
    given = token()
    async with serving(tmp_path, auth={"secret": SECRET}) as served:
        proxy = Proxy(served.tcp.port)
        async with (
            proxy.listening() as address,
            Client(topics=address, token=lambda: given) as client,
        ):
            producer = client.topic("a").producer(max_batch_records=1)
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


def test_plain_code_after_a_batch_that_is_too_large(tmp_path: Path) -> None:
    with (
        serving_in_thread(tmp_path, max_record=1000) as served,
        SyncClient(topics=served.address) as client,
    ):
        produce = client.topic("a").produce
        assert produce(b"one") == 0
        with pytest.raises(TooLarge):
            produce(TOO_LARGE)
        assert produce(b"two") == 1
        assert produce(b"three") == 2
