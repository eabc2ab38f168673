"""Routes over HTTP and from a shell: the real handlers behind a real server, and the commands
against it.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli import app
from penstock.cli import route as cli_route
from penstock.config.schema import HttpServerSettings as HttpSettings
from penstock.wire.http.api import export as api
from penstock.wire.http.routes import Router, routes_of
from penstock.wire.http.server import HttpServer
from tests.export.making import exports, http_route
from tests.export.scripted import ScriptedDestination, record
from tests.support.cli import CliRunner
from tests.support.wait import eventually, until


class Serving:
    """Routes and their API on a loop in a thread, so that commands can be run against it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = ""
        self.destination = ScriptedDestination()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        async with (
            self.destination,
            exports(self.directory, {"r": http_route(self.destination.url)}) as running,
        ):
            self.exports = running
            server = HttpServer(Router(routes_of(api.ExportApi(running))), HttpSettings(port=0))
            await server.start()
            self.url = f"http://127.0.0.1:{server.port}"
            await self._stop.wait()
            await server.stop(1)

    def __enter__(self) -> "Serving":
        self._thread.start()
        until(lambda: self.url)
        return self

    def __exit__(self, *failure: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as result:
        yield result


def ask(
    url: str, method: str, target: str, body: Any = None, kind: str = "application/json"
) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    answer = httpx.request(
        method, f"{url}/api/v1/routes{target}", content=data, headers={"Content-Type": kind}
    )
    return answer.status_code, answer.json() if answer.content else None


def test_a_route_is_made_pushed_to_watched_and_deleted_over_http(serving: Serving):
    url = serving.url
    definition = {"name": "made", **http_route(serving.destination.url)}
    assert ask(url, "POST", "", definition)[0] == 201
    assert ask(url, "POST", "", definition)[0] == 409
    status, answer = ask(url, "POST", "", {"name": "bad", "destination": {"type": "x"}})
    assert status == 400
    assert "destination.type" in answer["error"]
    assert ask(url, "POST", "/made/push", {"records": [{"id": 1}, {"id": 2}]}) == (
        201,
        {"accepted": 2, "dropped": 0},
    )
    assert (
        ask(url, "POST", "/made/push", b'{"id": 3}\n{"id": 4}\n', "application/x-ndjson")[1][
            "accepted"
        ]
        == 2
    )
    assert (
        ask(url, "POST", "/made/push", b'{"id": 5}', "application/octet-stream")[1]["accepted"] == 1
    )
    assert ask(url, "POST", "/made/push", {"records": []})[0] == 400
    for bad in (b"{", b'{"records": [%b' % (b"[" * 100_000), b'{"records": ["\xff"]}', b""):
        assert ask(url, "POST", "/made/push", bad, "application/json")[0] == 400
    assert ask(url, "POST", "/nowhere/push", {"records": [1]})[0] == 404
    until(lambda: ask(url, "GET", "/made")[1]["queue"]["accounting"]["delivered"] == 5)
    assert sorted(serving.destination.ids) == [1, 2, 3, 4, 5]
    shown = ask(url, "GET", "/made")[1]
    assert {
        "name",
        "state",
        "source",
        "destination",
        "queue",
        "breaker",
        "workers",
        "deadLetters",
    } <= set(shown)
    depth, ages = (
        {"batches", "records", "bytes", "diskBytes"},
        {"oldestAgeSeconds", "timeToFullSeconds"},
    )
    rates = {"batchesInPerSecond", "batchesOutPerSecond", "drainEtaSeconds"}
    assert depth | ages | rates <= set(shown["queue"])
    assert [route["name"] for route in ask(url, "GET", "")[1]["routes"]] == ["made", "r"]
    assert ask(url, "POST", "/made/pause")[1]["state"] == "paused"
    ask(url, "POST", "/made/push", {"records": [{"id": 6}]})
    assert ask(url, "DELETE", "/made")[0] == 409
    assert ask(url, "POST", "/made/purge") == (200, {"records": 1})
    assert ask(url, "POST", "/made/resume")[1]["state"] == "running"
    assert ask(url, "POST", "/made/drain")[1]["state"] == "drained"
    assert ask(url, "DELETE", "/made")[0] == 204
    assert ask(url, "GET", "/made")[0] == 404


def test_dead_letters_are_shown_and_replayed(serving: Serving):
    serving.destination.rule = lambda ids, number: 400
    ask(serving.url, "POST", "/r/push", {"records": [{"id": 9}]})
    until(lambda: ask(serving.url, "GET", "/r/deadletters")[1]["total"] == 1)
    letter = ask(serving.url, "GET", "/r/deadletters")[1]["letters"][0]
    assert (letter["record"], letter["reason"], letter["encoding"]) == (
        '{"id": 9}',
        "refused",
        "utf-8",
    )
    serving.destination.rule = lambda ids, number: 200
    assert ask(serving.url, "POST", "/r/replay")[1] == {"records": 1}
    until(lambda: serving.destination.ids == [9])


def cli(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["route", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    return result.output


def test_the_commands_steer_a_running_broker(serving: Serving):
    url = ("--url", serving.url)
    assert "running" in cli("list", *url)
    cli("pause", "r", *url)
    ask(serving.url, "POST", "/r/push", {"records": [{"id": 1}, {"id": 2}]})
    shown = cli("list", "r", *url)
    assert "paused" in shown
    assert "accepted 2 = delivered 0" in shown
    assert json.loads(cli("list", "r", "--json", *url))["queue"]["records"] == 2
    assert "paused" in cli("list", *url)
    assert "in use" in cli("repair", "r", "--data-dir", str(serving.directory), code=1), (
        "not under a running broker"
    )
    assert "2 records dropped" in cli("purge", "r", "--yes", *url)
    cli("resume", "r", *url)
    assert "0 records queued again" in cli("replay", "r", *url)
    cli("drain", "r", *url)
    assert "drained" in cli("list", "r", *url)
    cli("resume", "r", *url)
    serving.destination.rule = lambda ids, number: 401
    ask(serving.url, "POST", "/r/push", {"records": [{"id": 3}]})
    until(lambda: ask(serving.url, "GET", "/r")[1]["paused"])
    serving.exports.get("r").delivery.last_error = "[/bold]"  # what a destination says is no markup
    shown = cli("list", "r", *url)
    assert "answered 401" in shown
    assert "tries again in" in shown
    assert "no route named x" in cli("pause", "x", *url, code=1)
    assert "no broker answers" in cli("list", "--url", "http://127.0.0.1:1", code=1)


def test_a_running_broker_is_looked_into_over_its_api_while_its_queue_moves(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cli_route, "PAGE_RECORDS", 2)
    monkeypatch.setattr(api, "ANSWER_BYTES", 10)  # one record an answer
    where = ("r", "--url", serving.url)
    serving.destination.rule = lambda ids, number: 400 if max(ids) < 5 else 200
    for number in range(5):
        ask(serving.url, "POST", "/r/push", {"records": [{"id": number}]})
    until(lambda: ask(serving.url, "GET", "/r/deadletters")[1]["total"] == 5)
    letters = [json.loads(line) for line in cli("inspect", *where, "--dead").splitlines()]
    assert [json.loads(letter["record"])["id"] for letter in letters] == list(range(5))
    files = ("r", "--data-dir", str(serving.directory))
    assert letters == [json.loads(line) for line in cli("inspect", *files, "--dead").splitlines()]

    for turn in range(20):  # the files are read while they are written to
        ask(serving.url, "POST", "/r/push", {"records": [{"id": 10 + turn}]})
        assert json.loads(cli("inspect", *where, "--json"))["problems"] == []
    cli("pause", "r", "--url", serving.url)
    ask(serving.url, "POST", "/r/push", {"records": [{"id": 98}, {"id": 99}]})
    report = json.loads(cli("inspect", *where, "--json"))
    assert (report["waitingRecords"], report["deadLetters"]) == (2, 5)
    assert "directory" not in report
    assert cli("inspect", *where, "--records", "2") == '{"id": 98}\n'
    monkeypatch.setattr(api, "ANSWER_BYTES", 1000)
    assert cli("inspect", *where, "--records", "2") == '{"id": 98}\n{"id": 99}\n'
    assert "2 records wait" in cli("inspect", *where)
    assert "no route named x" in cli("inspect", "x", "--url", serving.url, code=1)
    assert "--data-dir DIR reads the route's files" in cli(
        "inspect", "r", "--url", "http://127.0.0.1:1", code=1
    )


@pytest.fixture
async def filled(tmp_path: Path) -> Path:
    """A directory with a stopped route: nine records wait, one is a dead letter."""
    async with (
        ScriptedDestination(lambda ids, number: 400 if 0 in ids else 200) as destination,
        exports(tmp_path, {"r": http_route(destination.url, compression="none")}) as running,
    ):
        route = running.get("r")
        await route.push([record(0)])
        await eventually(lambda: route.dead_letters.count == 1)
        await route.pause()
        for number in range(1, 10):
            await route.push([record(number, pad=50)])
    return tmp_path


def test_the_commands_look_into_files_check_and_repair_them(filled: Path, tmp_path: Path):
    where = ("r", "--data-dir", str(filled))
    assert json.loads(cli("inspect", *where, "--json"))["waitingRecords"] == 9
    assert '"id": 3' in cli("inspect", *where, "--records", "3")
    assert "answered 400" in cli("inspect", *where, "--dead")
    directory = tmp_path / ".penstock" / "routes" / "r"
    chunk = next(path for path in directory.iterdir() if len(path.name) == 16)
    data = bytearray(chunk.read_bytes())
    data[data.find(b'"id": 4')] ^= 0xFF
    chunk.write_bytes(bytes(data))
    assert "damaged bytes" in cli("inspect", *where, code=1)
    assert "8 batches wait, 1 damaged" in cli("repair", *where)
    report = json.loads(cli("inspect", *where, "--json", code=1))
    assert report["waitingRecords"] == 8
    assert report["accounting"]["dropped"] == {"damaged": 1}
    assert "no send queue" in cli("inspect", "nowhere", "--data-dir", str(tmp_path), code=1)
