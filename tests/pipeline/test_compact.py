"""The job compact: against a dict of what each key was last, killed in the middle, run again."""

import json
import uuid
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest

from penstock.cli import pipeline as pipeline_commands
from penstock.cli import topic as topic_commands
from penstock.errors import Conflict, InvalidRequest
from penstock.net.topic_link import TopicLink
from penstock.pipeline.jobs import compact as compact_job
from penstock.pipeline.jobs import compact_in_place
from penstock.pipeline.jobs.archive_directory import Lake
from penstock.pipeline.jobs.compact import CompactOptions, compact, read_compacted
from penstock.pipeline.jobs.compact_in_place import BUCKET_OFFSETS, Kept, _groups
from penstock.pipeline.jobs.keyed_topic import Keys
from penstock.protocol import frames
from tests.pipeline.support import batch_rows
from tests.support.api import call
from tests.support.cli import CliRunner

KEY = {"key": "$.id", "tombstone": "$.deleted"}


def history(random: Random, size: int, begin: int = 0) -> list[bytes]:
    """Values, tombstones, records without a key, and what only looks like JSON."""
    collected = []
    for n in range(begin, begin + size):
        key, draw = random.randint(0, 9), random.random()
        if draw < 0.7:
            collected.append(b'{"id": %d, "n": %d}' % (key, n))
        elif draw < 0.85:
            collected.append(b'{"id": %d, "deleted": true}' % key)
        else:
            odd = (
                b'{"n": %d}' % n,
                b'{"id": %d, "n"' % key,
                b"",
                b'{"id": "\xff"}',
                b'{"id": null}',
            )
            collected.append(random.choice(odd))
    return collected


def key_of(payload: bytes) -> int | None:
    try:
        return json.loads(payload.decode()).get("id")
    except ValueError:
        return None


def expected(payloads: list[tuple[int, bytes]], *, tombstones: bool) -> list[tuple[int, bytes]]:
    """The model: a dict of what each key was last, and all that belongs to nobody."""
    last = {
        key_of(payload): (offset, payload)
        for offset, payload in payloads
        if key_of(payload) is not None
    }
    stay = [record for record in last.values() if tombstones or b"deleted" not in record[1]]
    return sorted(stay + [record for record in payloads if key_of(record[1]) is None])


def records(tcp: str, topic: str) -> list[tuple[int, bytes]]:
    return [(row["offset"], row["payload"]) for row in batch_rows(broker=tcp, topic=topic)]


def append(tcp: str, topic: str, payloads: list[bytes]) -> None:
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch(topic, payloads))


@dataclass(frozen=True)
class Place:
    """A topic with four sealed segments of 60 records and an active one of 10."""

    topic: str
    broker: str
    url: str
    before: list[tuple[int, bytes]]

    @property
    def sealed(self) -> list[tuple[int, bytes]]:
        return self.before[:240]

    @property
    def active(self) -> list[tuple[int, bytes]]:
        return self.before[240:]

    def records(self) -> list[tuple[int, bytes]]:
        return records(self.broker, self.topic)

    def options(self, **more: Any) -> CompactOptions:
        where = {"topic": self.topic, "broker": self.broker, "url": self.url}
        return CompactOptions(**where, in_place=True, **KEY, **more)

    def describe(self) -> Any:
        return call(f"{self.url}/topics/{self.topic}")

    def set_policy(self) -> Any:
        words = ["policy", self.topic, "compact", "--broker", self.broker, "--url", self.url]
        return CliRunner().invoke(topic_commands.commands, words)


@pytest.fixture
def place(server, tcp) -> Place:
    topic, random = f"place-{uuid.uuid4().hex[:8]}", Random(7)
    for begin in range(0, 240, 60):
        append(tcp, topic, history(random, 60, begin))
        call(f"{server.url}/topics/{topic}/roll", "POST")
    append(tcp, topic, history(random, 10, 240))
    return Place(topic, tcp, server.url, records(tcp, topic))


@pytest.mark.spark
def test_a_topic_is_compacted_in_place_only_with_the_policy_compact(spark, place) -> None:
    with pytest.raises(Conflict, match="penstock topic policy place-"):
        compact(spark, place.options())
    set_it = place.set_policy()
    assert (set_it.exit_code, set_it.stdout) == (0, "compact\n")


