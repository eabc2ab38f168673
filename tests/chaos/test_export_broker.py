"""The whole broker, killed with kill -9: a route made over its API exports a topic; another broker
mirrors to it.
"""

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.database.embedded import EmbeddedPostgres
from penstock.errors import Locked
from penstock.export.sendqueue import repair
from penstock.net import HttpClient
from tests.conftest import fresh_database
from tests.export.lossy import LossyProxy
from tests.export.making import exports, http_route
from tests.export.scripted import ScriptedDestination, record
from tests.support.api import call
from tests.support.broker import BrokerProcess
from tests.support.topics import everything, running
from tests.support.wait import eventually

pytestmark = pytest.mark.xdist_group("export-broker")  # they share a broker, one after the other


@pytest.fixture(scope="module")
def broker(
    postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    made = BrokerProcess(tmp_path_factory.mktemp("broker"), database_url=fresh_database(postgres))
    made.start()
    yield made
    assert made.stop() == 0, made.log


async def test_a_broker_exports_a_topic_through_kills_and_restarts(broker: BrokerProcess):
    routes = f"{broker.url}/api/v1/routes"

    def produce(start: int) -> None:
        payloads = [record(number).decode() for number in range(start, start + 500)]
        call(f"{broker.url}/topics/orders/produce", "POST", {"payloads": payloads})

    async with ScriptedDestination() as destination:
        route = http_route(destination.url, batch={"records": 20}) | {"source": {"topic": "orders"}}
        call(routes, "POST", {"name": "out", **route})
        produce(0)
        await eventually(lambda: len(destination.ids) > 100)
        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.start)
        produce(500)
        await eventually(lambda: len(set(destination.ids)) == 1000)
        status = call(f"{routes}/out")
        assert status["lag"] == 0
        with pytest.raises(Locked):  # another process has the directory
            await repair(broker.data_dir / ".penstock" / "routes" / "out")
        assert len(destination.ids) - 1000 <= 20, (
            "at most the one batch its worker held at the kill"
        )
        keys: dict[int, set[str]] = {}
        for received in destination.ledger:
            for each in received.ids:
                keys.setdefault(each, set()).add(received.key)
        assert all(len(result) == 1 for result in keys.values())
        call(f"{routes}/out", "DELETE")


async def contents(broker: BrokerProcess, topic: str) -> list[bytes]:
    client, result = HttpClient(broker.url), []
    while True:
        answer = await client.request(
            "GET", f"/topics/{topic}/consume?offset={len(result)}&max_messages=1000"
        )
        page = json.loads(answer.body)
        if not page:
            await client.close()
            return result
        for message in page:
            text = message["payload"]
            result.append(
                base64.b64decode(text) if message.get("encoding") == "base64" else text.encode()
            )


async def test_a_mirror_through_lost_answers_and_kills_of_the_other_broker_holds_every_record_once(
    tmp_path: Path, broker: BrokerProcess
):
    def mirror(url: str, workers: int) -> dict[str, Any]:
        return {
            "source": {"topic": f"by{workers}"},
            "destination": {"type": "broker", "url": url, "timeout": "5s"},
            "batch": {"records": 10, "linger": 0},
            "queue": {
                "workers": workers,
                "retry_interval": "5ms",
                "max_retry_delay": "50ms",
                "circuit_breaker": {"threshold": 5, "reset_timeout": "200ms"},
            },
        }

    async with LossyProxy(broker) as proxy, running(tmp_path / "data") as topics:
        sources = {workers: await topics.create(f"by{workers}") for workers in (1, 4)}
        specs = {f"to{workers}": mirror(proxy.url, workers) for workers in sources}
        async with exports(tmp_path / "x", specs, topics=topics) as routes:

            async def append(start: int) -> None:
                same = [b"the same in every batch"] * 10
                for number in range(start, start + 150, 10):
                    for topic in sources.values():
                        await topic.append(
                            [record(each) for each in range(number, number + 9)] + [b"\xff"]
                        )
                        await topic.append(same)

            def arrived(count: int) -> bool:
                return all(routes.get(name).queue.books.delivered >= count for name in specs)

            await append(0)
            await eventually(lambda: arrived(100))
            await asyncio.to_thread(broker.kill)
            await append(150)
            await asyncio.to_thread(broker.start)
            await eventually(lambda: arrived(600), 30)
        assert proxy.lost > 10, "answers were lost on the way"
        expected = {
            workers: [payload for _, payload in everything(t)] for workers, t in sources.items()
        }
        assert await contents(broker, "by1") == expected[1], "byte for byte, in order, each once"
        assert Counter(await contents(broker, "by4")) == Counter(expected[4])
