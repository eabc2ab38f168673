"""Routes that read a topic or a queue, and destinations other than HTTP: real topics, real
PostgreSQL.
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest

from penstock.export.destinations import BatchRefused, Denied, OutgoingBatch, RetryLater
from penstock.export.destinations.postgres import PostgresDestination, PostgresTarget
from penstock.export.payload import FRAMES, join
from penstock.log.layout import DATA
from penstock.metrics import Metrics
from penstock.queues.types import Ack, Item, PopRequest
from tests.export.making import exports, http_route, kill, status_of
from tests.export.scripted import ScriptedDestination, record
from tests.support.topics import everything, running
from tests.support.topics import running as topics_in
from tests.support.wait import eventually
from tests.topics.test_damage import readable
from tests.topics.test_scrub import scrubbed


@pytest.fixture(autouse=True)
def retries_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.export.sources.RETRY_SECONDS", 0.05)


def from_topic(url: str, topic: str = "orders", **queue: Any) -> dict[str, Any]:
    return http_route(url, batch={"records": 10, "linger": 0}, **queue) | {
        "source": {"topic": topic}
    }


async def test_a_topic_is_exported_from_where_the_queue_ended_after_stops_and_kills(tmp_path: Path):
    async with running(tmp_path / "data") as topics, ScriptedDestination() as destination:
        topic = await topics.create("orders")
        spec = {"r": from_topic(destination.url)}
        number = 0
        for turn in range(6):
            async with exports(tmp_path / "x", spec, topics=topics) as routes:
                route = routes.get("r")
                for _ in range(3):
                    await topic.append([record(number + each) for each in range(35)])
                    number += 35
                    await asyncio.sleep(0.01)
                if turn % 2:
                    await kill(routes)
        async with exports(tmp_path / "x", spec, topics=topics) as routes:
            route = routes.get("r")
            await eventually(lambda: route.queue.books.delivered == number)
            await eventually(lambda: status_of(route)["lag"] == 0)
        assert sorted(set(destination.ids)) == list(range(number))
        keys: dict[int, set[str]] = {}
        for received in destination.ledger:
            for each in received.ids:
                keys.setdefault(each, set()).add(received.key)
        assert all(len(result) == 1 for result in keys.values())


async def test_a_full_queue_leaves_the_rest_in_the_topic_and_a_new_topic_starts_at_its_beginning(
    tmp_path: Path,
):
    async with running(tmp_path / "data") as topics, ScriptedDestination() as destination:
        topic = await topics.create("orders")
        async with exports(
            tmp_path / "x", {"r": from_topic(destination.url, max_size=4)}, topics=topics
        ) as routes:
            route = routes.get("r")
            await route.pause()
            for turn in range(20):
                await topic.append([record(turn * 10 + each) for each in range(10)])
            await eventually(lambda: route.queue.count == 4)
            assert status_of(route)["lag"] >= 150
            assert status_of(route)["queue"]["accounting"]["dropped"] == {}
            await route.resume()
            await eventually(lambda: len(destination.ids) == 200)
            assert destination.ids == list(range(200))
            await topics.delete("orders")
            topic = await topics.create("orders")
            await topic.append([record(1000)])
            await eventually(lambda: destination.ids[-1] == 1000)
            assert len(destination.ids) == 201


async def test_a_drained_route_leaves_the_rest_in_the_topic_also_over_a_restart_until_it_is_resumed(
    tmp_path: Path,
):
    async with running(tmp_path / "data") as topics, ScriptedDestination() as destination:
        topic = await topics.create("orders")
        spec = {"r": from_topic(destination.url)}
        async with exports(tmp_path / "x", spec, topics=topics) as routes:
            route = routes.get("r")
            await topic.append([record(number) for number in range(50)])
            await eventually(lambda: route.queue.books.accepted == 50)
            await route.drain()
            await topic.append([record(number) for number in range(50, 100)])
            await eventually(lambda: route.state == "drained")
        async with exports(tmp_path / "x", spec, topics=topics) as routes:
            route = routes.get("r")
            assert route.state == "drained"
            assert status_of(route)["lag"] == 50, "it reads nothing"
            await asyncio.sleep(0.05)
            assert destination.ids == list(range(50))
            await route.resume()
            await eventually(lambda: len(destination.ids) == 100)
            assert destination.ids == list(range(100))


async def test_what_ages_out_of_a_topic_before_it_is_read_is_counted(tmp_path: Path):
    async with running(tmp_path / "data", segment_bytes=500, retention_bytes=1000) as topics:
        topic = await topics.create("orders")
        spec = {"r": from_topic("http://127.0.0.1:1/")}
        async with exports(tmp_path / "x", spec, topics=topics) as routes:
            await topic.append([record(0)])
            await eventually(lambda: routes.get("r").queue.count == 1)
        for number in range(1, 200):
            await topic.append([record(number)])
        await topics.maintain()
        first = topic.first_offset
        assert first > 1
        async with exports(tmp_path / "x", spec, topics=topics) as routes:
            state = routes.get("r").queue.books
            await eventually(lambda: state.accepted == 200)
            assert state.dropped[7] == first - 1


async def test_a_topic_is_mirrored_into_another_one(tmp_path: Path):
    async with running(tmp_path / "data") as topics:
        source = await topics.create("orders")
        spec = {
            "source": {"topic": "orders"},
            "destination": {"type": "topic", "topic": "copy"},
            "queue": {"workers": 1},
            "batch": {"linger": 0},
        }
        payloads = [bytes([each]) * each for each in range(200)]
        await source.append(payloads)
        async with exports(tmp_path / "x", {"r": spec}, topics=topics) as routes:
            await eventually(lambda: routes.get("r").queue.books.delivered == 200)
        assert [payload for _, payload in everything(topics.require("copy"))] == payloads


class FakeQueues:
    """What a route sees of queues."""

    def __init__(self) -> None:
        self.waiting: list[list[bytes]] = []
        self.acked: list[Any] = []
        self.stored: dict[str, bytes] = {}

    @property
    def groups(self) -> "FakeQueues":
        return self

    async def pop(self, _request: PopRequest) -> Any:
        payloads = self.waiting.pop(0) if self.waiting else []
        if not payloads:
            await asyncio.sleep(0.01)
        about = {"transaction_id": "", "partition_id": "", "lease_id": ""}
        return SimpleNamespace(messages=[SimpleNamespace(payload=one, **about) for one in payloads])

    async def ack(self, acks: list[Ack]) -> None:
        self.acked.append(len(acks))

    async def extend(self, _lease: str, _seconds: int) -> None: ...

    async def release(self, _queue: str, _group: str, _holder: int) -> int:
        return 0

    async def lag(self, _queue: str, _group: str) -> int:
        return sum(map(len, self.waiting))

    async def push(self, items: list[Item]) -> list[Any]:
        """Store messages as the buffer does."""
        for item in items:
            self.stored.setdefault(item.transaction_id, item.payload)
        return []


async def test_a_queue_is_read_through_its_group_and_acknowledged_when_it_is_safe(tmp_path: Path):
    queues = FakeQueues()
    queues.waiting = [[record(n * 10 + each) for each in range(10)] for n in range(5)]
    async with ScriptedDestination() as destination:
        spec = http_route(destination.url) | {"source": {"queue": "orders"}}
        async with exports(tmp_path, {"r": spec}, queues=queues, buffer=queues) as routes:
            await eventually(lambda: len(destination.ids) == 50)
            await eventually(lambda: len(queues.acked) == 5)
            assert status_of(routes.get("r"))["source"] == {"queue": "orders", "group": "r"}
        assert destination.ids == list(range(50))


async def test_a_queue_is_not_popped_while_there_is_no_room_for_more(tmp_path: Path):
    queues = FakeQueues()
    queues.waiting = [[record(number)] for number in range(10)]
    async with ScriptedDestination() as destination:
        spec = http_route(destination.url, max_size=3) | {"source": {"queue": "orders"}}
        async with exports(tmp_path, {"r": spec}, queues=queues, buffer=queues) as routes:
            route = routes.get("r")
            await route.pause()
            await eventually(lambda: route.queue.count == 3)
            await asyncio.sleep(0.05)
            assert len(queues.acked) == 3
            assert len(queues.waiting) == 7, "no lease runs while the destination is down"
            await route.resume()
            await eventually(lambda: destination.ids == list(range(10)))


async def test_a_queue_is_written_to_and_drops_what_it_has_seen(tmp_path: Path):
    queues = FakeQueues()
    spec = {"destination": {"type": "queue", "queue": "orders"}, "batch": {"records": 10}}
    async with exports(tmp_path, {"r": spec}, queues=queues, buffer=queues) as routes:
        route = routes.get("r")
        await route.push([record(number) for number in range(25)])
        await eventually(lambda: route.queue.count == 0)
    assert list(queues.stored.values()) == [record(number) for number in range(25)]
    assert [key.split("-")[1] for key in queues.stored] == ["1"] * 10 + ["2"] * 10 + ["3"] * 5


def batch_of(records: list[bytes], key: str) -> OutgoingBatch:
    return OutgoingBatch(key, join(records, FRAMES), len(records), FRAMES, 0)


async def test_postgres_takes_each_record_once_and_isolates_bad_ones(
    tmp_path: Path, database_url: str
):
    connection = await asyncpg.connect(database_url)
    await connection.execute("CREATE TABLE events (payload jsonb CHECK (payload->>'id' <> '13'))")
    await connection.execute("CREATE TABLE wide (id int PRIMARY KEY, pad text)")
    spec = {
        "destination": {"type": "postgres", "url": database_url, "table": "events"},
        "batch": {"records": 10},
        "queue": {"workers": 1},
    }
    async with exports(tmp_path, {"r": spec}) as routes:
        route = routes.get("r")
        await route.push([record(number) for number in range(100)] + [b"no json"])
        await eventually(lambda: route.queue.count == 0)
        letters = [letter.record for letter in await route.letters(0, 10_000)]
    assert letters == [record(13), b"no json"]
    ids = [
        row[0]
        for row in await connection.fetch("SELECT (payload->>'id')::int FROM events ORDER BY 1")
    ]
    assert ids == [number for number in range(100) if number != 13]

    destination = PostgresDestination(PostgresTarget(url=database_url, table="wide", columns=True))
    rows = batch_of([record(1, 3), record(2)], "k-1")
    for _ in range(3):  # the answer was lost: sent again, under the same key
        await destination.send(rows, destination.prepare(rows))
    result = await connection.fetch("SELECT * FROM wide ORDER BY id")
    assert [tuple(row) for row in result] == [(1, "xxx"), (2, None)]
    bad = batch_of([b'{"id": "x"}'], "k-2")
    with pytest.raises(BatchRefused):
        await destination.send(bad, destination.prepare(bad))
    with pytest.raises(
        BatchRefused, match="no column colour"
    ):  # nothing of a record is left out in silence
        odd = batch_of([record(3), b'{"id": 4, "colour": 1}'], "k-3")
        await destination.send(odd, destination.prepare(odd))
    await connection.execute(
        "ALTER TABLE wide ADD COLUMN colour int, ADD COLUMN at timestamptz DEFAULT now()"
    )
    await destination.send(odd, destination.prepare(odd))
    await destination.stop()
    result = await connection.fetch(
        "SELECT id, colour FROM wide WHERE id > 2 AND at IS NOT NULL ORDER BY id"
    )
    assert [tuple(row) for row in result] == [(3, None), (4, 1)], (
        "what a record does not name gets its default"
    )
    lenient = PostgresDestination(
        PostgresTarget(url=database_url, table="wide", columns=True, strict=False)
    )
    odd = batch_of([b'{"id": 5, "shape": 1}'], "k-4")
    await lenient.send(odd, lenient.prepare(odd))
    await lenient.stop()
    assert await connection.fetchval("SELECT count(*) FROM wide WHERE id = 5") == 1
    missing = PostgresDestination(PostgresTarget(url=database_url, table="nowhere"))
    with pytest.raises(Denied):
        await missing.send(rows, missing.prepare(rows))
    await missing.stop()
    down = PostgresDestination(
        PostgresTarget(url="postgres://u:p@127.0.0.1:1/x", table="t", timeout=2)
    )
    with pytest.raises(RetryLater):
        await down.send(rows, down.prepare(rows))
    await connection.close()


async def test_a_damaged_place_of_a_topic_is_passed_over_booked_and_reported(
    tmp_path: Path, caplog: Any
):
    async with running(tmp_path / "data") as topics:
        topic = await topics.create("orders")
        for first in range(0, 60, 5):
            await topic.append([record(number, 20) for number in range(first, first + 5)])
            if first == 25:
                await topic.seal()
        data = topic.segments[0].path(DATA)
    content = bytearray(data.read_bytes())
    content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    data.write_bytes(content)
    async with running(tmp_path / "data") as topics, ScriptedDestination() as destination:
        topic = topics.require("orders")
        await scrubbed(topics)
        intact = set(readable(topic))
        lost = sorted(set(range(60)) - intact)
        assert 0 < lost[0] <= lost[-1] < 30
        metrics = Metrics()
        spec = {"r": from_topic(destination.url)}
        async with exports(tmp_path / "x", spec, topics=topics, metrics=metrics) as routes:
            route = routes.get("r")
            await eventually(lambda: route.queue.books.delivered == len(intact))
            status = status_of(route)
            await kill(routes)
        assert destination.ids == sorted(intact)
        books = status["queue"]["accounting"]
        assert books["dropped"] == {"damaged": len(lost)}
        assert books["accepted"] == 60 == books["delivered"] + len(lost) + books["queued"]
        assert (
            f"offsets {lost[0]} to {lost[-1]} of topic orders are damaged" in status["sourceDamage"]
        )
        assert status["lag"] == 0
        assert status["sourceError"] is None
        shown = metrics.text().decode()
        assert (
            f'penstock_export_queue_dropped_records_total{{reason="damaged",route="r"}} {len(lost)}.0'
            in shown
        )
        assert 'penstock_export_queue_accepted_records_total{route="r"} 60.0' in shown
        assert "are damaged and were not exported" in caplog.text

        async with exports(
            tmp_path / "x", spec, topics=topics
        ) as routes:  # what was passed is not counted again
            await topic.append([record(60)])
            await eventually(lambda: destination.ids[-1] == 60)
            assert status_of(routes.get("r"))["queue"]["accounting"]["dropped"] == {
                "damaged": len(lost)
            }


async def test_damage_at_the_very_end_is_booked_once_over_restarts(tmp_path: Path):
    async with running(tmp_path / "data") as topics, ScriptedDestination() as destination:
        topic = await topics.create("orders")
        await topic.append([record(number, 20) for number in range(10)])
        await topic.seal()
        segment = topic.segments[0]
        segment.holes = ((segment.data_size // 2, segment.data_size),)  # as the scrub notes it
        spec = {"r": from_topic(destination.url)}
        for _ in range(3):
            async with exports(tmp_path / "x", spec, topics=topics) as routes:
                get = routes.get
                await eventually(lambda get=get: get("r").queue.books.accepted == 10)
                await eventually(lambda get=get: status_of(get("r"))["lag"] == 0)
                await eventually(lambda get=get: get("r").queue.count == 0)
                await kill(routes)
        await topic.append([record(10)])
        async with exports(tmp_path / "x", spec, topics=topics) as routes:
            await eventually(lambda: destination.ids[-1] == 10)
            books = status_of(routes.get("r"))["queue"]["accounting"]
            assert books["accepted"] == 11 == books["delivered"] + books["dropped"]["damaged"]
            assert books["delivered"] == len(destination.ids) == len(set(destination.ids))


async def test_a_deleted_topic_stays_deleted_and_a_new_one_is_read_from_its_beginning(
    tmp_path: Path,
):
    async with topics_in(tmp_path / "data") as topics, ScriptedDestination() as destination:
        early = from_topic(destination.url) | {"source": {"topic": "orders", "start": "latest"}}
        async with exports(tmp_path / "x", {"r": early}, topics=topics) as running:
            route = running.get("r")
            await eventually(
                lambda: "topic orders does not exist" in (status_of(route)["sourceError"] or "")
            )
            topic = await topics.create("orders")
            await topic.append([record(1)])
            await eventually(lambda: destination.ids == [1])
            assert status_of(route)["sourceError"] is None
            await topics.delete("orders")
            await eventually(lambda: status_of(route)["sourceError"])
            assert topics.get("orders") is None
            await (await topics.create("orders")).append([record(2)])
            await eventually(lambda: destination.ids == [1, 2])
