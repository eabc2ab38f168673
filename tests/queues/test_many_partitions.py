"""A queue with very many partitions: what is done often costs no more, what must walk does so in
steps.

The normal form compares 500 partitions with 10,000, the long form 1,000 with 1,000,000. Costs are
medians of alternated runs, so that a busy machine slows both sides; something that looks at every
partition shows as a factor of 20 or 1,000.
"""

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock import Client
from penstock.database.embedded import EmbeddedPostgres
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Item, PopRequest, Queues
from penstock.queues import catalog as catalog_module
from penstock.queues.admin.dead_letters import Which
from penstock.queues.admin.messages import MessageFilter
from penstock.queues.admin.status import QueueFilter
from tests.conftest import copy_database, fresh_database
from tests.queues.support import answer, complete, pop, push, running, values
from tests.support.broker import BrokerProcess
from tests.support.form import SOAK

pytestmark = [
    pytest.mark.xdist_group("many-partitions"),
    pytest.mark.timeout(7200 if SOAK else 300),
]

FEW, MANY = (1_000, 1_000_000) if SOAK else (500, 10_000)
SIZES = {"few": FEW, "many": MANY}


@pytest.fixture(scope="module")
def template(postgres: EmbeddedPostgres) -> str:
    """A database with both queues, one message in each partition, and a group that has met them
    all.
    """
    url = fresh_database(postgres)

    async def fill() -> None:
        async with running(url) as queues:
            for queue, count in SIZES.items():
                await queues.admin.configure(
                    queue, QueueOptions(ordering="partition", lease_time=3600)
                )
                assert (
                    await pop(queues, queue, partitions=1)
                ).messages == []  # the group is there from the start
                began = time.monotonic()

                async def push_part(part: int, queue: str = queue, count: int = count) -> None:
                    for start in range(part * 1000, count, 4000):
                        names = [f"p{number}" for number in range(start, min(count, start + 1000))]
                        await queues.push([Item(queue, b"0", name) for name in names])

                await asyncio.gather(*(push_part(part) for part in range(4)))
                report(f"push to {count:,} new partitions", time.monotonic() - began)

    asyncio.run(fill())
    return url


@pytest.fixture
def filled(postgres: EmbeddedPostgres, template: str) -> str:
    """A copy of it for each test."""
    return copy_database(postgres, template)


def report(what: str, seconds: float) -> None:
    if SOAK:
        print(f"{what:48} {seconds * 1000:12.1f} ms", flush=True)


@asynccontextmanager
async def engine(url: str, **settings: Any) -> AsyncIterator[Queues]:
    """Without its timers: retention and the like run when the test says so."""
    slow = {"retention_interval": 3600.0, "eviction_interval": 3600.0}
    async with running(url, **(slow | settings)) as queues:
        yield queues


async def compare(
    what: str, work: Callable[[str], Awaitable[Any]], *, rounds: int = 7, factor: float = 5
) -> None:
    """The work on the queue with many partitions may cost at most `factor` times what it costs on
    the one with few.
    """
    taken: dict[str, list[float]] = {"few": [], "many": []}
    for _ in range(rounds):
        for queue, times in taken.items():
            began = time.perf_counter()
            await work(queue)
            times.append(time.perf_counter() - began)
    few, many = statistics.median(taken["few"]), statistics.median(taken["many"])
    report(f"{what} with {FEW:,} partitions", few)
    report(f"{what} with {MANY:,} partitions", many)
    assert many < few * factor + 0.005, (
        f"{what}: {few * 1000:.1f} ms with {FEW}, {many * 1000:.1f} ms with {MANY}"
    )


