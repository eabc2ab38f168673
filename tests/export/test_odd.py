"""What people write and do: wrong definitions, a disk that takes nothing, a topic that goes, a name
used again.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.config.schema import Exporter, SendQueue
from penstock.errors import ConfigError, Conflict, InvalidRequest, Locked, StorageFailed
from penstock.export import manager
from penstock.export.manager import Exports
from penstock.export.spec import parse_route, parse_routes
from penstock.log.fs import DISK, Disk
from penstock.metrics import Metrics
from tests.export.making import POOL, FakeClock, exports, http_route
from tests.export.scripted import ScriptedDestination, record
from tests.export.test_sources import FakeQueues, from_topic
from tests.support.certificates import Authority
from tests.support.topics import running as topics_in
from tests.support.wait import eventually

WEB = {"type": "http", "url": "http://host/in"}


def web(**target: Any) -> dict[str, Any]:
    return {"destination": WEB | target}


def table(name: str, **more: Any) -> dict[str, Any]:
    return {"destination": {"type": "postgres", "url": "postgres://host/db", "table": name, **more}}


def with_queue(**queue: Any) -> dict[str, Any]:
    return {"destination": WEB, "queue": queue}


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (web(url="lake.example/in"), "destination.url must be an address such as https://host/"),
        (web(url="127.0.0.1:8080/in"), "destination.url must be an address"),
        (web(url="http://host:99999/"), "destination.url must be an address"),
        (web(url="http://[::1/"), "destination.url must be an address"),
        (web(url="http://host/a b"), "%XX"),
        (web(url="http://host/\r\nX: y"), "%XX"),
        (web(timeout=0), "timeout"),
        (web(connections=0), "connections"),
        (
            {"destination": {"type": "postgres", "url": "host/db", "table": "t"}},
            "such as postgresql://",
        ),
        ({"destination": {"type": "broker", "url": "host:1", "topic": "t"}}, "such as https://"),
        (
            {"destination": {"type": "topic", "topic": "../up"}},
            "destination.topic: a topic name must not contain",
        ),
        (web() | {"source": {"topic": "../up"}}, "source.topic: a topic name must not contain"),
        (web() | {"source": {"topic": "t", "start": "yesterday"}}, "earliest, latest or an offset"),
        (web() | {"source": {"group": "g"}}, "neither a topic nor a queue"),
        (
            {"destination": {"type": "topic", "topic": "t"}, "source": {"topic": "t"}},
            "would feed itself",
        ),
        (web() | {"source": {"topic": "t", "start": "9" * 5000}}, "larger than any offset"),
        (web() | {"source": {"queue": "a\0b"}}, "source.queue: queue contains a NUL"),
        (
            web() | {"source": {"queue": "q", "group": "a\0b"}},
            "source.group: consumerGroup contains a NUL",
        ),
        (table("ev\0ents"), "destination.table holds a control character: 'ev\\x00ents'"),
        (table("events\n"), "destination.table holds a control character"),
        (table("t", column="a\x7f"), "destination.column holds a control character"),
        (table("a..b"), "1 to 63 bytes"),
        (table("t" * 64), "1 to 63 bytes"),
        (
            {"destination": {"type": "queue", "queue": "a\0b"}},
            "destination.queue holds a control character",
        ),
        (
            {"destination": {"type": "queue", "queue": "q", "partition": "\t"}},
            "destination.partition holds a control",
        ),
        (
            {"destination": {"type": "queue", "queue": "q", "partition": ""}},
            "partition must not be empty",
        ),
        ({"destination": {"type": ["http"]}}, "destination.type must be one of"),
        (with_queue(memory_percent=150), "a share between 0 and 1"),
        (with_queue(memory_percent="120%"), "a share between 0 and 1"),
        (with_queue(target_utilization=-0.1), "a share between 0 and 1"),
        (with_queue(memory_percent="nan"), "a share between 0 and 1"),
        (with_queue(max_bytes=0), "max_bytes must be above 0"),
        (with_queue(catchup_rate=-1), "catchup_rate"),
        (with_queue(backoff={"multiplier": "inf"}), "a number"),
        (with_queue(circuit_breaker={"threshold": 0}), "circuit_breaker.threshold"),
        (
            with_queue(adaptive_workers={"enabled": True, "min_workers": 9, "max_workers": 2}),
            "below min_workers",
        ),
        (with_queue(path="/elsewhere"), "queue.path is set for all routes"),
        (with_queue(enabled=False), "queue.enabled is set for all routes"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_defined(tree: dict[str, Any], text: str):
    with pytest.raises(ConfigError) as refused:
        parse_route("r", tree, SendQueue())
    assert text in str(refused.value)


def test_a_share_may_be_written_as_a_percentage():
    assert (
        parse_route("r", with_queue(memory_percent="10%"), SendQueue()).queue.memory_percent == 0.1
    )


def test_all_mistakes_of_all_routes_are_told_at_once_and_no_password_with_them():
    routes = {
        "a": {
            "destination": {"type": "postgres", "url": "mysql://me:s3cret@host/db", "table": "t"}
        },
        "b/c": web(),
        "d": web(url="nowhere") | {"batch": {"records": 0}},
    }
    defaults = Exporter(queue=SendQueue(always_queue=False))
    with pytest.raises(ConfigError) as refused:
        parse_routes(Config(routes=routes, exporter=defaults))
    text = str(refused.value)
    for part in (
        "always_queue",
        "route a: destination.url",
        "'b/c' is no route name",
        "d: destination.url",
        "d: batch.",
    ):
        assert part in text
    assert "s3cret" not in text


@pytest.mark.parametrize(
    "target",
    [
        {"ca": "nothing.pem", "url": "https://host/"},
        {"headers": {"X": "a\r\nY: b"}},
    ],
)
def test_what_only_making_it_shows_to_be_wrong_is_the_callers_mistake_too(
    tmp_path: Path, target: dict[str, Any]
):
    async def body() -> None:
        async with exports(tmp_path, {}) as running:
            with pytest.raises(InvalidRequest, match="route r"):
                await running.create("r", web(**target))
            assert running.names() == []

    asyncio.run(body())


def test_a_refused_route_knocks_again_ever_more_rarely_and_goes_on_by_itself(tmp_path: Path):
    async def body() -> None:
        clock, answer = FakeClock(), 404
        async with ScriptedDestination(lambda ids, number: answer) as destination:
            spec = http_route(
                destination.url,
                circuit_breaker={"reset_timeout": "30s"},
                max_retry_delay="2m",
                meta_sync_interval="1h",
                workers=3,
            )
            async with exports(tmp_path, {"r": spec}, clock=clock) as running:
                route = running.get("r")
                await route.push([record(1)])
                await eventually(lambda: route.paused)
                await route.push([record(2)])
                for passed, requests in (
                    (29, 1),
                    (2, 2),
                    (58, 2),
                    (2, 3),
                    (118, 3),
                    (2, 4),
                    (118, 4),
                    (2, 5),
                ):
                    await clock.advance(passed)
                    await eventually(lambda requests=requests: destination.requests == requests)
                    await eventually(lambda: route.delivery.inflight == 0)
                    assert "404" in route.paused
                assert 0 < route.status()["triesAgainSeconds"] <= 120
                assert route.queue.books.attempts == {}, "it says nothing about the batch"
            async with exports(tmp_path, {"r": spec}, clock=clock) as running:  # over a restart too
                route = running.get("r")
                assert "404" in route.paused
                answer = 200
                await clock.advance(31)
                await eventually(lambda: route.paused is None)
                await eventually(lambda: destination.ids == [1, 2])
                await route.pause()
                await route.push([record(3)])
                await clock.advance(3600)
                assert destination.ids == [1, 2], "what a person paused stays paused"
            async with exports(tmp_path, {"r": spec}, clock=clock) as running:
                await clock.advance(3600)
                assert running.get("r").paused == "by hand"
                assert destination.ids == [1, 2]

    asyncio.run(body())


@pytest.mark.parametrize("waiting", [1, 100])
def test_a_refused_route_with_split_workers_knocks_too(tmp_path: Path, waiting: int):
    async def body() -> None:
        answer = 401
        async with ScriptedDestination(lambda ids, number: answer) as destination:
            split = {"enabled": True, "preparer_count": 2, "sender_count": 2, "channel_size": 2}
            spec = http_route(
                destination.url,
                pipeline_split=split,
                circuit_breaker={"reset_timeout": "20ms"},
                batch={"records": 1},
                max_concurrent_sends=1,
            )
            async with exports(tmp_path, {"r": spec}) as running:
                route = running.get("r")
                await route.push([record(number) for number in range(waiting)])
                await eventually(lambda: route.paused and destination.requests > 4)
                assert destination.ids == []
                answer = 200
                await eventually(lambda: sorted(destination.ids) == list(range(waiting)))
                assert route.paused is None

    asyncio.run(body())


def test_a_route_made_again_under_its_name_is_not_taken_for_the_one_before(tmp_path: Path):
    """A destination that drops what it has seen, by key: a new queue counts from 1 again."""

    async def body() -> None:
        queues = FakeQueues()
        spec = {"destination": {"type": "queue", "queue": "orders"}, "batch": {"records": 10}}
        metrics = Metrics()
        async with exports(tmp_path, {}, queues=queues, metrics=metrics) as running:
            for _ in range(2):
                assert 'route="r"' not in metrics.text().decode(), "what is gone is not counted on"
                route = await running.create("r", spec)
                await route.push([record(1), record(2)])
                await eventually(lambda route=route: route.queue.books.delivered == 2)
                await running.delete("r")
        assert list(queues.stored.values()) == [record(1), record(2)] * 2
        in_memory = spec | {"queue": {"type": "memory"}}
        for _ in range(2):
            async with exports(tmp_path / "m", {"m": in_memory}, queues=queues) as running:
                await running.get("m").push([record(3)])
                await eventually(
                    lambda running=running: running.get("m").queue.books.delivered == 1
                )
        assert list(queues.stored.values())[4:] == [record(3)] * 2

    asyncio.run(body())


def test_a_deleted_topic_stays_deleted_and_a_new_one_is_read_from_its_beginning(tmp_path: Path):
    async def body() -> None:
        async with topics_in(tmp_path / "data") as topics, ScriptedDestination() as destination:
            early = from_topic(destination.url) | {"source": {"topic": "orders", "start": "latest"}}
            async with exports(tmp_path / "x", {"r": early}, topics=topics) as running:
                route = running.get("r")
                await eventually(lambda: "no topic orders" in (route.status()["sourceError"] or ""))
                topic = await topics.create("orders")
                await topic.append([record(1)])
                await eventually(lambda: destination.ids == [1])
                assert route.status()["sourceError"] is None
                await topics.delete("orders")
                await eventually(lambda: route.status()["sourceError"])
                assert topics.get("orders") is None
                await (await topics.create("orders")).append([record(2)])
                await eventually(lambda: destination.ids == [1, 2])

    asyncio.run(body())


class Stubborn(Disk):
    """A disk that makes and replaces nothing while `refusing`."""

    refusing = False

    def make_dir(self, path: Path) -> None:
        if self.refusing:
            raise StorageFailed(f"creating {path.name} failed: Read-only file system")
        super().make_dir(path)

    def replace(self, path: Path, data: Any, *, sync: bool = True) -> None:
        if self.refusing and path.name == "route.json":
            raise StorageFailed(f"replacing {path.name} failed: Read-only file system")
        super().replace(path, data, sync=sync)


def test_a_route_that_cannot_start_is_tried_again_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(manager, "START_RETRY_SECONDS", 0.02)

    async def body() -> None:
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

    asyncio.run(body())


def test_a_failed_route_of_the_api_can_be_thrown_away_but_not_from_under_another_process(
    tmp_path: Path,
):
    async def body() -> None:
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

    asyncio.run(body())


def test_state_that_could_not_be_saved_is_saved_later_and_saving_together_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("penstock.export.routestate.SAVE_RETRY_SECONDS", 0.02)

    async def body() -> None:
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

    asyncio.run(body())


def test_a_route_that_cannot_be_remembered_is_not_made(tmp_path: Path):
    async def body() -> None:
        disk = Stubborn()
        async with exports(tmp_path, {}, fs=disk) as running:
            disk.make_dir(tmp_path / ".penstock/routes/r")
            disk.refusing = True
            disk.make_dir = DISK.make_dir  # type: ignore[method-assign]
            with pytest.raises(StorageFailed, match=r"route\.json"):
                await running.create("r", web())
            assert running.names() == []

    asyncio.run(body())


def test_a_lock_is_taken_on_a_disk_without_a_byte_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwrite", full)
    from penstock.log.lock import DirectoryLock

    with DirectoryLock(tmp_path), pytest.raises(Locked), DirectoryLock(tmp_path):
        pass


def test_over_the_api_a_ca_is_a_text_or_a_file_of_one_directory_and_the_answer_tells_nothing_of_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    allowed = tmp_path / ".penstock" / "certificates"
    allowed.mkdir(parents=True)
    pem = Authority().write(allowed, "ca")[0].read_text()
    (allowed / "text.pem").write_text("root:x:0:0")
    (allowed / "directory").mkdir()
    outside = tmp_path / "outside.pem"
    outside.write_text(pem)

    async def refusal(running: Exports, ca: str) -> str:
        with pytest.raises(InvalidRequest) as refused:
            await running.create("r", web(url="https://host/", ca=ca))
        return str(refused.value)

    async def body() -> None:
        async with exports(tmp_path, {}) as running:
            wrong = [
                "missing.pem",
                "text.pem",
                "directory",
                str(outside),
                "/nowhere/x",
                "/etc/passwd",
                "../x",
                "a\0b",
            ]
            answers = {await refusal(running, ca) for ca in [*wrong, "-----BEGIN nothing"]}
            assert len(answers) == 1, answers
            assert "exporter.certificates" in answers.pop()
            assert "missing.pem" in caplog.text, "the operator is told"
            for number, ca in enumerate(["ca.pem", pem]):
                await running.create(f"r{number}", web(url="https://host/", ca=ca))
        async with exports(
            tmp_path, {}
        ) as running:  # they start again, as does one that an older version accepted
            assert running.names() == ["r0", "r1"]
            await running.delete("r0")
            await running.delete("r1")
            named = {
                "type": "postgres",
                "url": "postgres://host/db?sslrootcert=/etc/passwd",
                "table": "t",
            }
            with pytest.raises(InvalidRequest, match=r"names files of the broker \(sslrootcert\)"):
                await running.create("r", {"destination": named})
        async with exports(tmp_path, {"mine": web(url="https://host/", ca=str(outside))}):
            pass  # what the operator writes into the configuration may name any file
        with pytest.raises(AssertionError, match="No such file"):
            async with exports(tmp_path, {"mine": web(url="https://host/", ca="/nowhere/x")}):
                pass

    asyncio.run(body())
