"""Routes to a destination that misbehaves: what arrives, under which key, what the books say."""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from penstock.config import Config
from penstock.config.schema import Exporter, SendQueueSettings
from penstock.errors import Conflict, InvalidRequest, Unavailable
from penstock.export.manager import Exports
from penstock.metrics import Metrics
from tests.export.making import POOL, FakeClock, exports, http_route, kill, status_of
from tests.export.scripted import HANG, RESET, TAKE_AND_RESET, ScriptedDestination, record
from tests.support.form import pick
from tests.support.wait import Stopwatch, eventually


def books(route: Any) -> dict[str, Any]:
    return status_of(route)["queue"]["accounting"]


def assert_balanced(route: Any) -> None:
    result = books(route)
    total = (
        result["delivered"]
        + result["deadLettered"]
        + sum(result["dropped"].values())
        + result["queued"]
    )
    assert result["accepted"] == total


async def delivered(route: Any, timeout: float = 60) -> None:
    await eventually(lambda: route.queue.count == 0, timeout)


async def slowly(status: int) -> int:
    await asyncio.sleep(0.03)
    return status


FAULTS = {
    "refused connections": None,
    "500": lambda ids, number: 500 if number <= 3 else 200,
    "429 with Retry-After": lambda ids, number: (
        (429, {"Retry-After": "0.05"}) if number <= 2 else 200
    ),
    "408": lambda ids, number: 408 if number <= 2 else 200,
    "resets": lambda ids, number: RESET if number <= 3 else 200,
    "lost answers": lambda ids, number: TAKE_AND_RESET if number <= 3 else 200,
    "hangs": lambda ids, number: HANG if number <= 2 else 200,
    "slowness": lambda ids, number: slowly(200),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("split", [False, True], ids=["unified", "split"])
async def test_every_record_arrives_whatever_the_destination_does(
    tmp_path: Path, fault: str, split: bool
):
    destination = ScriptedDestination(FAULTS[fault] or (lambda ids, number: 200))
    await destination.open()
    if FAULTS[fault] is None:
        destination.close()
    spec = http_route(
        destination.url,
        target={
            "timeout": "500ms" if fault == "hangs" else "10s"
        },  # a busy machine is no fault of the destination
        circuit_breaker={"threshold": 2, "reset_timeout": "50ms"},
        pipeline_split={"enabled": split, "preparer_count": 1, "sender_count": 1},
        max_concurrent_sends=1,
    )
    async with exports(tmp_path, {"r": spec}) as running:
        route = running.get("r")
        await route.push([record(number) for number in range(95)])
        if FAULTS[fault] is None:
            await eventually(lambda: route.breaker.state == "open")
            await destination.open()
        await delivered(route)
        assert sorted(set(destination.ids)) == list(range(95))
        answered = [
            each for received in destination.ledger if received.answered for each in received.ids
        ]
        if split:  # what is prepared already may overtake what failed
            answered.sort()
        assert answered == list(range(95)), "order is kept with one worker"
        for received in destination.ledger:  # duplicates carry the same key
            assert received.key.startswith(f"r-{received.ids[0] // 10 + 1}-")
        assert books(route)["delivered"] == 95
        assert_balanced(route)
    destination.close()


async def test_a_poison_record_is_alone_in_the_dead_letters_and_can_be_replayed(tmp_path: Path):
    poison = {13, 14, 58}
    async with (
        ScriptedDestination(lambda ids, number: 400 if poison & set(ids) else 200) as destination,
        exports(tmp_path, {"r": http_route(destination.url)}) as running,
    ):
        route = running.get("r")
        await route.push([record(number) for number in range(100)])
        await delivered(route)
        assert destination.ids == [number for number in range(100) if number not in poison]
        letters = await route.letters(0, 10_000)
        assert [json.loads(letter.record)["id"] for letter in letters] == [13, 14, 58]
        assert {letter.reason for letter in letters} == {"refused"}
        assert books(route) == {
            "accepted": 100,
            "delivered": 97,
            "deadLettered": 3,
            "dropped": {},
            "queued": 0,
        }
        assert route.breaker.state == "closed", (
            "bad data says nothing about the destination's health"
        )
        poison.clear()
        assert await route.replay() == 3
        await delivered(route)
        assert destination.ids[-3:] == [13, 14, 58]
        assert not await route.letters(0, 10_000)
        assert_balanced(route)


async def test_a_batch_that_is_too_large_is_split_and_a_record_that_is_too_large_is_dead(
    tmp_path: Path,
):
    def rule(ids: list[int], number: int) -> int:
        return 413 if len(ids) > 3 or 7 in ids else 200

    async with (
        ScriptedDestination(rule) as destination,
        exports(tmp_path, {"r": http_route(destination.url)}) as running,
    ):
        route = running.get("r")
        await route.push([record(number) for number in range(20)])
        await delivered(route)
        assert destination.ids == [number for number in range(20) if number != 7]
        assert [letter.reason for letter in await route.letters(0, 10_000)] == ["too_large"]
        assert_balanced(route)


async def test_a_cut_batch_does_not_repeat_what_went_through_and_keeps_its_keys(tmp_path: Path):
    failed: list[list[int]] = []

    def rule(ids: list[int], number: int) -> int:
        if 3 in ids:
            return 400
        if ids == [4, 5, 6, 7, 8, 9] or (5 in ids and len(failed) < 2):
            failed.append(ids)
            return 503
        return 200

    async with (
        ScriptedDestination(rule) as destination,
        exports(tmp_path, {"r": http_route(destination.url)}) as running,
    ):
        route = running.get("r")
        await route.push([record(number) for number in range(10)])
        await delivered(route)
        assert destination.ids == [0, 1, 2, 4, 5, 6, 7, 8, 9]
        assert len({received.key for received in destination.ledger}) == len(destination.ledger)
        part = [key for key in destination.keys if key.endswith("-5-9")]
        assert len(part) == 3
        assert len(set(part)) == 1, "the same part, the same key, at every attempt"
        assert_balanced(route)


@pytest.mark.parametrize("status", [401, 403, 301, 404, 405])
async def test_a_refusal_or_a_wrong_address_pauses_the_route_and_says_so_until_somebody_resumes_it(
    tmp_path: Path, status: int
):
    answer = status
    async with ScriptedDestination(lambda ids, number: answer) as destination:
        spec = {"r": http_route(destination.url)}
        async with exports(tmp_path, spec) as running:
            route = running.get("r")
            await route.push([record(1)])
            await eventually(lambda: route.paused)
            assert str(status) in route.paused
            assert status_of(route)["state"] == "paused"
            assert route.dead_letters.count == 0
            await route.push([record(2)])
            assert destination.requests == 1, "nothing is sent while paused"
        async with exports(tmp_path, spec) as running:  # it stays paused over a restart
            route = running.get("r")
            assert str(status) in route.paused
            answer = 200
            await route.resume()
            await delivered(route)
            assert destination.ids == [1, 2]
            assert route.paused is None


async def test_max_attempts_and_max_age_end_in_the_dead_letters(tmp_path: Path):
    async with ScriptedDestination(lambda ids, number: 500 if 1 in ids else 200) as destination:
        spec = http_route(destination.url, max_attempts=3, circuit_breaker={"enabled": False})
        async with exports(tmp_path / "a", {"r": spec}) as running:
            route = running.get("r")
            await route.push([record(1)])
            await route.push([record(2)])
            await delivered(route)
            [letter] = await route.letters(0, 10_000)
            assert (letter.reason, letter.attempts) == ("attempts", 3)
            assert [key.split("-")[1] for key in destination.keys] == ["1", "1", "1", "2"]
            assert destination.ids == [2]
            assert_balanced(route)
    clock = FakeClock()
    async with ScriptedDestination() as destination:
        spec = http_route(destination.url, max_age="1h")
        async with exports(tmp_path / "b", {"r": spec}, clock=clock) as running:
            route = running.get("r")
            await route.pause()
            await route.push([record(1)])
            clock.now += 3601
            await route.push([record(2)])
            await route.resume()
            await delivered(route)
            assert [letter.reason for letter in await route.letters(0, 10_000)] == ["expired"]
            assert destination.ids == [2]


async def test_an_hours_outage_costs_a_backlog_on_disk_and_a_few_probes(tmp_path: Path):
    """Fake time: the breaker opens, nothing is leased, one probe goes out per reset_timeout, all
    drains at the end.
    """

    clock = FakeClock()
    up = False
    async with ScriptedDestination(lambda ids, number: 200 if up else 503) as destination:
        spec = http_route(
            destination.url,
            workers=4,
            inmemory_blocks=8,
            retry_interval="1s",
            max_retry_delay="5s",
            meta_sync_interval="1h",
            circuit_breaker={"threshold": 5, "reset_timeout": "30s"},
        )
        async with exports(tmp_path, {"r": spec}, clock=clock) as running:
            route = running.get("r")
            for minute in range(60):
                await route.push([record(minute * 10 + each) for each in range(10)])
                for _ in range(6):
                    await clock.advance(10)
                    await eventually(lambda: route.delivery.inflight == 0)
            assert route.queue.count == 60
            assert route.breaker.state in ("open", "half_open")
            assert route.queue.leased == 0
            assert route.gauges()["fastqueue_inmemory_blocks"] <= 8
            assert destination.requests < 5 + 4 + 3600 / 30 + 10
            up = True
            for _ in range(200):
                await clock.advance(1)
                await asyncio.sleep(0.002)
                if not route.queue.count:
                    break
            assert sorted(destination.ids) == list(range(600))
            assert_balanced(route)


async def test_an_open_breaker_burns_no_time(tmp_path: Path):
    destination = ScriptedDestination()
    await destination.open()
    destination.close()
    spec = http_route(
        destination.url,
        workers=16,
        meta_sync_interval="1s",
        circuit_breaker={"threshold": 1, "reset_timeout": "1h"},
    )
    async with exports(tmp_path, {"r": spec}) as running:
        route = running.get("r")
        await route.push([record(number) for number in range(1000)])
        await eventually(lambda: route.breaker.state == "open" and route.queue.leased == 0)
        await asyncio.sleep(0.1)
        began, used = time.monotonic(), time.process_time()
        await asyncio.sleep(pick(short=1, usual=2, soak=2))
        share = (time.process_time() - used) / (time.monotonic() - began)
        assert share < 0.02, f"{share:.1%} of a core while nothing can be sent"


async def test_a_large_backlog_is_taken_and_drained_with_flat_memory(tmp_path: Path, soak: bool):
    """64 MiB, or 1 GiB in its long form, through a whole route, every byte of it from disk."""
    process = psutil.Process()

    size = pick(short=16 << 20, usual=64 << 20, soak=1 << 30)
    seen, most = 0, 0

    def count(ids: list[int], number: int) -> int:
        nonlocal seen, most
        destination.ledger.clear()
        destination.keys.clear()
        assert ids == [seen]
        seen += 1
        if not seen % 50:
            most = max(most, process.memory_info().rss)
        return 200

    async with ScriptedDestination(count) as destination:
        spec = http_route(
            destination.url,
            max_bytes=4 * size,
            max_size=10_000_000,
            inmemory_blocks=16,
            compression="none",
            chunk_size=8 << 20,
            fsync="interval",
            meta_sync_interval="100ms",
        )
        async with exports(tmp_path, {"r": spec}) as running:
            route = running.get("r")
            await route.pause()
            await route.push([record(0, pad=64 << 10)])
            start = process.memory_info().rss
            for number in range(1, size >> 16):
                await route.push([record(number, pad=64 << 10)])
                if not number % 50:
                    most = max(most, process.memory_info().rss)
            assert route.gauges()["fastqueue_disk_bytes"] > size
            assert route.gauges()["fastqueue_inmemory_blocks"] <= 16
            await route.resume()
            await delivered(route, 600 if soak else 60)
            assert seen == size >> 16
            assert_balanced(route)
    grown = most - start
    assert grown < 32 << 20, f"{grown >> 20} MiB more for a backlog of {size >> 20} MiB"


async def test_all_routes_together_keep_to_the_global_send_limit(tmp_path: Path):
    under_way, most = 0, 0

    async def slow() -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.005)
        under_way -= 1
        return 200

    async with ScriptedDestination(lambda ids, number: slow()) as destination:
        routes = {
            name: http_route(destination.url, workers=8, batch={"records": 1}) for name in "ab"
        }
        defaults = Exporter(queue=SendQueueSettings(global_send_limit=3))
        config = Config(data_directory=tmp_path, routes=routes, exporter=defaults)
        running = Exports(config, pool=POOL, metrics=Metrics())
        await running.start()
        for name in routes:
            await running.get(name).push([record(number) for number in range(30)])
        for name in routes:
            await delivered(running.get(name))
        await running.stop()
        assert most == 3


