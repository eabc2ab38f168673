"""A primary and a synchronous standby, killed, frozen and promoted under a broker that works: the
ledger adds up.

Producers and a consumer go through a real broker over HTTP with our client. Nothing that was
answered is lost, doubled or out of order; pushes are interrupted for less than 5 s, pops for less
than 15 s.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import Client
from penstock.errors import PenstockError, Unavailable
from penstock.pipeline.options import QueueSourceOptions, read_options
from penstock.pipeline.sources.queue import QueuePlan, QueueReader
from tests.chaos.test_failover_broker import drained, pusher, stored
from tests.support.broker import BrokerProcess
from tests.support.buffers import Producers
from tests.support.form import SOAK
from tests.support.postgres import Pair
from tests.support.wait import Stopwatch, eventually, until

pytestmark = pytest.mark.xdist_group("postgres_failover")  # they share a pair, one after the other

PUSHES_WITHIN, POPS_WITHIN = 5.0, 15.0
SETTINGS = {"buffer__free_space_reserve": 0, "database__acquire_timeout": 2}


@pytest.fixture(scope="module")
def servers() -> Iterator[Pair]:
    with Pair() as pair:
        yield pair


@pytest.fixture
def pair(servers: Pair) -> Pair:
    servers.restore()
    return servers


class Consumer:
    """Pops and acknowledges all the time, and remembers what it got and when."""

    def __init__(self, client: Client, queue: str) -> None:
        self.seen: dict[str, list[int]] = {}
        self.longest = 0.0  # without a pop that was answered
        self._client, self._queue, self._stop = client, queue, False
        self._task = asyncio.create_task(self._consume())

    async def _consume(self) -> None:
        last = time.monotonic()
        while not self._stop:
            try:
                messages = await self._client.pop(
                    f"{self._queue}@ledger",
                    batch=500,
                    partitions=10,
                    wait=0.5,
                    subscription_mode="all",
                )
                for message in messages:
                    self.seen.setdefault(message.partition, []).append(message.data)
                if messages:
                    self.longest = max(self.longest, time.monotonic() - last)
                    last = time.monotonic()
                    await self._client.ack(messages)
            except PenstockError:
                await asyncio.sleep(0.05)  # what was not acknowledged comes again

    async def finish(self, total: int) -> None:
        await eventually(
            lambda: sum(len(set(seen)) for seen in self.seen.values()) >= total, timeout=30
        )
        self._stop = True
        await self._task

    def check(self, producers: Producers) -> None:
        for number, accepted in enumerate(producers.accepted):
            seen = list(
                dict.fromkeys(self.seen.get(f"p{number}", []))
            )  # an ack that was lost: delivered again
            assert seen == accepted, f"partition p{number}"


class Load:
    """Producers and a consumer on one broker, and their ledger."""

    def __init__(
        self, broker: BrokerProcess, client: Client, queue: str, pops_within: float
    ) -> None:
        self.broker = broker
        self._watch = Stopwatch()
        self._pops_within = pops_within
        self.producers = Producers(pusher(client), count=4, queue=queue)
        self.consumer = Consumer(client, queue)

    async def more(self, events: int = 60) -> None:
        await self.producers.more(events, timeout=40)

    async def on(self, address: str) -> None:
        """Wait until the broker works on this server, and some pushes more."""
        await eventually(lambda: health(self.broker).get("database_host") == address, timeout=30)
        queued = self.producers.statuses["queued"]
        await eventually(lambda: self.producers.statuses["queued"] > queued + 40, timeout=30)

    async def check(self, url: str, scratch: Path) -> None:
        await self.producers.finish()
        await drained(self.broker)
        await self.consumer.finish(self.producers.total)
        assert self.producers.errors == []
        self.producers.check(await stored(url, scratch, self.producers.queue))
        self.consumer.check(self.producers)
        slowest = max(took for _, took in self.producers.latencies)
        print(
            f"longest push {slowest:.2f} s, longest time without a pop {self.consumer.longest:.2f} s"
        )
        waited = self._watch.waited
        assert slowest < PUSHES_WITHIN + waited, f"a push took {slowest:.1f} s"
        assert self.consumer.longest < self._pops_within + waited, (
            f"no pop for {self.consumer.longest:.1f} s"
        )


def health(broker: BrokerProcess) -> dict[str, Any]:
    return httpx.get(f"{broker.url}/health").json()


@asynccontextmanager
async def loaded(
    url: str, scratch: Path, queue: str, pops_within: float = POPS_WITHIN
) -> AsyncIterator[Load]:
    with BrokerProcess(scratch / "data", database_url=url, **SETTINGS) as broker:
        async with Client(broker.url, retry_for=60) as client:
            load = Load(broker, client, queue, pops_within)
            await load.more()
            yield load
            await load.check(url, scratch)


async def test_the_primary_is_killed_and_the_standby_promoted(pair, scratch):
    async with loaded(pair.url(), scratch, "killed") as load:
        await asyncio.to_thread(pair.primary.kill)
        await load.more()
        await asyncio.to_thread(pair.promote)
        await load.on(pair.primary.address)


async def test_the_primary_is_frozen_the_standby_promoted_and_the_old_primary_comes_back_writable(
    pair, scratch
):
    async with loaded(pair.url(), scratch, "frozen") as load:
        await asyncio.to_thread(pair.primary.freeze)
        await load.more()
        await asyncio.to_thread(pair.promote)
        await load.on(pair.primary.address)  # the old one hangs, which keeps nobody waiting
        pair.standby.thaw()
        await eventually(lambda: "fenced" in health(load.broker)["database_problem"])
        assert pair.standby.address in health(load.broker)["database_problem"]
        await load.more()
        await load.on(pair.primary.address)
        assert "must be fenced" in load.broker.log


def test_a_frozen_standby_that_is_named_first_does_not_keep_a_broker_from_starting(pair, scratch):
    pair.primary.synchronous("")
    pair.standby.freeze()
    began = time.monotonic()
    with BrokerProcess(
        scratch / "data", database_url=pair.url(pair.standby, pair.primary), **SETTINGS
    ) as broker:
        assert health(broker)["status"] == "healthy"
        assert health(broker)["database_host"] == pair.primary.address
        item = {"queue": "first", "payload": 1}
        assert (
            httpx.post(f"{broker.url}/api/v1/push", json={"items": [item]}).json()[0]["status"]
            == "queued"
        )
    assert time.monotonic() - began < 30


async def test_commits_that_wait_for_a_frozen_standby_count_as_down_and_nothing_is_stored_twice(
    pair, scratch
):
    async with loaded(pair.url(), scratch, "waiting") as load:
        await asyncio.to_thread(pair.standby.freeze)
        buffered = load.producers.statuses["buffered"]
        await eventually(lambda: load.producers.statuses["buffered"] > buffered + 100, timeout=20)
        report = health(load.broker)
        assert report["status"] == "unhealthy"
        assert "commit" in report["database_problem"]
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        stuck = await asyncio.to_thread(pair.primary.sql, waiting)
        assert 0 < stuck <= 8 + 2  # the calls that were cut off, not one for each probe
        pair.standby.thaw()
        await eventually(lambda: health(load.broker)["status"] == "healthy")
        await load.on(pair.primary.address)


def spark_reader(pair, server: str) -> QueueReader:
    """Spark's queue source on `primary` or on the standby."""
    given = {
        "database": pair.url(pair.primary),
        "readDatabase": server,
        "queue": "browsed",
        "databaseTimeout": "0.1",
    }
    return QueueReader(
        QueuePlan(read_options(QueueSourceOptions, given), ["payload"], streaming=False)
    )


