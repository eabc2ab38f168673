"""Topics on object storage: real segments, a real S3 server, and everything that goes wrong."""

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from penstock.client import TopicClient
from penstock.config.schema import LocalRetention
from penstock.errors import ConfigError, Damaged, StorageFailed
from penstock.log.layout import DATA, sealed_name
from penstock.log.tier import cache as tier_cache
from penstock.log.verify import verify
from penstock.object_store import ObjectStore
from penstock.topics.store import TopicStore
from penstock.topics.tier import tier as tier_module
from penstock.topics.tier.state import STATE, State
from penstock.topics.tier.upload import upload
from penstock.topics.tier.verify import verify_tier
from penstock.topics.topic import Topic
from tests.export.making import exports
from tests.support.form import pick
from tests.support.object_stores import (
    BUCKET,
    CREDENTIALS,
    Faults,
    azure_server,
    faulty_proxy,
    s3_server,
)
from tests.support.served import serving
from tests.support.topics import Clock, bits, everything, run, running
from tests.support.wait import eventually

pytestmark = pytest.mark.xdist_group("tier")  # they share a store


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[str, Faults]]:
    with s3_server() as server, faulty_proxy(server) as (url, faults):
        yield url, faults


@pytest.fixture
def faults(s3: tuple[str, Faults], monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    url, faults = s3
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        tier_module, "PATIENCE", tier_module.PATIENCE._replace(attempts=1, seconds=20.0)
    )
    faults.seen.clear()
    yield faults
    faults.never()


@pytest.fixture(scope="module")
def azure() -> Iterator[dict[str, str]]:
    azurite = shutil.which("azurite-blob", path=os.environ.get("PENSTOCK_AZURITE"))
    if azurite is None:
        pytest.skip(
            "Azure Blob Storage needs Azurite: npm install --prefix DIRECTORY azurite, "
            "and its node_modules/.bin in PENSTOCK_AZURITE or in PATH"
        )
    with azure_server(azurite) as env:
        yield env