async def test_what_is_done_often_costs_the_same_with_many_partitions(filled: str) -> None:
    began = time.perf_counter()
    async with engine(filled) as queues:
        start = time.perf_counter() - began
        report(f"start of the engine with {MANY:,} partitions", start)
        assert start < 10
        assert not queues.catalog.partitions  # nothing was read at the start
        turn = iter(range(1, 1000))

        async def round_trip(queue: str) -> None:
            popped = await pop(queues, queue, batch=10, partitions=5)
            assert popped.partitions_claimed == 5
            await complete(queues, popped)

        async def push_one(queue: str) -> None:
            await push(queues, queue, 1, partition=f"p{next(turn)}")

        async def take_partition(queue: str) -> None:
            await pop(queues, queue, partition=f"p{FEW - 1 - next(turn) % 100}", group="picky")

        names = queues.groups, "__QUEUE_MODE__"

        async def describe(queue: str) -> None:
            await queues.status.partitions(await queues.status.queue(queue), limit=100)

        await compare("push", push_one)
        await compare("pop 5 partitions and ack", round_trip)
        await compare("pop one partition, new group", take_partition)
        await compare("lag", lambda queue: names[0].lag(queue, names[1]))
        await compare(
            "describe a queue (100 partitions)",
            describe,
        )
        await compare("list partitions", lambda queue: queues.admin.partitions(queue))
        await compare(
            "list messages",
            lambda queue: queues.messages.listing(MessageFilter(queue=queue), 100),
        )
        await compare(
            "list messages of one partition",
            lambda queue: queues.messages.listing(MessageFilter(queue=queue, partition="p7"), 100),
        )
        past = datetime.now(UTC) - timedelta(days=2)
        await compare(
            "list messages of an hour without any",
            lambda queue: queues.messages.listing(
                MessageFilter(queue=queue, since=past, until=past + timedelta(hours=1))
            ),
        )
        await compare("list dead letters", lambda queue: queues.dead.listing(Which(queue=queue)))
        await compare("retention with nothing to delete", lambda queue: queues.upkeep.retain())
        await compare(
            "configure",
            lambda queue: queues.admin.configure(queue, QueueOptions(lease_time=3600)),
            rounds=3,
        )


async def test_pages_for_operators_stay_bounded_when_every_partition_lags(filled: str) -> None:
    async with engine(filled) as queues:
        for what, work in {
            "list groups": lambda: queues.groups.listing(),
            "list queues": lambda: queues.status.page(QueueFilter(), 100),
            "overview": lambda: queues.status.overview(),
            "lagging partitions": lambda: queues.groups.lagging(0, limit=100),
            "describe a group (100 partitions)": lambda: queues.groups.describe(
                "__QUEUE_MODE__", limit=100
            ),
        }.items():
            times = []
            for _ in range(3):
                began = time.perf_counter()
                await work()  # type: ignore[no-untyped-call]
                times.append(time.perf_counter() - began)
            report(what, statistics.median(times))
            assert min(times) < 2, what
        (many,) = [
            entry
            for entry in await queues.groups.listing(queue="many")
            if entry.name == "__QUEUE_MODE__"
        ]
        assert min(MANY, 10_000) - 100 <= many.lagging_partitions <= 10_000
        stored = (
            await queues.database.fetch(
                "SELECT count(*) FROM messages m, queues q WHERE q.id = m.queue_id AND q.name = 'many'"
            )
        )[0][0]
        assert many.waiting == stored - many.completed
        page = await queues.groups.describe("__QUEUE_MODE__", limit=7, offset=3)
        assert len(page) == 7


async def test_seeking_a_group_walks_partitions_in_short_steps_and_not_at_all_where_it_is_already(
    filled: str,
) -> None:
    async with engine(filled) as queues:
        groups = queues.groups

        async def steps(queue: str, to: str) -> float:
            """Seconds per partition."""
            began = time.perf_counter()
            result = await groups.seek("__QUEUE_MODE__", queue, to=to)
            assert result.partitions == SIZES[queue] + 1
            taken = time.perf_counter() - began
            report(f"seek {queue} to the {to}", taken)
            return taken / SIZES[queue]

        before = await groups.lag("many", "__QUEUE_MODE__")
        planned = await groups.preview("__QUEUE_MODE__", "many", to="end")
        assert planned.skipped == before
        few = await steps("few", "end")
        longest = 0.0

        async def use() -> None:  # the queue is in use meanwhile
            nonlocal longest
            while not done.is_set():
                began = time.perf_counter()
                await push(queues, "few", 1, partition="p1")
                await push(queues, "many", 1, partition="Default")
                longest = max(longest, time.perf_counter() - began)
                await asyncio.sleep(0.01)

        done = asyncio.Event()
        using = asyncio.create_task(use())
        many = await steps("many", "end")
        done.set()
        await using
        report("longest two pushes meanwhile", longest)
        assert many < few * 4 + 0.0001
        assert longest < 5
        again = await steps("many", "end")
        assert again < many  # reads only, and no lock on a partition
        assert await groups.lag("many", "__QUEUE_MODE__") <= 1000  # what was pushed while it walked
        await groups.seek("__QUEUE_MODE__", "many", to="end")
        assert await groups.lag("many", "__QUEUE_MODE__") == 0
        assert (await pop(queues, "many")).messages == []
        await steps("few", "beginning")
        lag = await groups.lag("few", "__QUEUE_MODE__")
        stored = (await queues.status.queue("few")).counts.stored
        assert lag == stored
        got = 0
        while messages := (
            await pop(queues, "few", batch=1000, partitions=1000, auto_ack=True)
        ).messages:
            got += len(messages)
        assert got == stored


