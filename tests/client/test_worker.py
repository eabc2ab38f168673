"""`penstock worker`, run as a person runs it."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from penstock import SyncClient
from penstock.errors import InvalidRequest
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import HttpRoute
from penstock.worker import client_of
from tests.support import guard
from tests.support.http import serving_in_thread
from tests.support.wait import until

MODULE = """
    import os, time
    from penstock import Client

    client = Client.from_env()
    nothing = Client()

    @client.consumer("{queue}@g", name="shop-1")
    def handle(message):
        with open("log", "a") as log:
            print("{version}", os.getpid(), "begun", message.data, file=log, flush=True)
            time.sleep(0.3)
            print("{version}", os.getpid(), "done", message.data, file=log, flush=True)
        if message.data == "die":
            os._exit(9)
"""


class Worker:
    def __init__(self, directory: Path, process: subprocess.Popen[str]) -> None:
        self._log, self.process = directory / "log", process

    def lines(self, word: str = "") -> list[list[str]]:
        text = self._log.read_text() if self._log.exists() else ""
        return [line.split() for line in text.splitlines() if word in line]


def write(directory: Path, queue: str, version: str = "v1") -> None:
    module = directory / "shop.py"
    text = textwrap.dedent(MODULE.format(queue=queue, version=version))
    module.with_suffix(".new").write_text(text)
    module.with_suffix(".new").rename(module)


@contextmanager
def working(directory: Path, url: str, *options: str) -> Iterator[Worker]:
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", "shop:client", *options],
        cwd=directory,
        env={**os.environ, "PENSTOCK_URL": url},
        stderr=subprocess.PIPE,
        text=True,
    )
    guard.watch(process.pid)
    try:
        yield Worker(directory, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def test_consumers_run_in_processes_that_are_started_again_and_drained(broker, queue, tmp_path):
    write(tmp_path, queue)
    with SyncClient(broker.url) as client, working(tmp_path, broker.url, "-p", "2") as worker:
        until(lambda: len(client.admin.consumers(queue)) == 2, 60, "both processes run")
        assert {one.name for one in client.admin.consumers(queue)} == {"shop-1"}
        client.push(queue, "die")
        until(lambda: worker.lines("done die"), 60, "one of them died")
        client.push(queue, "after", partition="other")
        until(lambda: worker.lines("begun after"), 60, "work goes on")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(60) == 0
        assert worker.lines("done after"), "what was begun is finished"
        dead = {pid for _, pid, *_ in worker.lines("done die")}  # and could not say so
        assert {str(one.pid) for one in client.admin.consumers(queue)} <= dead


def test_a_changed_file_starts_them_again(broker, queue, tmp_path):
    second = int(time.time())  # both are saved within it, and as long as each other
    write(tmp_path, queue)
    os.utime(tmp_path / "shop.py", ns=(second * 10**9, second * 10**9))
    with SyncClient(broker.url) as client, working(tmp_path, broker.url, "--reload") as worker:
        client.push(queue, 1)
        until(lambda: worker.lines("v1"), 60, "the first version works")
        write(tmp_path, queue, version="v2")
        os.utime(tmp_path / "shop.py", ns=(second * 10**9 + 1, second * 10**9 + 1))

        def renewed() -> bool:
            client.push(queue, 4)
            return bool(worker.lines("v2"))

        until(renewed, 60, "the second version works")
        assert worker.process.poll() is None


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("shop", "write module:client"),
        ("shp:client", "module 'shp' was not found"),
        ("shop:handle", "shop:handle is a Consumer, not a penstock.Client or SyncClient"),
        ("shop:clint", "module 'shop' has no attribute 'clint'; did you mean 'client'?"),
        ("shop:nothing", "has no consumers: decorate functions with @nothing.consumer"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path, monkeypatch, target, text):
    write(tmp_path, "q")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    with pytest.raises(InvalidRequest, match=re.escape(text)):
        client_of(target)


def test_a_module_that_pushes_when_it_is_imported_is_warned_about(
    broker, queue, tmp_path, monkeypatch, caplog
):
    (tmp_path / "pushing.py").write_text(
        textwrap.dedent(f"""
            from penstock import SyncClient

            client = SyncClient("{broker.url}")
            client.consumer("{queue}")(print)
            client.push("{queue}", 1)
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    with client_of("pushing:client") as client:
        assert client.push(queue, 2).status == "queued"  # not at import: no warning
    (record,) = caplog.records
    assert record.getMessage().startswith(f"importing pushing pushed to {queue}, and every process")


def test_a_worker_whose_token_is_refused_says_where_a_token_is_given(tmp_path):
    def refuse(request: Request) -> Response:
        return Response(401, b'{"error": "Authentication required"}')

    write(tmp_path, "q")
    route = HttpRoute("GET", "/api/v1/pop/queue/{queue}", refuse)
    with serving_in_thread(route) as server, working(tmp_path, server.url) as worker:
        assert worker.process.stderr is not None
        ended = next(line for line in worker.process.stderr if "the consumers ended" in line)
    assert "Authentication required (PENSTOCK_TOKEN, or Client(token=...))" in ended


