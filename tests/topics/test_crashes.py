"""Power loss and failing disks at every single call: what was acknowledged is there, in order,
once.
"""

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.errors import Damaged, PenstockError, StorageError
from penstock.log.layout import BATCHES, DATA, INDEX
from penstock.log.producers import Producer
from penstock.topics.store import TopicStore
from penstock.topics.topic import Appended, Topic
from tests.support.faults import CHANGES, HOWS, FaultyFs, How
from tests.support.form import SOAK, pick
from tests.support.topics import everything, log_directory, running

pytestmark = pytest.mark.usefixtures("form")

ROOT = Path("/data")
SETTINGS = {"segment_bytes": 400, "fsync_interval": 0.0005, "retention_interval": 3600.0}


@dataclass
class Ledger:
    """What was asked for and what was answered; payloads are unique, so each can be told from all
    others.
    """

    acked: dict[int, bytes] = field(default_factory=dict)
    asked: list[tuple[list[bytes], Producer | None]] = field(default_factory=list)
    doubtful: list[tuple[list[bytes], Producer]] = field(default_factory=list)
    sequence: int = 0
    made: int = 0

    async def append(self, topic: Topic, sizes: list[int], idempotent: bool) -> None:
        """Some appends at once, as a pipelining client makes them."""
        waiting = []
        for size in sizes:
            payloads = []
            for _ in range(size):
                payloads.append(b"%06d" % self.made + b"." * (self.made % 7))
                self.made += 1
            producer = Producer(b"producer-of-test", self.sequence) if idempotent else None
            self.sequence += idempotent
            self.asked.append((payloads, producer))
            waiting.append((payloads, producer, topic.append(payloads, producer)))
        for payloads, producer, future in waiting:
            try:
                self.note(payloads, await future)
            except PenstockError:
                if producer is not None:
                    self.doubtful.append((payloads, producer))

    def note(self, payloads: list[bytes], appended: Appended) -> None:
        assert appended.count == len(payloads)
        for i, payload in enumerate(payloads):
            assert appended.first_offset + i not in self.acked, "an offset was given out twice"
            self.acked[appended.first_offset + i] = payload

    async def settle(self, topic: Topic) -> None:
        """Retry what was not answered, in order, as the client does."""
        for payloads, producer in self.doubtful:
            self.note(payloads, await topic.append(payloads, producer))
        self.doubtful = []

    def check(self, topic: Topic, lossless: bool = True) -> None:
        result = readable(topic)
        offsets = [offset for offset, _ in result]
        lost = [
            offset
            for place in topic.damage
            for offset in range(place["lost_from"], place["lost_to"])
        ]
        assert not (lost and lossless), topic.damage
        assert sorted(offsets + lost) == list(range(topic.next_offset)), (
            "offsets have a silent gap or a repeat"
        )
        payloads = [payload for _, payload in result]
        assert len(set(payloads)) == len(payloads), "a record is there twice"
        where = dict(result)
        if lossless:
            assert {offset: where.get(offset) for offset in self.acked} == self.acked, (
                "an acknowledged record is gone"
            )
        else:
            assert all(
                where[offset] == payload
                for offset, payload in self.acked.items()
                if offset in where
            )
        present = set(payloads)
        assert present <= {payload for batch, _ in self.asked for payload in batch}
        for batch, _ in self.asked:
            inside = present & set(batch)
            assert inside in (set(), set(batch)), "part of a batch is there"


def readable(topic: Topic) -> list[tuple[int, bytes]]:
    """All records, going on after a gap where its error says."""
    collected: list[tuple[int, bytes]] = []
    at = topic.first_offset
    while at < topic.next_offset:
        try:
            part = everything(topic, at)
        except Damaged as error:
            end = next(
                place["lost_from"] for place in topic.damage if place["lost_to"] == error.resume
            )
            collected += [(o, bytes(p)) for o, p in topic.read(at, end - at)] if at < end else []
            at = error.resume or topic.next_offset
        else:
            return collected + part
    return collected