async def test_the_channel_between_preparers_and_senders_is_bounded(tmp_path: Path):
    async with ScriptedDestination(lambda ids, number: HANG) as destination:
        split = {"enabled": True, "preparer_count": 1, "sender_count": 1, "channel_size": 2}
        spec = http_route(
            destination.url,
            pipeline_split=split,
            max_concurrent_sends=1,
            target={"timeout": "1m"},
        )
        async with exports(tmp_path, {"r": spec}, shutdown_timeout=0.1) as running:
            route = running.get("r")
            await route.push([record(number) for number in range(500)])
            await eventually(lambda: destination.requests == 1 and route.workers.preparing == 1)
            await eventually(lambda: route.queue.leased >= 4)
            await asyncio.sleep(0.05)
            assert route.queue.leased == 1 + 2 + 1, (
                "one being sent, two in the channel, one at its door"
            )
            assert destination.requests == 1


async def test_each_sender_has_so_many_sends_under_way_at_most(tmp_path: Path):
    async with ScriptedDestination(lambda ids, number: HANG) as destination:
        split = {"enabled": True, "preparer_count": 1, "sender_count": 2}
        spec = http_route(
            destination.url,
            pipeline_split=split,
            max_concurrent_sends=3,
            target={"timeout": "1m"},
        )
        async with exports(tmp_path, {"r": spec}, shutdown_timeout=0.1) as running:
            route = running.get("r")
            await route.push([record(number) for number in range(500)])
            await eventually(lambda: destination.requests == 2 * 3)
            assert (
                route.gauges()["queue_senders_active"]
                == route.gauges()["queue_sends_inflight"]
                == 6
            )
            await asyncio.sleep(0.05)
            assert destination.requests == 6