def spark_rows(reader: QueueReader, tasks: Any) -> list[str]:
    batches = [batch for task in tasks for batch in reader.read(task)]
    return sorted(row["payload"] for batch in batches for row in batch.to_pylist())


def test_stored_messages_are_browsed_on_a_standby_that_says_how_old_they_are(pair, scratch):
    settings = {
        "database_url": pair.url(pair.primary),
        "database__read_url": pair.url(pair.standby),
        **SETTINGS,
    }
    with BrokerProcess(scratch / "data", **settings) as broker:

        def push(payload: int) -> None:
            body = {"items": [{"queue": "browsed", "payload": payload}]}
            assert httpx.post(f"{broker.url}/api/v1/push", json=body).status_code == 201

        def listed() -> tuple[int, float | None]:
            answer = httpx.get(f"{broker.url}/api/v1/messages?queue=browsed", timeout=30).json()
            return len(answer["messages"]), answer.get("behindSeconds")

        push(1)
        until(lambda: listed() == (1, 0.0))
        pair.standby.sql("SELECT pg_wal_replay_pause()")
        try:
            push(2)
            until(lambda: (listed()[1] or 0) > 0)
            assert listed()[0] == 1  # it has not replayed the second one
            on_standby = spark_reader(pair, pair.url(pair.standby))
            assert spark_rows(on_standby, on_standby.partitions()) == ["1"]
            on_primary = spark_reader(pair, "primary")
            tasks = on_primary.partitions()
            assert spark_rows(on_primary, tasks) == ["1", "2"]
            with pytest.raises(Unavailable, match="the standby has transactions up to"):
                spark_rows(on_standby, tasks)  # a batch that this standby does not have yet
        finally:
            pair.standby.sql("SELECT pg_wal_replay_resume()")
        until(lambda: listed() == (2, 0.0))
        assert spark_rows(on_standby, tasks) == ["1", "2"]
        pair.primary.synchronous("")
        pair.standby.kill()
        until(lambda: listed() == (2, None))  # the primary's, until it is back
        until(lambda: "cannot be used, the primary is read instead" in broker.log)


