"""Celery with real workers on one broker."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.celery.support import Shop
from tests.docs.tools import ROOT
from tests.support.broker import BrokerProcess
from tests.support.wait import until

POOLS = ["prefork", "threads", "solo", "gevent"]


def celery(shop: Shop, *arguments: str) -> str:
    """Run a command of Celery, return its output."""
    command = [sys.executable, "-m", "celery", "-A", "tests.celery.shop", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=shop.environment(), capture_output=True, text=True, timeout=120
    )
    return done.stdout + done.stderr


def depth(api: httpx.Client, queue: str) -> dict[str, Any]:
    return api.get(f"/api/v1/resources/queues/{queue}").raise_for_status().json()["totals"]


@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_runs_tasks_once_and_retries_and_delays_them(
    pool: str, shop: Shop, api: httpx.Client, queue: str
) -> None:
    app = shop.app()
    worker = shop.worker(pool)
    names = {f"n{number}" for number in range(30)}
    for name in names:
        shop.send(app, "note", name)
    shop.send(app, "flaky", "retried", 2)
    started = time.time()
    shop.send(app, "note", "later", countdown=3)
    assert depth(api, queue)["scheduled"] >= 1  # in the broker, not in the worker
    shop.wait_for_ends(names | {"retried", "later"})
    ends = {name: at for event, name, _, at in shop.ledger() if event == "end"}
    assert ends["later"] - started >= 2.9
    assert shop.count("start") == dict.fromkeys([*names, "later"], 1) | {"retried": 3}
    until(lambda: depth(api, queue)["pending"] + depth(api, queue)["processing"] == 0)
    assert app.control.ping([worker.name], timeout=20) == [{worker.name: {"ok": "pong"}}]
    assert worker.stop() == 0
    assert "ERROR" not in worker.log
    assert "Traceback" not in worker.log


@pytest.mark.parametrize("pool", POOLS)
def test_a_task_that_is_longer_than_its_lease_runs_once(pool: str, shop: Shop) -> None:
    shop.settings = {"acks_late": 1, "lease": 2, "prefetch": 1}
    app = shop.app()
    first, second = shop.start_worker(pool), shop.start_worker(pool)
    for worker in (first, second):
        worker.wait_ready()
    shop.send(app, "slow", "long", 5)
    shop.wait_for_ends({"long"})
    shop.send(app, "note", "after")
    shop.wait_for_ends({"after"})
    assert [worker.stop() for worker in (first, second)] == [0, 0]
    assert shop.count("start")["long"] == 1


def test_a_running_and_a_waiting_task_can_be_revoked(shop: Shop) -> None:
    shop.settings = {"prefetch": 1}
    app = shop.app()
    worker = shop.worker()
    running = shop.send(app, "slow", "running", 600)
    until(lambda: shop.count("start")["running"], what="the task runs")
    waiting = shop.send(app, "note", "waiting", countdown=2)
    app.control.revoke(waiting.id, reply=True, timeout=20, destination=[worker.name])
    app.control.revoke(
        running.id, terminate=True, reply=True, timeout=20, destination=[worker.name]
    )
    shop.send(app, "note", "after", countdown=3)
    shop.wait_for_ends({"after"})
    assert set(shop.count("end")) == {"after"}
    until(lambda: "Discarding revoked task" in worker.log, what=worker.log)


def test_the_command_line_inspects_and_purges(shop: Shop) -> None:
    app = shop.app()
    shop.send(app, "note", "old")
    shop.send(app, "note", "older")
    assert "Purged 2 messages" in celery(shop, "purge", "-f", "-Q", shop.queue)
    worker = shop.worker()
    shop.send(app, "slow", "active", 600)
    until(lambda: shop.count("start")["active"], what="the task runs")
    assert worker.name in celery(shop, "inspect", "ping", "-t", "20", "-d", worker.name)
    assert "active" in celery(shop, "inspect", "active", "-t", "20", "-d", worker.name)
    assert shop.queue in celery(shop, "inspect", "active_queues", "-t", "20", "-d", worker.name)
    assert "old" not in shop.count("start")


def test_workers_send_events_and_know_each_other(shop: Shop, api: httpx.Client) -> None:
    app = shop.app()
    seen: list[dict[str, Any]] = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": seen.append})
        with receiver.consumer_context() as (listening, _, _):
            worker = shop.start_worker("prefork", "-E").wait_ready()
            shop.send(app, "note", "told")
            deadline = time.monotonic() + 60
            while not any(one["type"] == "task-succeeded" for one in seen):
                assert time.monotonic() < deadline, seen
                try:
                    listening.drain_events(timeout=1)
                except TimeoutError:
                    continue
    kinds = {one["type"] for one in seen if one.get("hostname") == worker.name}
    assert {"worker-online", "task-received", "task-succeeded"} <= kinds
    assert worker.stop() == 0
    groups = api.get("/api/v1/consumer-groups").raise_for_status().json()
    mine = [one["name"] for one in groups if worker.name in one["name"]]
    assert mine == []  # what listened is removed


def test_a_chord_runs_with_the_results_in_the_same_postgresql(
    shop: Shop, broker: BrokerProcess
) -> None:
    from celery import chain, chord, group, signature

    database = broker.database_url
    assert database is not None
    results = database.replace("postgresql://", "db+postgresql+psycopg://")
    app = shop.app(result_backend=results)
    shop.worker(results=results)

    def task(name: str, *args: Any) -> Any:
        return signature(f"tests.celery.shop.{name}", args=args, app=app)

    doubled = group(task("double", number) for number in range(5))
    assert chord(doubled, task("total"), app=app)().get(timeout=120) == 20
    chained = chain(task("double", 3), task("double"), app=app)()
    assert chained.get(timeout=120) == 12


def test_results_come_back_over_a_reply_queue(shop: Shop) -> None:
    app = shop.app(result_backend="rpc://")
    shop.worker(results="rpc://")
    sent = [app.send_task("tests.celery.shop.double", (number,)) for number in range(5)]
    assert [one.get(timeout=120) for one in sent] == [0, 2, 4, 6, 8]


def test_a_task_of_higher_priority_runs_first(shop: Shop, api: httpx.Client) -> None:
    shop.settings = {"priorities": 10, "prefetch": 1}
    app = shop.app(task_queue_max_priority=10)
    for name, priority in (("low", 0), ("middle", 4), ("high", 9), ("low-2", 1)):
        shop.send(app, "note", name, priority=priority)
    shop.worker("solo")
    shop.wait_for_ends({"low", "low-2", "middle", "high"})
    order = [name for event, name, _, _ in shop.ledger() if event == "start"]
    assert order == ["high", "middle", "low", "low-2"]


def test_several_queues_respect_the_prefetch_count(shop: Shop, tmp_path: Path) -> None:
    """A worker that is busy leaves the messages of its other queues to other workers."""
    shop.settings = {"acks_late": 1, "prefetch": 1}
    app = shop.app()
    queues = f"{shop.queue},{shop.queue}-b,{shop.queue}-c"
    busy = shop.worker("solo", "-c", "1", "-Q", queues)
    shop.send(app, "hold", "long", str(tmp_path / "done"))
    until(lambda: shop.count("start")["long"], what="the task runs")
    free = shop.worker("solo", "-c", "1", "-Q", queues)
    for number in range(6):
        shop.send(app, "note", f"b{number}", queue=f"{shop.queue}-b")
        shop.send(app, "note", f"c{number}", queue=f"{shop.queue}-c")
    names = {f"{letter}{number}" for letter in "bc" for number in range(6)}
    shop.wait_for_ends(names)
    ran = {pid for event, name, pid, _ in shop.ledger() if name in names}
    assert ran == {free.process.pid}
    (tmp_path / "done").touch()
    shop.wait_for_ends({"long"})
    assert [busy.stop(), free.stop()] == [0, 0]
    assert set(shop.count("start").values()) == {1}


def test_a_task_whose_process_dies_runs_again(shop: Shop, tmp_path: Path) -> None:
    shop.settings = {"acks_late": 1}
    app = shop.app()
    shop.worker()
    shop.send(app, "die_once", "victim", str(tmp_path / "died"))
    shop.wait_for_ends({"victim"})
    assert shop.count("start")["victim"] == 2