def test_nothing_to_run_ends_the_command(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "penstock", "worker", "shp:client", "--directory", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert run.returncode == 2
    assert run.stderr.startswith("penstock: module 'shp' was not found")


SLOW_MODULE = """
    import asyncio, time
    from penstock import {client}

    client = {client}.from_env()

    @client.consumer("{queue}@g")
    {handler}
"""
THREADED = """def handle(message):
        open("log", "a").write(f"begun {message.data}\\n")
        time.sleep(600)
"""
ASYNC = """async def handle(message):
        open("log", "a").write(f"begun {message.data}\\n")
        await asyncio.sleep(600)
"""


def write_slow(directory: Path, queue: str, client: str, handler: str) -> None:
    text = textwrap.dedent(SLOW_MODULE)
    text = text.replace("{handler}", textwrap.dedent("    " + handler))
    text = text.replace("{queue}", queue).replace("{client}", client)
    (directory / "shop.py").write_text(text)


def children(worker: Worker) -> list[psutil.Process]:
    return psutil.Process(worker.process.pid).children(recursive=True)


def test_a_killed_supervisor_leaves_no_consumer_behind_and_no_message_leased(
    broker, queue, tmp_path
):
    write_slow(tmp_path, queue, "Client", ASYNC)
    options = ("-p", "2", "--drain-seconds", "0")
    with SyncClient(broker.url) as client, working(tmp_path, broker.url, *options) as worker:
        client.push(queue, 1, partition="a")
        client.push(queue, 2, partition="b")
        until(lambda: len(worker.lines("begun")) == 2, 60, "both processes work")
        orphans = children(worker)
        assert len(orphans) >= 2
        worker.process.kill()
        until(lambda: not any(map(psutil.Process.is_running, orphans)), 60, "they end as well")
        seen = client.pop(f"{queue}@g", batch=10, partitions=10, wait=10)
        assert sorted(one.data for one in seen) == [1, 2], "available before their lease ends"
        assert not client.admin.consumers(queue), "nobody consumes any more"


@pytest.mark.parametrize(
    ("client_class", "handler"),
    [("Client", THREADED), ("Client", ASYNC), ("SyncClient", THREADED)],
    ids=["threaded", "async", "plain client"],
)
def test_what_is_not_finished_in_the_drain_time_is_released(
    broker, queue, tmp_path, client_class, handler
):
    write_slow(tmp_path, queue, client_class, handler)
    with (
        SyncClient(broker.url) as client,
        working(tmp_path, broker.url, "--drain-seconds", "1") as worker,
    ):
        client.push(queue, 1)
        until(lambda: worker.lines("begun"), 60, "it works")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(60) == 1
        (message,) = client.pop(f"{queue}@g", wait=10)
        assert message.data == 1


HANGING_MODULE = """
    import threading, time
    from penstock import Client, backoff

    client = Client.from_env()

    def note(word, message):
        with open("log", "a") as log:
            print(word, message.data, message.attempt, file=log, flush=True)

    @client.consumer("{queue}@g", concurrency=2, timeout=1.5, retry=backoff(3, first=0))
    def handle(message):
        note("begun", message)
        if message.data == "thread" and message.attempt == 1:
            threading.Event().wait()
        if message.data == "neighbour":
            time.sleep(0.2)
        note("done", message)

    @client.consumer("{queue}-async@g", timeout=0.4, retry=backoff(3, first=0))
    async def block(message):
        note("begun", message)
        if message.attempt == 1:
            time.sleep(600)
        note("done", message)
"""


def test_a_process_whose_handler_ignores_its_timeout_is_replaced(broker, queue, tmp_path):
    (tmp_path / "shop.py").write_text(textwrap.dedent(HANGING_MODULE.format(queue=queue)))
    with SyncClient(broker.url) as client, working(tmp_path, broker.url) as worker:
        client.configure(f"{queue}-async", lease_time=1, ordering="none")
        client.push(queue, "thread")
        until(lambda: worker.lines("begun thread 1"), 60, "it hangs")
        hanging = children(worker)
        client.push(queue, "neighbour")
        until(lambda: worker.lines("done thread 2"), 60, "the attempt failed, the next one runs")
        until(lambda: worker.lines("done neighbour 1"), 60, "the other message was finished")
        assert len(worker.lines("begun neighbour")) == 1, "it was not released"
        assert not any(map(psutil.Process.is_running, hanging)), "the thread is gone"

        client.push(f"{queue}-async", "loop")
        until(lambda: worker.lines("done loop"), 60, "a blocked event loop is replaced as well")
        assert [line[2] for line in worker.lines("begun loop")] == ["1", "2"], "the broker counts"
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(60) == 0
        assert worker.process.stderr is not None
        errors = worker.process.stderr.read()
    assert 'shop.py", line 24 in block' in errors, "the traceback shows where it was blocked"