async def test_of_two_primaries_that_take_writes_a_broker_uses_the_promoted_one_alone(
    pair, scratch
):
    count = "SELECT count(*) FROM penstock.messages"
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'penstock'"

    broker = BrokerProcess(scratch / "data", database_url=pair.url(), **SETTINGS).start()
    try:
        async with Client(broker.url, retry_for=60) as client:
            producers = Producers(pusher(client), count=4, queue="two")
            await producers.more(60)
            await asyncio.to_thread(pair.primary.synchronous, "")  # or its commits would wait
            await asyncio.to_thread(pair.promote)
            old, new = pair.standby, pair.primary
            await eventually(lambda: health(broker).get("database_host") == new.address, timeout=10)
            before = await asyncio.to_thread(old.sql, count)
            stored_before = await asyncio.to_thread(new.sql, count)
            await producers.more(200)
            assert await asyncio.to_thread(old.sql, count) == before
            assert await asyncio.to_thread(new.sql, count) > stored_before
            assert await asyncio.to_thread(old.sql, sessions) <= 1  # the one that surveys it
            assert f"{old.address} (timeline" in health(broker)["database_problem"]
            await producers.finish()
            assert producers.errors == []
            broker.stop()
            await asyncio.to_thread(
                broker.start
            )  # it has no memory of the promotion: it sees which is newer
            assert health(broker)["database_host"] == new.address
            assert "fenced" in health(broker)["database_problem"]
            await asyncio.to_thread(new.freeze)
            until(lambda: health(broker)["status"] == "unhealthy")
            assert (
                "must be fenced" in health(broker)["database_problem"]
            )  # never back to the older one
            await asyncio.to_thread(new.thaw)
            until(lambda: health(broker)["status"] == "healthy")
    finally:
        broker.stop()


@pytest.mark.skipif(not SOAK, reason="needs minutes: make soak")
async def test_twenty_failovers_under_load(pair, scratch):
    async with loaded(pair.url(), scratch, "twenty") as load:
        for turn in range(20):
            await asyncio.to_thread(pair.primary.freeze if turn % 2 else pair.primary.kill)
            await load.more()
            await asyncio.to_thread(pair.promote)
            await load.on(pair.primary.address)
            if turn % 4 == 1:
                pair.standby.thaw()
                await load.more()
            await asyncio.to_thread(pair.rejoin)
            await load.more(200)
            if turn % 4 == 3:
                await asyncio.to_thread(pair.standby.freeze)
                await eventually(lambda: health(load.broker)["status"] == "unhealthy", timeout=20)
                await load.more(200)
                pair.standby.thaw()
                await load.on(pair.primary.address)