async def at_every_call(attempt: Callable[[int], Awaitable[bool]], least: int) -> None:
    """Call `attempt` with 1, 2, 3, ... until a run ended before its fault came up."""
    for n in count(1, pick(short=5, usual=1, soak=1)):
        try:
            if await attempt(n):
                break
        except (AssertionError, PenstockError) as error:
            raise AssertionError(f"fault at call {n}: {error!r}") from error
    assert n > least


async def crashed(fs: FaultyFs, ledger: Ledger, n: int, policy: str) -> bool:
    """A broker whose disk is gone from the n-th call on; whether it got to its end before."""
    async with running(ROOT, fs=fs, fsync=policy, **SETTINGS) as store:
        fs.fail(n, errno.EIO, forever=True, only=CHANGES)
        await work(store, ledger)
        return fs.failed == 0


async def work(store: TopicStore, ledger: Ledger) -> None:
    """Enough to create, share commits, roll several times and be retried."""
    try:
        topic = await store.create("t")
    except PenstockError:
        return
    for sizes, idempotent in (
        ([1], False),
        ([1, 1, 1], False),
        ([5], True),
        ([3, 1, 2], True),
        ([1, 4], False),
        ([2, 2], True),
        ([6], False),
        ([1], True),
    ):
        await ledger.append(topic, sizes, idempotent)
        if topic.appends.deleted:
            return


async def reopen(fs: FaultyFs, ledger: Ledger, lossless: bool, **settings: object) -> None:
    """Open twice (a restart must change nothing), retry, append, and look at everything."""
    async with running(ROOT, fs=fs, **SETTINGS, **settings) as store:
        if store.get("t") is None:
            assert not (ledger.acked and lossless), "the topic itself is gone"
        else:
            ledger.check(store.require("t"), lossless)
    async with running(ROOT, fs=fs, **SETTINGS, **settings) as store:
        topic = await store.create("t")
        ledger.check(topic, lossless)
        if lossless:
            await ledger.settle(topic)
            await ledger.append(topic, [2, 1], False)
            ledger.check(topic)


@pytest.mark.parametrize(
    ("policy", "how"), [*(("group", how) for how in HOWS), ("always", "reorder")]
)
async def test_power_loss_at_any_call_loses_nothing_acknowledged(policy: str, how: How) -> None:
    async def attempt(n: int) -> bool:
        fs, ledger = FaultyFs(), Ledger()
        over = await crashed(fs, ledger, n, policy)
        await reopen(fs.crash(Random(n), how), ledger, True, fsync=policy)
        return over

    await at_every_call(attempt, 50)


@pytest.mark.parametrize("policy", ["group", "interval", "never"])
async def test_a_killed_process_loses_nothing_acknowledged(policy: str) -> None:
    async def attempt(n: int) -> bool:
        fs, ledger = FaultyFs(), Ledger()
        over = await crashed(fs, ledger, n, policy)
        await reopen(fs.kill(), ledger, True, fsync=policy)
        return over

    await at_every_call(attempt, 20)


@pytest.mark.parametrize("how", HOWS)
async def test_power_loss_without_fsync_loses_nothing_in_silence_that_a_file_knows_of(
    how: How,
) -> None:
    for n in range(1, 160, pick(short=11, usual=5, soak=1)):
        fs, ledger = FaultyFs(), Ledger()
        await crashed(fs, ledger, n, "interval")
        try:
            await reopen(fs.crash(Random(n), how), ledger, False, fsync="interval")
        except AssertionError as error:
            raise AssertionError(f"power lost at call {n}: {error}") from error


