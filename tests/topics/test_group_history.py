"""What groups on topics did per minute, and how long after the append."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from penstock.metrics import Metrics
from penstock.protocol.latency import bucket_of
from penstock.topics import group_history
from penstock.topics.group_history import GroupHistory, LagMinute, latencies
from penstock.topics.groups import Groups
from tests.support.topics import running


class Timed:
    """A topic of which only the append times matter: batches of given sizes at given times."""

    name, first_offset = "t", 0

    def __init__(self, batches: list[tuple[float, int]], first_offset: int = 0) -> None:
        self.all = np.concatenate([np.full(size, round(at * 1e6)) for at, size in batches])
        self.next_offset, self.first_offset, self.asked = len(self.all), first_offset, 0

    def timestamps(self, offsets: Any) -> Any:
        return self.all[offsets]

    def offset_at(self, at: float) -> int:
        self.asked += 1
        return int(np.searchsorted(self.all, round(at * 1e6)))

    def records_from(self, offset: int) -> int:
        return self.next_offset - max(offset, self.first_offset)


@pytest.mark.parametrize("seed", range(20))
def test_every_record_falls_into_the_bucket_of_its_age(seed: int) -> None:
    random = Random(seed)
    now, at = 1_700_000_000.0, 1_700_000_000.0 - 10 ** random.uniform(0, 5)
    batches = []
    for _ in range(random.randint(1, 40)):
        at = min(
            now - 0.01, at + (now - at) * random.random() ** 3
        )  # times are in microseconds: no hair's breadths
        batches.append((at, random.randint(1, 50)))
    topic: Any = Timed(batches, random.randint(0, 20))
    start, end = sorted(random.randint(0, topic.next_offset) for _ in range(2))
    expected: dict[int, int] = {}
    for when in topic.all[max(start, topic.first_offset) : end]:
        bucket = bucket_of(now - when / 1e6)
        expected[bucket] = expected.get(bucket, 0) + 1
    times = latencies(topic, start, end, now)
    assert times == expected


def test_a_million_records_of_one_age_are_counted_with_one_look() -> None:
    topic: Any = Timed([(1000.0, 1_000_000)])
    assert latencies(topic, 0, 1_000_000, 1002.0) == {bucket_of(2.0): 1_000_000}
    assert topic.asked == 0


def test_the_bytes_of_a_line() -> None:
    minute = LagMinute(1_700_000_040, "t", "g", 7, 2, None, {81: 4, 80: 3})
    assert minute.line() == b'3bd791b6 [1700000040,"t","g",7,2,null,[80,81],[3,4]]\n'


async def test_commits_and_leases_are_counted_and_outlive_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path / "topics") as store:
        topic = await store.create("t")
        await topic.append([b"x"] * 100)

        pool = ThreadPoolExecutor(1)

        def groups() -> Groups:
            return Groups(tmp_path / "groups", store, pool=pool, metrics=Metrics())

        one = groups()
        await one.start()
        await one.commit("reader", "t", 10)  # where it begins: what it read before is not known
        await one.commit("reader", "t", 30)
        await one.commit("reader", "t", 20)  # goes back: nothing is done by that
        lease = one.lease("workers", "t", "m", 40)
        assert lease is not None
        one.release(lease.lease_id)
        again = one.lease("workers", "t", "m", 40)
        assert again is not None
        await one.complete(again.lease_id)
        await one.stop()
        other = groups()
        await other.start()
        await other.commit("reader", "t", 50)
        result = await other.history.between(0, 1 << 40)
        by_group: dict[str, LagMinute] = {}
        for minute in result:
            by_group.setdefault(minute.group, LagMinute(0, "t", minute.group)).add(minute)
        reader, workers = by_group["reader"], by_group["workers"]
        assert (reader.acked, reader.retried, reader.lag) == (50, 0, 50)
        assert (workers.acked, workers.retried, workers.lag) == (40, 40, 60)
        assert sum(reader.latency.values()) == 50
        await other.stop()
        pool.shutdown()


async def test_minutes_are_written_when_they_are_over_and_old_ones_are_left_behind(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(group_history, "MAX_FILE_BYTES", 150)

    now = [600.0]
    topic: Any = Timed([(500.0, 1000)])
    with ThreadPoolExecutor(1) as pool:
        minutes = GroupHistory(tmp_path, pool=pool, clock=lambda: now[0])
        for _ in range(10):
            minutes.committed(topic, "g", 0, 5, 7)
            now[0] += 60
            minutes._over()  # its timer runs by the event loop's clock, which takes a minute
            assert minutes._writing is not None
            await minutes._writing
        with (tmp_path / "minutes.log").open("ab") as file:
            file.write(b"torn")
        result = await minutes.between(0, 1 << 40)
        assert [minute.at for minute in result] == sorted({minute.at for minute in result})
        assert 3 <= len(result) < 10  # bounded
        assert result[-1] == LagMinute(1140, "t", "g", 5, 0, 7, {bucket_of(640.0): 5})
        assert (tmp_path / "minutes.log").stat().st_size < 500
        assert await minutes.between(1140, 1200) == result[-1:]
        await minutes.stop()
