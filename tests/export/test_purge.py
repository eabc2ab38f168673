"""Purging, deleting and replaying: what waits for its next attempt belongs to what is queued, dead
letters get lost by nobody's haste."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import Conflict, Unavailable
from penstock.export import routes as routes_module
from penstock.export.deadletters import NAME, DeadRecord, DeadRecords
from penstock.export.manager import Exports
from penstock.export.routes import ExportRoute
from penstock.io.fs import DISK
from tests.export.making import exports, http_route, kill, status_of
from tests.export.scripted import HANG, ScriptedDestination, record
from tests.support.wait import eventually

SPLIT = {
    "pipeline_split": {"enabled": True, "preparer_count": 1, "sender_count": 1, "channel_size": 2}
}


def balanced(route: ExportRoute) -> dict[str, Any]:
    books: dict[str, Any] = status_of(route)["queue"]["accounting"]
    total = (
        books["delivered"]
        + books["deadLettered"]
        + sum(books["dropped"].values())
        + books["queued"]
    )
    assert books["accepted"] == total
    return books


async def made(running: Exports, url: str, **queue: Any) -> ExportRoute:
    return await running.create("r", http_route(url, **queue))


@pytest.mark.parametrize(
    "more", [{}, {"type": "memory"}, {"workers": 4}, SPLIT], ids=["disk", "memory", "4", "split"]
)
async def test_a_purge_drops_what_waits_for_its_next_attempt_and_then_the_route_can_be_deleted(
    tmp_path: Path, more: dict[str, Any]
):
    async with (
        ScriptedDestination(lambda ids, number: 503) as destination,
        exports(tmp_path, {}) as running,
    ):
        route = await made(
            running, destination.url, retry_interval="1h", max_retry_delay="1h", **more
        )
        for number in range(5):
            await route.push([record(number)])
        await eventually(lambda: destination.requests > 0 and not route.delivery.inflight)
        assert await route.purge() == 5
        assert balanced(route)["dropped"] == {"purged": 5}
        assert route.queue.count == route.queue.leased == 0
        destination.rule = lambda ids, number: 200
        await route.push([record(7)])
        await route.resume()
        await eventually(lambda: destination.ids == [7])
        await eventually(lambda: route.queue.count == 0)
        await running.delete("r")


@pytest.mark.parametrize(
    ("status", "purged", "books"),
    [(503, 2, {"delivered": 0, "dropped": {"purged": 2}}), (200, 1, {"delivered": 1})],
    ids=["fails", "delivered"],
)
async def test_a_purge_waits_for_what_is_in_flight_and_drops_it_if_it_fails(
    tmp_path: Path, status: int, purged: int, books: dict[str, Any]
):
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def late() -> int:
        return await asyncio.shield(answer)

    async with (
        ScriptedDestination(lambda ids, number: late()) as destination,
        exports(tmp_path, {}) as running,
    ):
        route = await made(running, destination.url)
        await route.push([record(0)])
        await eventually(lambda: route.delivery.inflight == 1)
        await route.push([record(1)])
        purge = asyncio.create_task(route.purge())
        await eventually(lambda: balanced(route)["dropped"] == {"purged": 1})
        assert not purge.done()
        answer.set_result(status)
        assert await purge == purged
        assert balanced(route) | books | {"queued": 0} == balanced(route)
        await running.delete("r")


async def test_a_purge_does_not_wait_for_ever_and_what_fails_later_is_dropped_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(routes_module, "PURGE_TIMEOUT_SECONDS", 0.05)

    async with (
        ScriptedDestination(lambda ids, number: HANG) as destination,
        exports(tmp_path, {}) as running,
    ):
        route = await made(running, destination.url)
        await route.push([record(0)])
        await eventually(lambda: route.delivery.inflight == 1)
        assert await route.purge() == 0
        with pytest.raises(Conflict, match="1 batches of them are being sent"):
            await running.delete("r")
        destination.close()  # cuts the connection
        await eventually(lambda: balanced(route)["dropped"] == {"purged": 1})
        await running.delete("r")


async def test_with_drop_oldest_the_batch_that_waits_for_its_next_attempt_is_the_oldest(
    tmp_path: Path,
):
    async with (
        ScriptedDestination(lambda ids, number: 503) as destination,
        exports(tmp_path, {}) as running,
    ):
        route = await made(
            running, destination.url, retry_interval="1h", max_retry_delay="1h", max_size=3
        )
        await route.push([record(0)])
        await eventually(lambda: destination.requests and not route.queue.leased)
        for number in range(1, 5):
            await route.push([record(number)])
        assert balanced(route)["dropped"] == {"oldest": 2}
        destination.rule = lambda ids, number: 200
        await route.resume()
        await eventually(lambda: destination.ids == [2, 3, 4])


def letter(sequence: int) -> DeadRecord:
    return DeadRecord(sequence, 0, "refused", "no", 1, 0.0, 0.0, record(sequence))


def test_dead_letters_of_several_threads_are_all_there(tmp_path: Path):
    letters = DeadRecords(DISK, tmp_path)
    letters.open()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: letters.add([letter(number)]), range(400)))
    letters.close()
    assert sorted(each.sequence for each in DeadRecords(DISK, tmp_path).page(0, 10_000)) == list(
        range(400)
    )


@pytest.mark.parametrize("kind", ["disk", "memory"])
async def test_dead_letters_survive_a_replay_that_finds_no_room_and_keep_a_route_from_being_deleted(
    tmp_path: Path, kind: str
):
    async with (
        ScriptedDestination(lambda ids, number: 400) as destination,
        exports(tmp_path, {}) as running,
    ):
        route = await made(
            running, destination.url, type=kind, max_size=1, full_behavior="drop_newest"
        )
        for number in range(2):
            await route.push([record(number)])
            await eventually(lambda number=number: route.dead_letters.count == number + 1)
        await route.pause()
        await route.push([record(9)])
        with pytest.raises(Conflict, match="dead letters are kept"):
            await route.replay()
        assert status_of(route)["deadLetters"] == 2
        assert [each.record for each in await route.letters(0, 10_000)] == [
            record(0),
            record(1),
        ]
        assert await route.purge() == 1
        with pytest.raises(Conflict, match="2 dead letters"):
            await running.delete("r")
        await route.drain()
        with pytest.raises(Unavailable, match="draining"):
            await route.replay()
        destination.rule = lambda ids, number: 200
        await route.resume()
        assert sum(await asyncio.gather(route.replay(), route.replay())) == 2, (
            "two at once replay nothing twice"
        )
        await eventually(lambda: sorted(destination.ids) == [0, 1])
        await running.delete("r")


async def test_damaged_dead_letters_are_set_aside_and_not_thrown_away(tmp_path: Path):
    async with ScriptedDestination() as destination, exports(tmp_path, {}) as running:
        route = await made(running, destination.url)
        route.dead_letters.add([letter(1), letter(2), letter(3)])
        lines = (route.directory / NAME).read_bytes().splitlines(keepends=True)
        lines[1] = lines[1].replace(b"refused", b"refuted")
        (route.directory / NAME).write_bytes(b"".join(lines))
        assert await route.replay() == 2
        await eventually(lambda: destination.ids == [1, 3])
        [aside] = (route.directory / "quarantine").iterdir()
        assert aside.read_bytes() == lines[1]
        assert status_of(route)["deadLetters"] == 0


@pytest.mark.parametrize("killed", [False, True])
async def test_a_batch_that_is_being_sent_does_not_let_drop_oldest_empty_the_queue(
    tmp_path: Path, killed: bool
):
    async with ScriptedDestination(lambda ids, number: HANG) as destination:
        sizes = {
            "max_bytes": 100_000,
            "chunk_size": 10_000,
            "inmemory_blocks": 1,
            "compression": "none",
        }
        spec = http_route(destination.url, target={"timeout": "60s"}, **sizes)
        async with exports(tmp_path, {"r": spec}, shutdown_timeout=0.0) as running:
            route = running.get("r")
            await route.push([record(0, 1000)])
            await eventually(lambda: route.delivery.inflight == 1)
            for number in range(1, 300):
                await route.push([record(number, 1000)])
            assert route.gauges()["queue_bytes"] <= 100_000
            books = balanced(route)
            assert list(books["dropped"]) == ["oldest"]
            assert books["queued"] > 60
            if killed:
                await kill(running)
        destination.rule = lambda ids, number: 200
        async with exports(tmp_path, {"r": spec}) as running:
            route = running.get("r")
            await eventually(lambda: route.queue.count == 0)
            newest = books["queued"] - 1
            assert destination.ids == [0, *range(300 - newest, 300)]
            assert balanced(route)["dropped"] == books["dropped"]