async def test_nothing_is_sent_before_the_time_the_destination_asked_for(tmp_path: Path):
    clock = FakeClock()
    answer: Any = (503, {"Retry-After": "100"})
    async with ScriptedDestination(lambda ids, number: answer) as destination:
        spec = http_route(destination.url, workers=3, meta_sync_interval="1h")
        async with exports(tmp_path, {"r": spec}, clock=clock) as running:
            route = running.get("r")
            await route.push([record(1)])
            await eventually(lambda: route.backoff.remaining > 0)
            await route.push([record(2)])
            await clock.advance(99)
            assert destination.requests == 1
            answer = 200
            await clock.advance(2)
            await eventually(lambda: sorted(destination.ids) == [1, 2])


async def test_shutdown_has_one_deadline_and_what_is_not_delivered_stays(tmp_path: Path):
    async with ScriptedDestination(lambda ids, number: HANG) as destination:
        routes = {
            f"r{n}": http_route(destination.url, fsync="never" if n else "always")
            for n in range(10)
        }
        async with exports(tmp_path, routes, shutdown_timeout=1.0) as running:
            for name in routes:
                await running.get(name).push([record(number) for number in range(50)])
            await eventually(lambda: destination.requests == 10)
            watch = Stopwatch()
        assert watch.seconds < 8  # one after the other they would take 10
        destination.rule = lambda ids, number: 200
        async with exports(tmp_path, routes) as running:
            for name in routes:
                await delivered(running.get(name))
            assert sorted(destination.ids) == sorted([*range(50)] * 10)


