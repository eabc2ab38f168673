"""The whole broker: a route made over its API exports a topic, through kill -9 and a stop."""

import asyncio
import json
from pathlib import Path
from typing import Any

from penstock.net import HttpClient
from tests.export.making import http_route
from tests.export.scripted import ScriptedDestination, record
from tests.support.broker import BrokerProcess
from tests.support.wait import eventually


def test_a_broker_exports_a_topic_through_kills_and_restarts(scratch: Path, database_url: str):
    async def ask(broker: BrokerProcess, method: str, target: str, body: Any = None) -> Any:
        client = HttpClient(broker.url)
        data = b"" if body is None else json.dumps(body).encode()
        answer = await client.request(method, target, data, [("Content-Type", "application/json")])
        await client.close()
        assert answer.status < 300, answer
        return json.loads(answer.body) if answer.body else None

    async def produce(broker: BrokerProcess, start: int) -> None:
        payloads = [record(number).decode() for number in range(start, start + 500)]
        await ask(broker, "POST", "/topics/orders/produce", {"payloads": payloads})

    async def body() -> None:
        broker = BrokerProcess(scratch, database_url=database_url)
        async with ScriptedDestination() as destination:
            await asyncio.to_thread(broker.start)
            try:
                route = http_route(destination.url, batch={"records": 20}) | {"source": {"topic": "orders"}}
                await ask(broker, "POST", "/api/v1/routes", {"name": "out", **route})
                await produce(broker, 0)
                await eventually(lambda: len(destination.ids) > 100)
                await asyncio.to_thread(broker.kill)
                await asyncio.to_thread(broker.start)
                await produce(broker, 500)
                await eventually(lambda: len(set(destination.ids)) == 1000, 20)
                status = await ask(broker, "GET", "/api/v1/routes/out")
                assert status["lag"] == 0
                assert len(destination.ids) - 1000 <= 20, "at most the one batch its worker held at the kill"
                keys: dict[int, set[str]] = {}
                for received in destination.ledger:
                    for each in received.ids:
                        keys.setdefault(each, set()).add(received.key)
                assert all(len(found) == 1 for found in keys.values())
            finally:
                code = await asyncio.to_thread(broker.stop)
            assert code == 0, broker.log

    asyncio.run(body())
