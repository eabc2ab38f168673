"""`Client.topic`: the binary port is found by itself."""

import asyncio
from typing import Any

import pytest

from penstock import Client, SyncClient
from penstock.errors import InvalidRequest, Unavailable
from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import HttpRoute
from tests.support.http import serving


async def test_a_topic_by_the_address_of_the_broker_alone(broker, queue):
    async with Client(broker.url) as client:
        orders = client.topic(queue)
        assert await orders.produce(b"one", b"two") == 0
        assert [record.payload async for record in orders.read()] == [b"one", b"two"]
        assert [record.offset async for record in orders.read(1)] == [1]
        tailing = orders.tail(start="earliest")
        assert [(await anext(tailing)).payload for _ in range(2)] == [b"one", b"two"]
        waiting = asyncio.ensure_future(anext(tailing))
        async with orders.producer() as producer:
            await producer.send(b"three")
        assert (await waiting).payload == b"three"
        await tailing.aclose()
        taken = [batch async for batch in orders.group("g").take(follow=False)]
        assert [payload for batch in taken for payload in batch.payloads()] == [
            b"one", b"two", b"three",
        ]  # fmt: skip
        assert await orders.group("g").committed() == (3, 0)
        assert queue in await client.topics()
        assert (await orders.info()).records == 3
        await orders.delete()
        assert queue not in await client.topics()


def test_plain_code_has_the_same_topics(broker, queue):
    with SyncClient(broker.url) as client:
        orders = client.topic(queue)
        assert orders.produce(b"one") == 0
        tailing = orders.tail("earliest")
        assert next(tailing).payload == b"one"
        tailing.close()
        (batch,) = orders.group("g").take(follow=False)
        assert batch.payloads() == [b"one"]
        with orders.producer() as producer:
            assert producer.offset(producer.send(b"two")) == 1


def health(listeners: dict[str, str], status: int = 200) -> HttpRoute:
    about: dict[str, Any] = {
        "status": "healthy", "database": "connected", "server": "s", "version": "1", "uptime": 1.0,
    }  # fmt: skip

    def answer(_: Request) -> Response:
        return json_response({**about, "listeners": listeners}, status)

    return HttpRoute("GET", "/health", answer)


async def test_the_port_is_taken_from_the_broker_and_the_host_from_the_address(broker, queue):
    _, port = broker.tcp

    # it listens on every address, has no database, and its topics work
    async with (
        serving(health({"TCP": f"tcp://0.0.0.0:{port}"}, 503)) as server,
        Client(server.url) as client,
    ):
        assert await client.topic(queue).produce(b"one") == 0


async def test_a_broker_without_topics_is_said_to_be_one():
    async with serving(health({"HTTP": "http://x"})) as server, Client(server.url) as client:
        with pytest.raises(InvalidRequest, match=r"no broker there serves topics.*topics="):
            await client.topic("t").produce(b"one")
    async with Client("http://127.0.0.1:1", timeout=0.3) as client:
        with pytest.raises(Unavailable, match="no broker answered with its TCP address"):
            await client.topic("t").produce(b"one")
        with pytest.raises(Unavailable, match="no broker answers"):
            await client.status()


async def test_the_port_may_be_named(broker, queue, monkeypatch: pytest.MonkeyPatch):
    host, port = broker.tcp

    async with Client("http://127.0.0.1:1", topics=f"tcp://{host}:{port}") as client:
        assert await client.topic(queue).produce(b"one") == 0
    monkeypatch.setenv("PENSTOCK_BROKER", f"{host}:{port}")
    async with Client.from_env() as client:
        assert await client.topic(queue).produce(b"two") == 1