async def test_stored_compressed_once_and_sent_as_stored(tmp_path: Path):
    async with ScriptedDestination() as destination:
        for compression in ("zstd", "gzip", "snappy"):
            spec = http_route(
                destination.url, target={"compression": compression, "format": "json"}
            )
            async with exports(tmp_path / compression, {"r": spec}) as running:
                route = running.get("r")
                await route.pause()
                await route.push([record(number, pad=200) for number in range(10)])
                [chunk] = (path for path in route.directory.rglob("0*") if len(path.name) == 16)
                stored = chunk.read_bytes()
                await route.resume()
                await delivered(route)
            received = destination.ledger[-1]
            assert received.headers["content-encoding"] == compression
            assert stored.endswith(received.body)
            assert len(received.body) < 1500
            assert received.ids == list(range(10))


async def test_a_route_made_over_the_api_is_there_after_a_restart_and_goes_when_deleted(
    tmp_path: Path,
):
    async with ScriptedDestination() as destination:
        async with exports(tmp_path, {"fixed": http_route(destination.url)}) as running:
            route = await running.create("made", http_route(destination.url))
            await route.pause("for the test")
            await route.push([record(1)])
            with pytest.raises(Conflict):
                await running.create("made", http_route(destination.url))
            with pytest.raises(InvalidRequest, match=r"destination\.type"):
                await running.create("bad", {"destination": {"type": "carrier pigeon"}})
            with pytest.raises(InvalidRequest, match="not a route name"):
                await running.create("../evil", http_route(destination.url))
        async with exports(tmp_path, {"fixed": http_route(destination.url)}) as running:
            route = running.get("made")
            assert route.paused == "for the test"
            assert route.queue.count == 1
            with pytest.raises(Conflict, match="still has 1 records"):
                await running.delete("made")
            with pytest.raises(Conflict, match="part of the configuration"):
                await running.delete("fixed")
            await running.delete("made", force=True)
            assert not route.directory.exists()
        async with exports(tmp_path, {}) as running:
            assert running.names() == []