async def test_a_new_group_meets_a_million_partitions_in_steps_and_finds_the_needle(
    filled: str,
) -> None:
    async with engine(filled) as queues:
        began = time.perf_counter()
        first = await queues.pop(PopRequest(queue="many", group="late", subscription_mode="new"))
        assert first.messages == []
        assert time.perf_counter() - began < 10  # it gives up for now rather than walk a million
        await push(queues, "many", "needle", partition=f"p{MANY - 1}")
        async with asyncio.timeout(1200):
            while True:
                messages = await pop(queues, "many", group="late", wait=True, timeout=30)
                if messages.messages:
                    break
        report(f"a new group meets {MANY:,} partitions", time.perf_counter() - began)
        assert values(messages) == ["needle"]
        assert all(acked.success for acked in await answer(queues, messages.messages))
        while (await queues.groups.listing("late", "many"))[0].discovering:
            assert (await pop(queues, "many", group="late")).messages == []
        assert await queues.groups.lag("many", "late") == 0
        await queues.groups.delete("late", "many")


async def test_what_a_broker_remembers_of_partitions_is_bounded(
    filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not SOAK:
        monkeypatch.setattr(catalog_module, "MAX_REMEMBERED", 100)
    most = catalog_module.MAX_REMEMBERED
    touched = MANY if SOAK else 3000

    async with engine(filled) as queues:
        before = resident()
        for start in range(0, touched, 1000):
            await queues.push(
                [Item("many", b"1", f"p{number}") for number in range(start, start + 1000)]
            )
            assert len(queues.catalog.partitions) <= most + 1000
        for number in range(2000 if SOAK else most * 2):
            await pop(queues, "many", partition=f"p{number}", group="picky")
            assert len(queues.catalog.partitions) <= most + 1000
        assert len(queues.catalog.groups) <= most
        assert len(queues.catalog._prefixes) <= most + 1  # which no public figure counts
        report(
            f"memory after {touched:,} partitions: {(resident() - before) >> 20} MiB more, in",
            0,
        )
        assert resident() - before < 200 << 20


async def test_retention_and_upkeep_of_many_partitions_delete_in_steps_and_leave_the_queue_usable(
    filled: str,
) -> None:
    async with engine(filled, partition_cleanup_days=0) as queues:
        longest = 0.0
        done = asyncio.Event()

        async def use() -> None:
            nonlocal longest
            while not done.is_set():
                began = time.perf_counter()
                await push(queues, "few", 1, partition="p3")
                longest = max(longest, time.perf_counter() - began)
                await asyncio.sleep(0.01)

        using = asyncio.create_task(use())
        await queues.admin.configure(
            "many", QueueOptions(retention_enabled=True, retention_seconds=1)
        )
        await asyncio.sleep(1.1)
        began = time.perf_counter()
        deleted = await queues.upkeep.retain()
        report(f"retention of {deleted:,} messages", time.perf_counter() - began)
        assert deleted >= MANY
        began = time.perf_counter()
        await queues.upkeep.tidy()
        report(f"removal of {MANY:,} empty partitions", time.perf_counter() - began)
        began = time.perf_counter()
        await queues.upkeep.tidy()
        report("the same with nothing to remove", time.perf_counter() - began)
        done.set()
        await using
        report("longest push to another queue meanwhile", longest)
        assert longest < 5
        assert (await queues.status.queue("many")).counts.stored == 0
        assert await queues.groups.lag("many", "__QUEUE_MODE__") == 0
        left = await queues.database.fetch(
            "SELECT count(*) FROM partitions p JOIN queues q ON q.id = p.queue_id WHERE q.name = 'many'"
        )
        assert left[0][0] <= 10  # those with something going on
        await push(queues, "many", "anew", partition="p77")
        assert values(await pop(queues, "many")) == ["anew"]


@pytest.mark.skipif(
    not SOAK, reason="needs minutes, for a whole broker on the large database: make soak"
)
async def test_a_broker_starts_at_once_on_a_database_with_a_million_partitions(
    filled: str, scratch: Path
) -> None:
    began = time.monotonic()
    with BrokerProcess(scratch / "one", database_url=filled) as broker:
        report("start of a broker", time.monotonic() - began)
        assert time.monotonic() - began < 30

        async with Client(broker.url) as client:
            await client.push("few", 1, partition="p1")
            assert await client.pop("few", wait=5)
        assert broker.process is not None
        size = resident(broker.process.pid)
        report(f"memory of the broker: {size >> 20} MiB, in", 0)
        assert size < 300 << 20


def resident(pid: int | None = None) -> int:
    """Bytes of memory in use by a process (this one)."""
    pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