@pytest.mark.parametrize("begun", [True, False], ids=["sealed", "replaced"])
@pytest.mark.parametrize("policy", ["group", "interval"])
async def test_power_loss_while_a_failed_fsync_is_repaired_undoes_or_finishes_the_repair(
    policy: str, begun: bool, form: str
) -> None:
    """The segment's data did not reach the disk, and is on its way from memory to a new one. The old
    one is sealed, or replaced if nothing of it is durable.
    """
    settings = {"fsync": policy, "fsync_interval": 3600.0}

    async def attempt(n: int, how: How) -> bool:
        fs, ledger = FaultyFs(), Ledger()
        async with running(ROOT, fs=fs, **settings) as store:
            topic = await store.create("t")
            if begun:
                await ledger.append(topic, [2, 1], True)
        durable = list(ledger.acked.items())
        async with running(ROOT, fs=fs, **settings) as store:
            topic = store.require("t")
            for sizes in ([3], [1, 2], [1]):
                await ledger.append(topic, sizes, True)
            power_loss = partial(fs.fail, n, forever=True, only=CHANGES)
            # in aiq's layout after sidecar and index: the data
            fs.fail(3 if form == "aiq" else 1, only={"sync"}, then=power_loss)
            with pytest.raises(StorageError):
                await topic.seal()
            with contextlib.suppress(StorageError):
                await topic.rest()
            over = fs.failed == 1
        after = fs.crash(Random(n), how)
        directory = log_directory(ROOT, "t", form)
        names = {path.name for path in after.files if path.parent == directory}
        written = b"".join(
            bytes(after.files[directory / name].data) for name in names if name.startswith("data")
        )
        # Until the new segment takes the old one's place, this is a power loss before an fsync.
        undone = {DATA, f"{BATCHES if form == 'aiq' else INDEX}.new"} <= names
        on_disk = all(payload in written for payload in ledger.acked.values())
        finished = policy == "group" or (on_disk and not undone)
        assert finished or not over
        await reopen(after, ledger, finished, fsync=policy)
        async with running(ROOT, fs=after, **settings) as store:
            assert readable(store.require("t"))[: len(durable)] == durable
        return over

    for how in HOWS:
        await at_every_call(partial(attempt, how=how), 15)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("policy", ["group", "interval", *(("always", "never") if SOAK else ())])
async def test_one_failing_call_is_answered_and_survived(policy: str, code: int) -> None:
    unexpected: list[dict[str, Any]] = []  # what nobody awaited any more

    async def attempt(n: int) -> bool:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: unexpected.append(what))
        fs, ledger = FaultyFs(), Ledger()
        async with running(ROOT, fs=fs, fsync=policy, **SETTINGS) as store:
            fs.fail(n, code, only=CHANGES)
            await work(store, ledger)
            over = fs.failed == 0
            fs.heal()  # a fault that work did not reach is not for the look at it
            topic = await store.create("t")
            await ledger.settle(topic)  # whatever failed works again without a restart
            await ledger.append(topic, [1], False)
            ledger.check(topic)
        await reopen(
            fs.crash(Random(n), "drop") if policy != "never" else fs.kill(),
            ledger,
            True,
            fsync=policy,
        )
        return over

    await at_every_call(attempt, 20)
    assert unexpected == []


async def test_a_disk_that_comes_and_goes_loses_nothing_acknowledged() -> None:
    """Faults at random calls of a longer run."""

    async def attempt(seed: int) -> None:
        random = Random(seed)
        fs = FaultyFs()
        ledgers = [Ledger() for _ in range(1)]
        async with running(ROOT, fs=fs, fsync="group", **SETTINGS) as store:
            topic = await store.create("t")
            for _ in range(15):
                if random.random() < 0.5:
                    code = random.choice([errno.EIO, errno.ENOSPC])
                    fs.fail(
                        random.randint(1, 12), code, forever=random.random() < 0.3, only=CHANGES
                    )
                for ledger in ledgers:
                    await ledger.append(
                        topic, [random.randint(1, 5) for _ in range(random.randint(1, 6))], False
                    )
                fs.heal()
            for ledger in ledgers:
                ledger.check(topic)
        await reopen(fs.crash(random, random.choice(HOWS)), ledgers[0], True, fsync="group")

    for seed in range(pick(short=5, usual=15, soak=200)):
        try:
            await asyncio.wait_for(attempt(seed), 30)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