@pytest.mark.parametrize("split", [False, True], ids=["unified", "split"])
async def test_adaptive_workers_grow_with_the_backlog_halve_when_asked_for_less_and_go_when_idle(
    tmp_path: Path, split: bool
):
    """Fake time, real requests: each takes half a second."""

    clock = FakeClock()
    under_way, most, answer = 0, 0, 200

    async def slow() -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await clock.sleep(0.5)
        under_way -= 1
        return answer

    async with ScriptedDestination(lambda ids, number: slow()) as destination:
        spec = http_route(
            destination.url,
            target={"timeout": "1m"},
            workers=1,
            adaptive_workers={"enabled": True, "min_workers": 1, "max_workers": 8},
            pipeline_split={
                "enabled": split,
                "preparer_count": 1,
                "sender_count": 1,
                "channel_size": 1,
            },
            max_concurrent_sends=1,
            meta_sync_interval="10s",
            circuit_breaker={"enabled": False},
            retry_interval="1s",
        )
        async with exports(tmp_path, {"r": spec}, clock=clock) as running:
            route = running.get("r")
            workers = route.workers

            async def pass_time(seconds: float) -> None:
                for _ in range(round(seconds / 0.25)):
                    await clock.advance(0.25)
                    waiting = (
                        min(workers.total, route.queue.count) if not route.backoff.remaining else 0
                    )
                    await eventually(
                        lambda waiting=waiting: under_way >= waiting or not route.queue.count
                    )

            assert workers.total == 1
            await route.push([record(number) for number in range(3000)])
            await pass_time(6)
            assert workers.total == 8
            assert most == 8
            answer = 429
            await eventually_later(clock, lambda: workers.target <= 4)
            answer = 200
            await eventually_later(clock, lambda: route.queue.count == 0)
            await eventually_later(clock, lambda: workers.total == 1)
            assert sorted(set(destination.ids)) == list(range(3000))
            assert route.gauges()["queue_workers_total"] == 1
            await route.push([record(3000)])
            await eventually_later(clock, lambda: 3000 in destination.ids)


async def eventually_later(clock: FakeClock, condition: Any) -> None:
    """Let fake time pass until the condition holds."""
    for _ in range(2000):
        if condition():
            return
        await clock.advance(0.25)
        await asyncio.sleep(0.001)
    raise AssertionError("it never came")


async def test_draining_takes_nothing_new_and_delivers_the_rest(tmp_path: Path):
    async with (
        ScriptedDestination() as destination,
        exports(tmp_path, {"r": http_route(destination.url)}) as running,
    ):
        route = running.get("r")
        await route.pause()
        await route.push([record(number) for number in range(30)])
        await route.drain()
        with pytest.raises(Unavailable, match="draining"):
            await route.push([record(99)])
        await delivered(route)
        assert route.state == "drained"
        await route.resume()
        await route.push([record(30)])
        await delivered(route)
        assert destination.ids == list(range(31))


async def test_one_bad_route_does_not_keep_the_others_from_running(tmp_path: Path):
    async with (
        ScriptedDestination() as destination,
        exports(tmp_path, {"held": http_route(destination.url)}),
    ):
        routes = {name: http_route(destination.url) for name in ("held", "free")}
        config = Config(data_directory=tmp_path, routes=routes)
        other = Exports(config, pool=POOL, metrics=Metrics())
        await other.start()
        assert "in use by process" in other.failed["held"]
        await other.get("free").push([record(1)])
        await delivered(other.get("free"))
        with pytest.raises(Conflict, match="could not start"):
            other.get("held")
        assert [each.state for each in other.status()] == ["running", "failed"]
        await other.stop()