@pytest.fixture(params=["s3", "file", "az"])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/store"
    if request.param == "az":
        for name, value in request.getfixturevalue("azure").items():
            monkeypatch.setenv(name, value)
        return f"az://{BUCKET}/{tmp_path.name}"
    request.getfixturevalue("faults")
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def s3_address(faults: Faults, tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{tmp_path.name}"


def tiered(directory: Path, address: str, **settings: Any) -> Any:
    settings.setdefault("tier_delay", 0.0)
    settings.setdefault("segment_bytes", 2300)
    settings.setdefault("local_retention", LocalRetention(bytes=1))
    return running(directory, tier=address, **settings)


async def fill(topic: Topic, batches: int = 8, records: int = 10, start: int = 0) -> None:
    for number in range(start, start + batches):
        await topic.append([b"%06d-%03d " % (number, i) + b"x" * 90 for i in range(records)])


async def read_all(topic: Topic) -> list[tuple[int, bytes]]:
    """Also over what was lost."""
    records: list[tuple[int, bytes]] = []
    at = topic.first_offset
    while at < topic.next_offset:
        try:
            batch = await topic.read_through(partial(topic.read, at))
        except Damaged as error:
            at = error.resume or topic.next_offset
            continue
        if not batch.count:
            break
        records += [(offset, bytes(payload)) for offset, payload in batch]
        at = batch.next_offset
    return records


async def pass_through(store: TopicStore) -> None:
    assert store.tier is not None
    assert await store.tier.synchronize(), store.tier.problem
    assert not store.tier.topic_problems


def test_segments_leave_the_disk_and_readers_do_not_notice(tmp_path: Path, address: str) -> None:
    async def body() -> None:
        async with tiered(tmp_path / "data", address) as store:
            topic = await store.create("a b/c".replace("/", "%"))
            await fill(topic)
            before = everything(topic)
            await pass_through(store)
            assert len(topic.segments) == 4
            assert [segment.local for segment in topic.segments[:-1]] == [False] * (
                len(topic.segments) - 1
            )
            assert not list(topic.directory.glob("data-*.log"))
            assert topic.first_offset == 0
            assert topic.local_offset == topic.segments[-1].base
            with pytest.raises(tier_cache.NotCached):
                topic.read(0)  # the event loop does not wait
            assert await read_all(topic) == before
            assert everything(topic) == before  # from the cache
            times = await topic.read_through(lambda: topic.timestamps(_offsets(before)))
            assert (times > 0).all()
        assert verify(tmp_path / "data/a b%c").sound, "what is local is whole by itself"
        async with tiered(tmp_path / "data", address) as store:
            topic = store.require("a b%c")
            assert topic.first_offset == 0
            assert await read_all(topic) == before
            await pass_through(store)
            await fill(topic, start=8)
            await pass_through(store)
            assert (await read_all(topic))[: len(before)] == before

    run(body())


def _offsets(records: list[tuple[int, bytes]]) -> Any:
    import numpy as np

    return np.array([offset for offset, _ in records], np.int64)


def test_a_segment_waits_for_its_delay_and_the_newest_stay_local(tmp_path: Path) -> None:
    async def body() -> None:
        clock = Clock()
        limits = LocalRetention(bytes=6500)
        async with tiered(
            tmp_path / "data",
            f"file://{tmp_path}/store",
            clock=clock,
            tier_delay=60.0,
            local_retention=limits,
        ) as store:
            topic = await store.create("t")
            await fill(topic)
            await pass_through(store)
            assert topic.tier is None
            assert store.tier is not None
            assert store.tier.lag() == 0.0
            clock.now += 61
            assert store.tier.lag() > 0.0
            await pass_through(store)
            assert topic.tier is not None
            assert topic.tier.end == topic.segments[-1].base
            assert 0 < topic.local_bytes <= 6500
            local = [segment.local for segment in topic.segments]
            assert local == sorted(local), "the newest stay"
            assert True in local[:-1]

    run(body())


def test_segments_leave_the_disk_by_age_when_the_tier_has_them(tmp_path: Path) -> None:
    async def body() -> None:
        clock = Clock()
        limits = LocalRetention(age=3600.0)
        address = f"file://{tmp_path}/store"
        async with tiered(
            tmp_path / "data", address, clock=clock, tier_delay=60.0, local_retention=limits
        ) as store:
            topic = await store.create("t")
            await fill(topic, batches=4)
            await topic.seal()
            clock.now += 1800
            await fill(topic, batches=4, start=4)
            await topic.seal()
            await fill(topic, batches=1, start=8)
            before = everything(topic)
            await pass_through(store)
            assert all(segment.local for segment in topic.segments), "none is an hour old"
            clock.now += 1801
            await pass_through(store)
            assert [segment.local for segment in topic.segments] == [
                segment.base >= 40 for segment in topic.segments
            ], "the older half"
            clock.now += 100 * 86_400
            await pass_through(store)
            assert [segment.local for segment in topic.segments[-2:]] == [False, True], (
                "the newest segment stays, whatever its age"
            )
            assert await read_all(topic) == before

    run(body())


def test_a_clock_that_was_ahead_holds_up_no_upload(tmp_path: Path) -> None:
    async def body() -> None:
        clock = Clock()
        address = f"file://{tmp_path}/store"
        async with tiered(tmp_path / "data", address, clock=clock, tier_delay=60.0) as store:
            topic = await store.create("t")
            clock.now += 365 * 86_400
            await fill(topic)
            clock.now -= 365 * 86_400
            await fill(topic, start=8)
            await pass_through(store)
            assert topic.tier is not None
            assert topic.tier.end == topic.segments[-1].base > 80

    run(body())


def test_a_failing_store_delays_and_loses_nothing(
    tmp_path: Path, s3_address: str, faults: Faults
) -> None:
    """From one request on all fail, each time later and in another way; appends and reads go on."""

    async def body() -> None:
        async with tiered(tmp_path / "data", s3_address) as store:
            topic = await store.create("t")
            await fill(topic)
            before = everything(topic)
            failed = 0
            kinds = ["throttle", "error", "cut", "lost"]
            for skip in range(8):
                faults.choose = _from(skip, kinds[skip % 4])
                assert store.tier is not None
                if not await store.tier.synchronize():
                    failed += 1
                    assert store.tier.problem
                await fill(topic, batches=2, start=100 + skip)
                faults.never()
                assert (await read_all(topic))[: len(before)] == before
            assert failed > 4
            await pass_through(store)
            everything_there = await read_all(topic)
        assert everything_there[: len(before)] == before
        async with tiered(tmp_path / "data", s3_address) as store:
            await pass_through(store)
            assert await read_all(store.require("t")) == everything_there

    run(body())


def _from(skip: int, fault: str) -> Any:
    remaining = skip

    def choose(method: str, path: str) -> str | None:
        nonlocal remaining
        remaining -= 1
        return fault if remaining < 0 else None

    return choose


def test_wrong_bytes_are_noticed_on_the_way_up_and_down(
    tmp_path: Path, s3_address: str, faults: Faults
) -> None:
    async def body() -> None:
        async with tiered(tmp_path / "data", s3_address) as store:
            topic = await store.create("t")
            await fill(topic)
            before = everything(topic)
            faults.choose = lambda method, path: (
                "wrong" if method == "GET" and path.endswith(".log") else None
            )
            assert store.tier is not None
            await store.tier.synchronize()
            assert "checksum" in store.tier.topic_problems["t"]
            assert topic.tier is None, "nothing is named that was not read back"
            assert all(segment.local for segment in topic.segments)
            faults.never()
            await pass_through(store)
            assert not topic.segments[0].local
            faults.times(1, "wrong", "GET", ".log")
            assert await read_all(topic) == before, "the way spoilt it once"
            faults.times(1, "slow", "GET")
            assert await read_all(topic) == before

    run(body())


def test_two_brokers_never_write_one_tier(tmp_path: Path, address: str) -> None:
    async def body() -> None:
        async with tiered(tmp_path / "one", address) as one:
            await fill(await one.create("t"))
            await pass_through(one)
            async with tiered(tmp_path / "two", address) as two:
                other = await two.create("t")
                await fill(other)
                assert two.tier is not None
                assert not await two.tier.synchronize()
                assert two.tier.fenced
                assert "take-over" in str(two.tier.problem)
                await fill(other, start=50)  # appends go on
                assert all(segment.local for segment in other.segments)
                ownership = tier_module.Ownership(
                    two.tier.store, tmp_path / "two" / ".penstock" / tier_module.DIRECTORY
                )
                assert ownership.take_over() is not None
                await pass_through(two)
                topic = one.require("t")
                await fill(topic, start=8)
                version = topic.tier.version if topic.tier else 0
                assert one.tier is not None
                assert not await one.tier.synchronize()
                assert one.tier.fenced
                assert topic.tier is not None
                assert topic.tier.version == version

    run(body())


def test_a_start_from_the_tier_has_everything_that_was_there(tmp_path: Path, address: str) -> None:
    from penstock.log.producers import Producer

    async def body() -> None:
        producer = Producer(bytes(range(16)), 7)
        async with tiered(tmp_path / "one", address) as one:
            topic = await one.create("t")
            await fill(topic)
            await topic.append([b"once"], producer)
            await topic.set_policy("compact")
            await topic.seal()
            records = everything(topic)
            await one.create("empty")
            assert one.tier is not None
            one.tier.groups = lambda: [_committed("g", topic, 33)]
            await pass_through(one)
            tail = await topic.append([b"only", b"here"])
            await one.tier.synchronize()  # the state says that these were given
            incarnation = topic.incarnation
        async with tiered(tmp_path / "two", address, adopt=True) as two:
            topic = two.require("t")
            assert topic.incarnation == incarnation
            assert topic.policy == "compact"
            assert await read_all(topic) == records
            assert topic.next_offset >= tail.first_offset + 2, "offsets are not given again"
            (lost,) = (place for place in topic.damage if place["outcome"] == "lost")
            assert (lost["lost_from"], lost["lost_to"]) == (len(records), len(records) + 2)
            again = await topic.append([b"once"], producer)
            assert again.first_offset == len(records) - 1, "the producer is known"
            following = await topic.append([b"new"])
            assert two.get("empty") is not None
            offsets = tmp_path / "two/.penstock/groups/offsets.log"
            assert b'["commit","g","t","%b",33]' % incarnation.encode() in offsets.read_bytes()
            await topic.seal()
            await pass_through(two)
            assert (await read_all(topic))[-1] == (following.first_offset, b"new")
        async with tiered(tmp_path / "two", address, adopt=True) as two:
            assert (await read_all(two.require("t")))[:-1] == records

    run(body())


def _committed(group: str, topic: Topic, offset: int) -> Any:
    from penstock.topics.offsets_journal import CommittedOffset

    return CommittedOffset(group, topic.name, topic.incarnation, offset)


def test_retention_and_delete_reach_the_tier(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/store"

    async def body() -> None:
        async with tiered(
            tmp_path / "data", address, tier_grace=0.0, retention_bytes=8_000
        ) as store:
            topic = await store.create("t")
            await fill(topic, batches=14)
            await pass_through(store)
            objects = ObjectStore(address)
            before = objects.names()
            await store.maintain()
            assert topic.first_offset > 0
            assert topic.tier is not None
            assert topic.tier.segments[0].base == topic.first_offset
            assert objects.names() == before, "objects go later"
            remaining = await read_all(topic)
            assert store.tier is not None
            assert await store.tier.collect() > 0
            assert objects.names() < before
            assert await read_all(topic) == remaining
            await store.delete("t")
            await pass_through(store)
            await store.tier.collect()
            assert objects.names() == {"owner.json", "state.json"}

    run(body())


def test_a_store_that_is_away_holds_up_retention_and_nothing_else(
    tmp_path: Path, s3_address: str, faults: Faults
) -> None:
    async def body() -> None:
        async with tiered(tmp_path / "data", s3_address, retention_bytes=8_000) as store:
            topic = await store.create("t")
            await fill(topic)
            await pass_through(store)
            faults.always("error")
            await fill(topic, batches=14, start=8)
            await store.maintain()
            assert topic.first_offset == 0, "nothing is deleted that a manifest names"
            assert store.tier is not None
            assert not await store.tier.synchronize()
            assert any(segment.local for segment in topic.segments[:-1])
            with pytest.raises(Exception, match="does not answer"):
                await topic.read_through(lambda: topic.read(0))
            await store.delete("t")
            faults.never()
            await pass_through(store)
            assert not any(
                name.endswith("manifest.json") for name in ObjectStore(s3_address).names()
            )

    run(body())


def test_compaction_swaps_in_the_tier_with_one_write(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/store"

    async def body() -> None:
        async with tiered(tmp_path / "data", address, tier_grace=0.0) as store:
            topic = await store.create("t")
            await topic.set_policy("compact")
            await fill(topic, batches=14)
            await pass_through(store)
            bases = [segment.base for segment in topic.segments[:3]]
            end = topic.segments[2].end
            keep = [3, 5]
            await store.compact("t", bases, bits(keep, end))
            assert topic.tier is not None
            assert [one.superseded for one in topic.tier.segments][:4] == [True] * 3 + [False]
            after = await read_all(topic)
            assert [offset for offset, _ in after if offset < end] == keep
        # A start in between counts what is local, an adoption what the manifest names.
        async with tiered(tmp_path / "data", address, tier_grace=0.0) as store:
            topic = store.require("t")
            assert await read_all(topic) == after
            await pass_through(store)
            assert topic.tier is not None
            assert not any(one.superseded for one in topic.tier.segments)
            assert topic.tier.segments[0].compacted
            assert not topic.segments[0].local
            assert store.tier is not None
            assert await store.tier.collect() > 0
            assert await read_all(topic) == after
        async with tiered(tmp_path / "two", address, adopt=True) as two:
            adopted = await read_all(two.require("t"))
            assert adopted == after[: len(adopted)]
            assert len(adopted) > len(keep)

    run(body())


def test_an_interrupted_removal_of_local_files_is_finished(tmp_path: Path) -> None:
    async def body() -> None:
        address = f"file://{tmp_path}/store"
        async with tiered(tmp_path / "data", address, local_retention=LocalRetention()) as store:
            topic = await store.create("t")
            await fill(topic)
            await pass_through(store)
            before = everything(topic)
            base = topic.segments[0].base
        (tmp_path / "data/t" / sealed_name("index.idx", base)).unlink()
        async with tiered(tmp_path / "data", address) as store:
            topic = store.require("t")
            assert not topic.damage
            assert not (topic.directory / sealed_name(DATA, base)).exists()
            assert not topic.segments[0].local
            assert await read_all(topic) == before

    run(body())


def size_of(directory: Path) -> int:
    with suppress(FileNotFoundError):  # removed while we look
        return sum(path.stat().st_size for path in directory.iterdir())
    return 1 << 60


def test_the_cache_stays_within_its_limit(tmp_path: Path) -> None:
    async def body() -> None:
        address = f"file://{tmp_path}/store"
        async with tiered(tmp_path / "data", address, tier_cache=16_000) as store:
            topic = await store.create("t")
            await fill(topic, batches=30)
            before = everything(topic)
            await pass_through(store)
            assert await read_all(topic) == before
            directory = tmp_path / "data/.penstock" / tier_module.CACHE
            # blocks that are read ahead may still be coming, and make room when they are there
            await eventually(lambda: size_of(directory) <= 16_000)

    run(body())


def test_a_lost_copy_of_the_manifest_is_read_from_the_tier(tmp_path: Path) -> None:
    async def body() -> None:
        address = f"file://{tmp_path}/store"
        async with tiered(tmp_path / "data", address) as store:
            topic = await store.create("t")
            await fill(topic)
            await pass_through(store)
            before = await read_all(topic)
        (tmp_path / "data/t/tier.json").write_bytes(b"{}")
        async with tiered(tmp_path / "data", address) as store:
            topic = store.require("t")
            assert topic.first_offset > 0
            await fill(topic, start=8)
            await pass_through(store)
            assert (await read_all(topic))[: len(before)] == before

    run(body())


def test_a_crash_between_the_manifest_and_its_copy_leaves_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is one write ahead: of an upload, of retention, and of a swap."""
    address = f"file://{tmp_path}/store"

    async def crash(*_: object) -> None:
        raise StorageFailed("killed here")

    async def body() -> None:
        limits = {"retention_bytes": 8_000, "local_retention": LocalRetention()}
        async with tiered(tmp_path / "data", address, **limits) as store:
            topic = await store.create("t")
            await fill(topic, batches=14)
            before = everything(topic)
            assert store.tier is not None
            with monkeypatch.context() as patch:
                patch.setattr(store.tier, "_write_local", crash)
                assert not await store.tier.synchronize()
            assert topic.tier is None
        async with tiered(tmp_path / "data", address, **limits) as store:
            topic = store.require("t")
            await pass_through(store)
            assert await read_all(topic) == before
            assert store.tier is not None
            with monkeypatch.context() as patch:
                patch.setattr(store.tier, "_write_local", crash)
                await store.maintain()
            assert topic.first_offset == 0, "the local files are still there"
        async with tiered(tmp_path / "data", address, **limits) as store:
            topic = store.require("t")
            assert await read_all(topic) == before
            await store.tier.synchronize()  # type: ignore[union-attr]
            await store.maintain()
            assert topic.first_offset > 0
            remaining = await read_all(topic)
            assert remaining == before[-len(remaining) :]
            await pass_through(store)

    run(body())


def test_verify_finds_what_is_missing_and_what_was_changed(tmp_path: Path) -> None:
    async def body() -> None:
        async with tiered(tmp_path / "data", f"file://{tmp_path}/store") as store:
            await fill(await store.create("t"))
            await fill(await store.create("u"))
            await pass_through(store)

    run(body())
    store = ObjectStore(f"file://{tmp_path}/store")
    reports = verify_tier(store, set(), lambda _: None)
    assert [(one.topic, one.sound, one.unnamed) for one in reports] == [
        ("t", True, 0),
        ("u", True, 0),
    ]
    directory = tmp_path / "store/topics" / reports[0].incarnation
    first, second, *_ = sorted(directory.glob("*.log"))
    first.unlink()
    data = bytearray(second.read_bytes())
    data[100] ^= 1
    second.write_bytes(data)
    (report,) = verify_tier(store, {"t"}, lambda _: None)
    assert [finding.file.rpartition("/")[2] for finding in report.findings] == [
        first.name,
        second.name,
    ]
    assert report.findings[0].what == "is missing"
    assert "checksum" in report.findings[1].what


def test_an_upload_ends_when_its_broker_stops(tmp_path: Path) -> None:
    async def body() -> None:
        async with tiered(tmp_path / "data", f"file://{tmp_path}/store") as store:
            topic = await store.create("t")
            await fill(topic)
            assert store.tier is not None
            await store.tier.stop()
            with pytest.raises(StorageFailed, match="given up"):
                upload(store.tier.store, topic.incarnation, topic.segments[0], lambda: True)
            assert ObjectStore(f"file://{tmp_path}/store").names() == set()

    run(body())


def test_readers_get_over_the_offsets_that_a_start_from_the_tier_leaves_out(
    tmp_path: Path,
) -> None:
    """Those at the end of what there is wait for the next record, without asking again and again,
    and get it: a stream, a client, a group, a route."""
    address = f"file://{tmp_path}/store"

    async def body() -> None:
        async with tiered(tmp_path / "one", address) as one:
            topic = await one.create("t")
            await fill(topic)
            await topic.seal()
            await pass_through(one)
            end = topic.next_offset
        adopting = {"tier": address, "adopt": True, "scrub_interval": 0}
        async with (
            serving(tmp_path / "two", keep_alive=100.0, **adopting) as served,
            TopicClient(served.address) as client,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.http.port}", timeout=60) as http,
            http.stream("GET", f"/topics/t/stream?offset={end}") as stream,
            client.reader("t", end) as reader,
            client.reader("t", group="g", max_records=30) as member,
        ):
            topic = served.topics.require("t")
            assert topic.next_offset > end + 1_000_000
            assert topic.first_from(5) == 5
            assert topic.first_from(end) == topic.next_offset
            reads = Mock(read=Mock(side_effect=topic.read), raw=Mock(side_effect=topic.raw))
            topic.read, topic.raw = reads.read, reads.raw  # type: ignore[method-assign]
            spec = {"source": {"topic": "t"}, "destination": {"type": "topic", "topic": "copy"}}
            async with exports(
                tmp_path / "x", {"r": spec | {"batch": {"linger": 0}}}, topics=served.topics
            ) as routes:
                batches = member.batches()
                grouped: list[int] = []
                while len(grouped) < end:
                    grouped += [record.offset for record in await anext(batches)]
                first = asyncio.ensure_future(anext(aiter(reader)))
                last = asyncio.ensure_future(anext(batches))
                lines = stream.aiter_lines()
                event = asyncio.ensure_future(anext(lines))
                await eventually(lambda: routes.get("r").queue.books.delivered == end)
                before = len(reads.mock_calls)
                await asyncio.sleep(0.2)
                assert len(reads.mock_calls) <= before + 5, "nobody asks again and again"
                assert not any(task.done() for task in (first, last, event))
                appended = (await topic.append([b"new"])).first_offset
                async with asyncio.timeout(30):
                    assert await event == f"id: {appended}"
                    assert (await first).offset == appended
                    assert [record.offset for record in await last] == [appended]
                await eventually(lambda: routes.get("r").queue.books.delivered == end + 1)
            assert grouped == [*range(end)]

    run(body())


def test_a_store_that_ignores_conditions_is_no_tier(
    tmp_path: Path, s3_address: str, faults: Faults
) -> None:
    """Some S3 servers take `If-None-Match` and `If-Match` and do not look at them."""
    faults.drop_headers = ("if-none-match", "if-match")

    async def body() -> None:
        async with tiered(tmp_path / "data", s3_address) as store:
            topic = await store.create("t")
            await fill(topic)
            assert store.tier is not None
            assert not await store.tier.synchronize()
            assert "ignores the conditions of writes" in str(store.tier.problem)
            assert topic.tier is None
            faults.drop_headers = ()
            await pass_through(store)

    run(body())


def test_the_state_of_a_clean_stop_is_taken_back_before_anything_is_appended(
    tmp_path: Path,
) -> None:
    """Otherwise a start from the tier would give offsets again that readers have seen."""
    address = f"file://{tmp_path}/store"

    async def body() -> None:
        async with tiered(tmp_path / "one", address) as one:
            await fill(await one.create("t"))
            assert one.tier is not None
            await one.tier.start()
            await one.tier.stop()
        assert _state(address).clean
        async with tiered(tmp_path / "copy", address, adopt=True) as copy:
            assert copy.require("t").next_offset == 80, "a clean stop leaves nothing out"
        async with tiered(tmp_path / "copy", address) as copy:
            assert copy.tier is not None
            await copy.tier.start()
            assert not _state(address).clean
            copy.tier.close()

    run(body())


def _state(address: str) -> State:
    return State.parse(ObjectStore(address).get(STATE)[0])


def test_more_offsets_are_left_out_the_older_the_state_is(tmp_path: Path) -> None:
    async def body() -> None:
        address = f"file://{tmp_path}/store"
        async with tiered(tmp_path / "one", address) as one:
            await fill(await one.create("t"))
            await pass_through(one)
        hour_ago = time.time() - 3600
        os.utime(tmp_path / "store/state.json", (hour_ago, hour_ago))
        async with tiered(tmp_path / "two", address, adopt=True) as two:
            assert two.require("t").next_offset >= 80 + 3600 * 1_000_000

    run(body())


def test_a_topic_that_was_deleted_does_not_come_back_in_place_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is lost at any step between the deletion and the state that says so."""
    address = f"file://{tmp_path}/store"

    async def body() -> None:
        async with tiered(tmp_path / "one", address, tier_grace=0.0) as one:
            assert one.tier is not None
            await fill(await one.create("t"))
            await pass_through(one)
            old = one.require("t").incarnation
            await one.delete("t")
            topic = await one.create("t")
            await fill(topic, batches=3, start=100)
            await topic.seal()
            after = everything(topic)
            done = one.tier._write_state
            with monkeypatch.context() as patch:
                patch.setattr(one.tier, "_finish_deletions", _nothing)
                await one.tier.synchronize()
                assert topic.tier is None, "its predecessor goes first"
            for step in ("deleted", "copied"):
                with monkeypatch.context() as patch:
                    patch.setattr(one.tier, "_write_state", _nothing)
                    patch.setattr(one.tier, "_copy_topics", one.tier._copy_topics)
                    if step == "deleted":
                        patch.setattr(one.tier, "_copy_topics", _nothing)
                    await one.tier.synchronize()
                shutil.copytree(tmp_path / "store", tmp_path / step)
                async with tiered(
                    tmp_path / f"from {step}", f"file://{tmp_path}/{step}", adopt=True
                ) as two:
                    adopted = two.require("t")
                    assert adopted.incarnation == topic.incarnation
                    records = await read_all(adopted)
                    assert records == (after if step == "copied" else [])
            await done(clean=False)
            await one.tier.collect()
            assert not any(old in name for name in ObjectStore(address).names())

    run(body())


async def _nothing(*_: object, **__: object) -> None:
    return None


def test_a_volume_of_its_own_and_half_written_files_are_no_obstacle(tmp_path: Path) -> None:
    """The root of an ext4 file system has a directory of its own; a writer that was killed leaves
    files that nobody lists."""
    address = f"file://{tmp_path}/store"

    async def body() -> None:
        async with tiered(tmp_path / "one", address) as one:
            await fill(await one.create("t"))
            await pass_through(one)
            incarnation = one.require("t").incarnation
        left = tmp_path / "store/topics" / incarnation / "0-0-0.log#1"
        left.write_bytes(b"half")
        (tmp_path / "two/lost+found").mkdir(parents=True)
        async with tiered(tmp_path / "two", address, adopt=True) as two:
            assert two.names() == ["t"]
            await pass_through(two)
        assert not left.exists()
        assert list((tmp_path / "two/lost+found").iterdir()) == []

    run(body())


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("s3://bucket/a#b", "no #"),
        ("s3://bucket/a?b", "no ?"),
        ("s3://bucket/a//b", "empty path segment"),
        ("file://tier", "absolute"),
        ("ftp://x/y", "one of"),
    ],
)
def test_an_address_that_would_mean_another_place_is_refused(address: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ObjectStore(address, create=False)
    assert why in str(refused.value)
    assert "Debug" not in str(refused.value)


@pytest.mark.parametrize("prefix", ["a b", "ü/ß", "a+b&c=d'e", "x%y"])
def test_a_prefix_may_have_odd_characters(tmp_path: Path, s3_address: str, prefix: str) -> None:
    address = f"s3://{BUCKET}/{tmp_path.name}/{prefix}"

    async def body() -> None:
        async with tiered(tmp_path / "data", address) as store:
            topic = await store.create(prefix.replace("/", "%"))
            await fill(topic)
            before = everything(topic)
            await pass_through(store)
            assert await read_all(topic) == before

    run(body())


def test_a_crash_before_any_write_to_the_store_leaves_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads, the swap of a compaction, retention, garbage, a deletion: whichever write is the
    first that fails, the manifests name only what is there, the owner goes on where it was, and
    another machine could start. The long form fails at every one."""
    settings = {"tier_grace": 0.0, "retention_bytes": 14_000}
    writes = allowed = 0

    def counted(method: str) -> None:
        call = getattr(ObjectStore, method)

        def counting(store: ObjectStore, *args: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes > allowed:
                raise StorageFailed("killed here")
            return call(store, *args)

        monkeypatch.setattr(ObjectStore, method, counting)

    async def work(data: Path, address: str) -> tuple[list[int], set[int]]:
        """What the topic may have at the end, and what has to be there."""
        async with tiered(data, address, **settings) as store:
            assert store.tier is not None
            topic = await store.create("t")
            await topic.set_policy("compact")
            await fill(topic, batches=8)
            await fill(await store.create("u"), batches=3)
            await store.tier.synchronize()
            bases = [segment.base for segment in topic.segments[:3]]
            end = topic.segments[2].end
            await store.compact("t", bases, bits([3, 5], end))
            await store.tier.synchronize()
            await fill(topic, batches=8, start=8)
            await store.maintain()
            await store.tier.synchronize()
            await store.delete("u")
            await store.tier.synchronize()
            with contextlib.suppress(StorageFailed):
                await store.tier.collect()
            return [3, 5, *range(end - 1, 160)], set(range(100, 160))

    async def check(directory: Path, address: str, may: list[int], must: set[int]) -> None:
        reports = verify_tier(ObjectStore(address), set(), lambda _: None)
        assert not [report for report in reports if not report.sound]
        shutil.copytree(directory / "store", directory / "copy")
        async with tiered(directory / "new", f"file://{directory}/copy", adopt=True) as new:
            for name in new.names():
                offsets = [offset for offset, _ in await read_all(new.require(name))]
                assert offsets == sorted(set(offsets))
        for _ in range(2):  # as it is, and when everything was caught up
            async with tiered(directory / "data", address, **settings) as store:
                assert store.tier is not None
                offsets = [offset for offset, _ in await read_all(store.require("t"))]
                assert offsets == may[may.index(offsets[0]) :], "a hole"
                assert must <= set(offsets)
                await store.tier.synchronize()
                assert not store.tier.problem
                assert not store.tier.topic_problems

    async def body() -> None:
        nonlocal writes, allowed
        for method in ("write", "put_if", "delete"):
            counted(method)
        last = 1 << 30
        for first in range(3, 200, pick(short=15, usual=5, soak=1)):  # three make it the owner
            directory = tmp_path / str(first)
            directory.mkdir()
            address = f"file://{directory}/store"
            writes, allowed = 0, min(first, last)
            may, must = await work(directory / "data", address)
            last, allowed = writes, 1 << 30
            await check(directory, address, may, must)
            if last <= first:
                break
        assert last > 30

    run(body())
