"""Routes that come, fail to start, and go: a disk that takes nothing, a name used again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.errors import Conflict, Locked, StorageFailed
from penstock.export import manager
from penstock.export.manager import Exports
from penstock.io.fs import DISK, Disk
from penstock.metrics import Metrics
from tests.export.making import POOL, exports, http_route
from tests.export.scripted import ScriptedDestination, record
from tests.export.test_sources import FakeQueues
from tests.export.test_spec import web
from tests.support.wait import eventually


async def test_a_route_made_again_under_its_name_is_not_taken_for_the_one_before(tmp_path: Path):
    """A destination that drops what it has seen, by key: a new queue counts from 1 again."""

    queues = FakeQueues()
    spec = {"destination": {"type": "queue", "queue": "orders"}, "batch": {"records": 10}}
    metrics = Metrics()
    async with exports(tmp_path, {}, queues=queues, buffer=queues, metrics=metrics) as running:
        for _ in range(2):
            assert 'route="r"' not in metrics.text().decode(), "what is gone is not counted on"
            route = await running.create("r", spec)
            await route.push([record(1), record(2)])
            await eventually(lambda route=route: route.queue.books.delivered == 2)
            await running.delete("r")
    assert list(queues.stored.values()) == [record(1), record(2)] * 2
    in_memory = spec | {"queue": {"type": "memory"}}
    for _ in range(2):
        async with exports(
            tmp_path / "m", {"m": in_memory}, queues=queues, buffer=queues
        ) as running:
            await running.get("m").push([record(3)])
            await eventually(lambda running=running: running.get("m").queue.books.delivered == 1)
    assert list(queues.stored.values())[4:] == [record(3)] * 2


class Stubborn(Disk):
    """A disk that makes and replaces nothing while `refusing`, and reads no state of one route."""

    refusing = False
    unreadable = ""  # the route's name

    def read(self, path: Path) -> bytes:
        if self.unreadable and path.parent.name == self.unreadable and path.name == "route.json":
            raise StorageFailed("reading route.json failed: Input/output error")
        return super().read(path)

    def make_dir(self, path: Path) -> None:
        if self.refusing:
            raise StorageFailed(f"creating {path.name} failed: Read-only file system")
        super().make_dir(path)

    def replace(self, path: Path, data: Any, *, sync: bool = True) -> None:
        if self.refusing and path.name == "route.json":
            raise StorageFailed(f"replacing {path.name} failed: Read-only file system")
        super().replace(path, data, sync=sync)


async def test_a_route_that_cannot_start_is_tried_again_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(manager, "START_RETRY_SECONDS", 0.02)

    disk = Stubborn()
    disk.refusing = True
    async with ScriptedDestination() as destination:
        config = Config(data_directory=tmp_path, routes={"r": http_route(destination.url)})
        running = Exports(config, pool=POOL, metrics=Metrics(), fs=disk)
        await running.start()
        assert "Read-only" in running.failed["r"]
        with pytest.raises(StorageFailed):
            await running.create("made", http_route(destination.url))
        with pytest.raises(Conflict):
            await running.create("r", http_route(destination.url))
        disk.refusing = False
        await eventually(lambda: "r" not in running.failed)
        await running.get("r").push([record(1)])
        await eventually(lambda: destination.ids == [1])
        await running.stop()


async def test_a_route_whose_definition_cannot_be_read_keeps_no_other_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(manager, "START_RETRY_SECONDS", 0.02)
    disk = Stubborn()
    async with ScriptedDestination() as destination:
        async with exports(tmp_path, {}) as before:
            for name in ("bad", "good"):
                await before.create(name, http_route(destination.url))
        disk.unreadable = "bad"
        config = Config(data_directory=tmp_path)
        running = Exports(config, pool=POOL, metrics=Metrics(), fs=disk)
        await running.start()
        assert "Input/output error" in running.failed["bad"]
        await running.get("good").push([record(1)])
        await eventually(lambda: destination.ids == [1])
        disk.unreadable = ""
        await eventually(lambda: running.failed == {})
        await running.get("bad").push([record(2)])
        await eventually(lambda: destination.ids == [1, 2])
        await running.stop()


async def test_a_failed_route_of_the_api_can_be_thrown_away_but_not_from_under_another_process(
    tmp_path: Path,
):
    async with ScriptedDestination() as destination, exports(tmp_path, {}) as owner:
        await owner.create("r", http_route(destination.url))
        other = Exports(Config(data_directory=tmp_path), pool=POOL, metrics=Metrics())
        await other.start()
        assert "in use" in other.failed["r"]
        with pytest.raises(Conflict):
            await other.delete("r")
        with pytest.raises(Locked):
            await other.delete("r", force=True)
        await owner.stop()
        await other.delete("r", force=True)
        assert other.names() == []
        await other.stop()
        assert not (tmp_path / ".penstock/routes/r").exists()


async def test_state_that_could_not_be_saved_is_saved_later_and_saving_together_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("penstock.export.routestate.SAVE_RETRY_SECONDS", 0.02)

    disk = Stubborn()
    async with ScriptedDestination() as destination:
        spec = {"r": http_route(destination.url)}
        async with exports(tmp_path, spec, fs=disk) as running:
            route = running.get("r")
            disk.refusing = True
            await route.pause("while the disk is full")
            state = route.directory / "route.json"
            assert "while the disk" not in state.read_text()
            disk.refusing = False
            await eventually(lambda: "while the disk" in state.read_text())
            await asyncio.gather(
                *(route.save() for _ in range(20)), route.resume(), route.pause("at last")
            )
            assert "at last" in state.read_text()
        async with exports(tmp_path, spec) as running:
            assert running.get("r").paused == "at last"


async def test_a_route_that_cannot_be_remembered_is_not_made(tmp_path: Path):
    disk = Stubborn()
    async with exports(tmp_path, {}, fs=disk) as running:
        disk.make_dir(tmp_path / ".penstock/routes/r")
        disk.refusing = True
        disk.make_dir = DISK.make_dir  # type: ignore[method-assign]
        with pytest.raises(StorageFailed, match=r"route\.json"):
            await running.create("r", web())
        assert running.names() == []