class RandomFaults:
    """What a destination answers: a fault at random, and a refusal of poison each time."""

    def __init__(self, random: Random) -> None:
        self._random = random
        faults = dict.fromkeys(("500", "429", "reset", "lost", "slow"), 1.0)
        self._weights = {"200": 10.0, "hang": 0.1, **faults}
        self.poison: set[int] = set()

    def answer(self, ids: list[int], _: int) -> Any:
        if self.poison & set(ids):
            return 422
        if len(ids) > 8:
            return 413
        choice = self._random.choices(list(self._weights), list(self._weights.values()))[0]
        if choice == "429":
            return 429, {"Retry-After": "0.01"}
        if choice == "slow":
            return asyncio.sleep(0.02, 200)
        faults = {"500": 503, "reset": RESET, "lost": TAKE_AND_RESET, "hang": HANG}
        return faults.get(choice, 200)

    def end(self) -> None:
        self._weights = {"200": 10.0, "slow": 1.0}


def random_route(url: str, random: Random) -> dict[str, Any]:
    policy = random.choice(["always", "interval"])
    workers = random.choice([1, 3])
    return http_route(
        url,
        target={"timeout": "2s", "compression": random.choice(["none", "zstd"])},
        batch={"records": 12},
        workers=workers,
        fsync=policy,
        inmemory_blocks=random.choice([2, 1000]),
        chunk_size=random.choice([5000, 1 << 20]),
        circuit_breaker={"threshold": 3, "reset_timeout": "20ms"},
        drain_order=random.choice(["fifo", "fifo", "newest_first", "mixed"]),
        pipeline_split={
            "enabled": random.random() < 0.3,
            "preparer_count": 1,
            "sender_count": 1,
        },
    )


def batch_of(received: Any) -> str:
    return str(received.key.split("-")[1])


def assert_a_record_is_always_of_the_same_batch(ledger: list[Any]) -> None:
    by_record: dict[int, set[str]] = {}
    for received in ledger:
        for each in received.ids:
            by_record.setdefault(each, set()).add(batch_of(received))
    assert all(len(batches) == 1 for batches in by_record.values())


def batches_answered_and_sent_again(ledger: list[Any]) -> int:
    sent = Counter(received.key for received in ledger)
    return len({batch_of(one) for one in ledger if one.answered and sent[one.key] > 1})


async def push_and_kill(
    directory: Path, spec: dict[str, Any], random: Random, poison: set[int]
) -> tuple[int, int]:
    """Run the route four times, with pushes, until a stop or a kill. Return how many records were
    accepted, and how many batches were leased at the end of a run.
    """
    accepted = leased_at_end = 0
    for _ in range(4):
        async with exports(directory, {"r": spec}) as running:
            route = running.get("r")
            for _ in range(random.randint(1, 5)):
                count = random.randint(1, 40)
                numbers = list(range(accepted, accepted + count))
                poison.update(number for number in numbers if random.random() < 0.02)
                await route.push([record(number) for number in numbers])
                accepted += count
                await asyncio.sleep(random.random() * 0.05)
                assert_balanced(route)
            # A batch that was cut and came back may be half delivered: it counts like a leased one.
            # No public figure counts those that came back.
            leased_at_end += route.queue.leased + len(route.queue._fast._returned)
            if random.random() < 0.6:
                await kill(running)
    return accepted, leased_at_end


@pytest.mark.parametrize("seed", range(pick(short=2, usual=5, soak=60)))
async def test_any_sequence_of_faults_restarts_and_kills_delivers_everything(
    tmp_path: Path, seed: int
) -> None:
    """The ledger: every accepted record at least once, duplicates only of what was leased at a kill
    or whose answer was lost, under the same key, poison alone in the dead letters, books balanced.
    """
    random = Random(seed)
    faults = RandomFaults(random)
    async with ScriptedDestination(faults.answer) as destination:
        spec = random_route(destination.url, random)
        count, leased_at_end = await push_and_kill(tmp_path, spec, random, faults.poison)
        faults.end()
        async with exports(tmp_path, {"r": spec}) as running:
            route = running.get("r")
            await delivered(route)
            assert_balanced(route)
            result = books(route)
            letters = await route.letters(0, 10_000)
    dead = [json.loads(letter.record)["id"] for letter in letters]
    accepted, poison = set(range(count)), faults.poison
    assert sorted(dead) == sorted(poison)
    assert set(destination.ids) == accepted - poison
    assert result["accepted"] == count
    assert result["delivered"] == count - len(poison)
    assert_a_record_is_always_of_the_same_batch(destination.ledger)
    lost_answers = len({batch_of(one) for one in destination.ledger if not one.answered})
    doubled = batches_answered_and_sent_again(destination.ledger)
    assert doubled <= leased_at_end + lost_answers
