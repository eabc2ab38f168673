"""The broker of the release before works beside this one, under load: upgrade, and back again.

`PENSTOCK_PREVIOUS` names the other release (a git reference); without it, it is the newest tag
`v*`. Its package is taken from the repository and runs on the libraries installed here.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from penstock import Client
from tests.conftest import create_database
from tests.support.broker import ServeProcess
from tests.support.releases import chosen, git, unpack
from tests.support.wait import eventually

pytestmark = pytest.mark.timeout(900)
PARTITIONS = 7
MAX_WAITING = 100  # messages that are pushed and not taken yet
LEASE_SECONDS = 15  # what a broker has in hand when it stops comes again after that
STEP = 40  # messages that have to come through before the next thing happens
STORED = """SELECT convert_from(m.payload, 'UTF8')::int FROM penstock.messages m
              JOIN penstock.queues q ON q.id = m.queue_id
             WHERE q.name = 'upgrade' ORDER BY m.partition_id, m.seq"""
NEWER = "was migrated by a newer release of Penstock"


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What to put on PYTHONPATH for the release before."""
    if not (reference := chosen()):
        reference, *_ = git("tag", "--list", "v*", "--sort=-version:refname").split() or [""]
    if not reference:
        pytest.skip("needs a tagged release (v*), or PENSTOCK_PREVIOUS=<commit>")
    return unpack(reference, tmp_path_factory.mktemp("previous"))


class Ledger:
    """What was pushed and what was taken, through clients that know both brokers."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.pushed = 0
        self.taken: list[int] = []  # in the order of their first delivery
        self._seen: set[int] = set()
        self._done = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with Client(self.urls) as one, Client(self.urls[::-1]) as two:
            self._tasks = [asyncio.create_task(self._take(client)) for client in (one, two)]
            pushing = [asyncio.create_task(self._push(client)) for client in (one, two)]
            self._tasks += pushing
            yield
            self._done.set()
            await asyncio.gather(*pushing)
            await eventually(lambda: self._alive() and len(self._seen) == self.pushed, 90)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def progress(self) -> None:
        """Wait until messages that are pushed from now on come through."""
        goal = self.pushed + STEP
        await eventually(lambda: self._alive() and len(self._seen) > goal, 90)

    def _alive(self) -> bool:
        for task in self._tasks:
            if task.done() and not self._done.is_set():
                task.result()  # raises what ended it
        return True

    async def _push(self, client: Client) -> None:
        while not self._done.is_set():
            number, self.pushed = self.pushed, self.pushed + 1
            await client.push("upgrade", number, partition=str(number % PARTITIONS))
            waiting = self.pushed - len(self._seen)
            await asyncio.sleep(0.01 if waiting < MAX_WAITING else 0.5)

    async def _take(self, client: Client) -> None:
        async for message in client.take("upgrade@ledger", batch=5):
            if message.data not in self._seen:
                self._seen.add(message.data)
                self.taken.append(message.data)
            await message.ack()

    def check(self, stored: list[int]) -> None:
        """Each was stored once, and taken in the order of its partition."""
        assert sorted(stored) == list(range(self.pushed))
        order = {number: place for place, number in enumerate(stored)}
        for partition in range(PARTITIONS):
            places = [order[one] for one in self.taken if one % PARTITIONS == partition]
            assert places == sorted(places), f"partition {partition} is out of order"


class Releases:
    """A broker of the release before and one of this, on one database."""

    def __init__(self, directory: Path, url: str, previous: Path) -> None:
        self.url = url
        env = {"PYTHONPATH": str(previous), "PYTHONSAFEPATH": "1"}
        self.before = ServeProcess(directory / "before", database_url=url, env=env)
        self.this = ServeProcess(directory / "this", database_url=url, shutdown_delay=1.0)

    def __enter__(self) -> "Releases":
        return self

    def __exit__(self, *failure: object) -> None:
        for broker in (self.before, self.this):
            if broker.process is not None:
                broker.stop()

    def ledger(self) -> Ledger:
        return Ledger([f"http://127.0.0.1:{b.ports['http']}" for b in (self.before, self.this)])

    async def stored(self) -> list[int]:
        connection = await asyncpg.connect(self.url)
        rows = await connection.fetch(STORED)
        await connection.close()
        return [row[0] for row in rows]


async def test_this_release_takes_a_database_over_and_hands_it_back_under_load(
    postgres, tmp_path: Path, previous: Path
) -> None:
    with Releases(tmp_path, await create_database(postgres, empty=True), previous) as releases:
        before, this = releases.before, releases.this
        ledger = releases.ledger()
        await asyncio.to_thread(before.start)
        async with Client(before.url) as client:
            await client.configure("upgrade", lease_time=LEASE_SECONDS, retry_limit=9)
        async with ledger.running():
            await ledger.progress()
            await asyncio.to_thread(this.start)  # it migrates, beside the other at work
            await ledger.progress()
            await asyncio.to_thread(before.stop)
            await ledger.progress()
            await asyncio.to_thread(before.start)  # restarted in the middle of the upgrade
            await ledger.progress()
            await asyncio.to_thread(this.stop)  # and back
            await ledger.progress()
            await asyncio.to_thread(this.start)
            await ledger.progress()
            await asyncio.to_thread(before.stop)
            await ledger.progress()
        ledger.check(await releases.stored())


async def test_the_release_before_joins_this_one_or_says_why_it_cannot(
    postgres, tmp_path: Path, previous: Path
) -> None:
    """It cannot when this release made tables that it does not know, and it never worked here."""

    with Releases(tmp_path, await create_database(postgres, empty=True), previous) as releases:
        before, this = releases.before, releases.this
        ledger = releases.ledger()
        await asyncio.to_thread(this.start)
        async with ledger.running():
            await ledger.progress()
            await asyncio.to_thread(before.start, wait=False)
            process = before.process
            assert process is not None
            try:
                await asyncio.to_thread(before.wait_until_started)
            except RuntimeError:
                assert process.returncode == 2
                assert NEWER in before.log
            else:
                await ledger.progress()
                await asyncio.to_thread(this.stop)
            await ledger.progress()
        ledger.check(await releases.stored())