@pytest.mark.spark
def test_a_dry_run_of_a_compaction_in_place_counts_and_changes_nothing(spark, place) -> None:
    place.set_policy()
    options = ["--topic", place.topic, "--key", "$.id", "--tombstone", "$.deleted", "--in-place"]
    where = ["--broker", place.broker, "--url", place.url]
    dry = CliRunner().invoke(
        pipeline_commands.commands, ["run", "compact", *options, *where, "--dry-run"]
    )
    counts = json.loads(dry.stdout.splitlines()[-1])
    odd = [payload for _, payload in place.sealed if key_of(payload) is None]
    kept = expected(place.sealed, tombstones=True)  # they are not a day old
    assert (counts["records_before"], counts["records"]) == (240, len(kept))
    assert (counts["keyless"], counts["executed"], counts["tombstones"]) == (len(odd), False, 0)
    assert 0 < counts["broken"] < counts["keyless"]
    assert place.records() == place.before


@pytest.mark.spark
def test_a_topic_is_compacted_in_place_to_the_latest_of_each_key_wherever_the_job_dies(
    spark, place, monkeypatch
) -> None:
    place.set_policy()
    real, swaps = compact_in_place._swap, []

    def dies(*given: Any) -> Any:
        if len(swaps) == 1:
            raise KeyboardInterrupt
        swaps.append(real(*given))
        return swaps[-1]

    with monkeypatch.context() as patch:
        patch.setattr(compact_in_place, "_swap", dies)
        with pytest.raises(KeyboardInterrupt):
            compact(spark, place.options(segment_bytes=1000))
    halfway = place.records()
    assert expected(halfway, tombstones=False) == expected(place.before, tombstones=False)
    assert len(halfway) < len(place.before)
    done = compact(spark, place.options(segment_bytes=1000, tombstone_seconds=-3600.0))
    kept = expected(place.sealed, tombstones=True)
    left = expected(place.sealed, tombstones=False)
    left += kept[-1:] if b"deleted" in kept[-1][1] else []
    assert place.records() == left + place.active
    assert done.tombstones == sum(b"deleted" in payload for _, payload in kept[:-1])
    assert done.records == len(left)
    assert done.bytes_saved > 0
    described = place.describe()
    assert (described["first_offset"], described["next_offset"]) == (0, 250)
    assert described["records"] == len(left) + len(place.active)


@pytest.mark.spark
def test_a_compaction_in_place_may_seal_the_active_segment_first(spark, place) -> None:
    place.set_policy()
    compact(spark, place.options())
    everything = expected(place.records(), tombstones=True)
    append(place.broker, place.topic, [b'{"id": 1, "n": "new"}'])
    rolled = compact(spark, place.options(roll=True))
    left = place.records()
    assert (rolled.end, rolled.records) == (251, len(left))
    assert left[-1] == (250, b'{"id": 1, "n": "new"}')
    assert len(left) <= len(everything) + 1
    assert [segment["compacted"] for segment in place.describe()["segments"]] == [True, False]


@pytest.mark.spark
def test_a_compaction_in_place_removes_no_record_that_was_not_read(
    spark, place, monkeypatch
) -> None:
    place.set_policy()
    monkeypatch.setattr(compact_in_place, "_plan", lambda *_: Kept({}))
    with pytest.raises(Conflict, match=r"0 records were read where its segments have \d+"):
        compact(spark, place.options())
    assert place.records() == place.before


@pytest.mark.spark
def test_a_topic_is_compacted_into_another_once_and_then_kept_up_to_date(
    server, tcp, spark, monkeypatch
) -> None:
    topic, target = f"log-{uuid.uuid4().hex[:8]}", f"latest-{uuid.uuid4().hex[:8]}"
    where = {"topic": topic, "broker": tcp, "url": server.url, "to_topic": target, **KEY}
    append(tcp, topic, history(Random(1), 80))
    first = records(tcp, topic)
    wanted = [payload for _, payload in expected(first, tombstones=False)]

    def dies(source: Any, group: str, offset: int, real: Any = compact_job._commit) -> None:
        if not group.endswith("-plan"):
            raise KeyboardInterrupt  # all is written, and not noted
        real(source, group, offset)

    with monkeypatch.context() as patch:
        patch.setattr(compact_job, "_commit", dies)
        with pytest.raises(KeyboardInterrupt):
            compact(spark, CompactOptions(**where))
    append(tcp, topic, history(Random(2), 40, 80))  # the run under way must not grow by these
    done = compact(spark, CompactOptions(**where))
    assert (done.end, done.records) == (80, len(wanted))
    assert [payload for _, payload in records(tcp, target)] == wanted

    more = compact(spark, CompactOptions(**where))
    assert (more.first, more.end, more.tombstones) == (80, 120, 0)
    later = [payload for _, payload in expected(records(tcp, topic)[80:], tombstones=True)]
    assert [payload for _, payload in records(tcp, target)] == wanted + later
    assert compact(spark, CompactOptions(**where)).records_before == 0
    lag = call(f"{server.url}/topics/{topic}/groups/compact-{target}")["lag"]
    assert lag == 0


@pytest.mark.spark
def test_a_parquet_snapshot_is_replaced_as_a_whole(
    server, tcp, spark, tmp_path, monkeypatch
) -> None:
    topic, root = f"snap-{uuid.uuid4().hex[:8]}", str(tmp_path / "lake")
    where = {"topic": topic, "broker": tcp, "url": server.url, "to": root, **KEY}

    def snapshot() -> list[tuple[int, bytes]]:
        return sorted(
            (row.offset, bytes(row.payload)) for row in read_compacted(spark, root, topic).collect()
        )

    append(tcp, topic, history(Random(3), 60))
    first = records(tcp, topic)
    assert compact(spark, CompactOptions(**where)).records == len(expected(first, tombstones=False))
    assert snapshot() == expected(first, tombstones=False)
    append(tcp, topic, history(Random(4), 60, 60))

    def killed(self: Lake, manifest: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Lake, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            compact(spark, CompactOptions(**where))
    assert snapshot() == expected(first, tombstones=False)
    compact(spark, CompactOptions(**where))
    assert snapshot() == expected(records(tcp, topic), tombstones=False)
    assert compact(spark, CompactOptions(**where)).records_before == 0
    with pytest.raises(Conflict, match="another key"):
        compact(spark, CompactOptions(**{**where, "key": "$.n"}))
    with pytest.raises(InvalidRequest, match="the SQL of the key"):
        compact(
            spark,
            CompactOptions(
                **{**where, "key": None, "key_sql": "no_such_column", "to": str(tmp_path / "other")}
            ),
        )


def test_what_cannot_be_meant_is_refused() -> None:
    for keys in (
        {},
        {"path": "$.id", "sql": "offset"},
        {"path": "id"},
        {"sql": "x", "tombstone_path": "deleted"},
    ):
        with pytest.raises(InvalidRequest):
            Keys(**keys)
    with pytest.raises(InvalidRequest, match="to a topic, to a directory"):
        compact(None, CompactOptions(topic="t", key="$.id"))
    with pytest.raises(InvalidRequest, match="in place"):
        compact(None, CompactOptions(topic="t", key="$.id", to_topic="t"))


def test_bits_are_cut_and_segments_grouped_as_the_broker_expects() -> None:
    bits = np.zeros(3 * BUCKET_OFFSETS, np.uint8)
    bits[[0, 9, BUCKET_OFFSETS - 1, BUCKET_OFFSETS, 2 * BUCKET_OFFSETS + 5]] = 1
    packed = np.packbits(bits, bitorder="little").reshape(3, -1)
    kept = Kept({0: packed[0].tobytes(), 1: packed[1].tobytes(), 2: packed[2].tobytes()})
    for start, end in (
        (0, 10),
        (9, BUCKET_OFFSETS + 1),
        (1, 3 * BUCKET_OFFSETS),
        (BUCKET_OFFSETS, BUCKET_OFFSETS),
    ):
        assert kept.between(start, end).tolist() == bits[start:end].tolist()
    segments = [
        {"base": 10 * i, "end": 10 * i + 10, "records": 10, "bytes": 1000} for i in range(4)
    ]
    every = Kept({0: bytes([255]) * (BUCKET_OFFSETS // 8)})
    assert [len(group) for group in _groups(segments, every, 2000)] == [2, 2]
    assert [len(group) for group in _groups(segments, Kept({}), 1)] == [
        4
    ]  # nothing stays: one swap
    assert [len(group) for group in _groups(segments, every, 1)] == [1, 1, 1, 1]
