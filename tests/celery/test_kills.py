"""Workers and brokers are killed in the middle of tasks. The ledger says what ran how often."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.celery.support import Shop
from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess
from tests.support.form import pick
from tests.support.wait import Stopwatch, until


@pytest.fixture
def mortal(postgres: Any, tmp_path: Path, own_shop: Shop) -> Iterator[BrokerProcess]:
    """A broker of this test's own, which the shop uses."""
    directory = tmp_path / "broker"
    directory.mkdir()
    with BrokerProcess(directory, database_url=fresh_database(postgres)) as broker:
        own_shop.url = broker.url.replace("http://", "penstock://")
        yield broker


def test_tasks_of_killed_workers_run_again(shop: Shop) -> None:
    shop.settings = {"acks_late": 1, "lease": 2, "prefetch": 2}
    app = shop.app()
    names = {f"t{number}" for number in range(40)}
    shop.worker()
    for name in names:
        shop.send(app, "slow", name, 0.2)
    for kill in range(pick(short=1, usual=2, soak=10)):
        done = len(shop.count("end"))
        until(lambda done=done: len(shop.count("end")) >= min(40, done + 4), what=shop.logs())
        shop.workers[kill].kill()
        shop.worker()
    shop.wait_for_ends(names)
    assert shop.workers[-1].stop() == 0
    twice = [name for name, times in shop.count("start").items() if times > 1]
    assert len(twice) <= 4 * (len(shop.workers) - 1)  # those that a killed worker had


def test_a_task_that_was_acknowledged_early_does_not_run_again(
    shop: Shop, api: httpx.Client, queue: str
) -> None:
    shop.settings = {"acks_late": 0, "lease": 2, "prefetch": 1}
    app = shop.app()
    worker = shop.worker("prefork", "-c", "1")
    shop.send(app, "slow", "early", 600)
    until(lambda: shop.count("start")["early"], what="the task runs")
    totals = f"/api/v1/resources/queues/{queue}"
    until(lambda: api.get(totals).json()["totals"]["processing"] == 0, what="it is acknowledged")
    worker.kill()
    shop.worker("prefork", "-c", "1")
    shop.send(app, "slow", "next", 3)  # for longer than the lease
    shop.wait_for_ends({"next"})
    assert shop.count("start") == {"early": 1, "next": 1}


def test_tasks_survive_a_killed_broker(own_shop: Shop, mortal: BrokerProcess) -> None:
    # A pop whose answer the broker was sending when it died has taken messages: they come again
    # when their lease ends.
    own_shop.settings = {"acks_late": 1, "prefetch": 2, "lease": 20}
    app = own_shop.app()
    names = {f"t{number}" for number in range(40)}
    worker = own_shop.worker()
    for name in names:
        own_shop.send(app, "slow", name, 0.2)
    for _ in range(pick(short=1, usual=2, soak=10)):
        done = len(own_shop.count("end"))
        until(lambda done=done: len(own_shop.count("end")) >= min(40, done + 4))
        mortal.kill()
        mortal.start()
    own_shop.wait_for_ends(names)
    own_shop.send(app, "note", "after")
    own_shop.wait_for_ends({"after"})
    assert worker.stop() == 0
    # Acknowledgements waited for the broker, so that nothing ran twice.
    assert set(own_shop.count("start").values()) == {1}
    assert "Connection to broker lost" not in worker.log


def test_an_eta_is_kept_over_a_restart_of_the_broker(own_shop: Shop, mortal: BrokerProcess) -> None:
    app = own_shop.app()
    own_shop.worker()
    began = time.time()
    mortal.kill()
    mortal.start()
    due = time.time() + 4 + 4 * (time.time() - began)  # the next restart ends before that
    for number in range(5):
        own_shop.send(app, "note", f"eta{number}", countdown=due - time.time())
    mortal.kill()
    mortal.start()
    started = time.time()
    assert started < due, "the machine was too slow for this test"
    watch = Stopwatch()
    own_shop.wait_for_ends({f"eta{number}" for number in range(5)})
    late = [at - due for event, _, _, at in own_shop.ledger() if event == "start"]
    assert len(late) == 5
    assert min(late) > -0.2
    assert max(late) < 1.0 + watch.waited


def test_another_broker_takes_over_with_leases_and_acknowledgements(
    postgres: Any, tmp_path: Path, own_shop: Shop
) -> None:
    database = fresh_database(postgres)
    with ExitStack() as stack:
        brokers = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            broker = BrokerProcess(tmp_path / name, database_url=database)
            brokers.append(stack.enter_context(broker))
        own_shop.url = ";".join(one.url.replace("http://", "penstock://") for one in brokers)
        own_shop.settings = {"acks_late": 1, "prefetch": 1}
        app = own_shop.app()
        worker = own_shop.worker()
        own_shop.send(app, "slow", "over", 3)
        until(lambda: own_shop.count("start")["over"], what="the task runs")
        brokers[0].kill()
        own_shop.send(app, "note", "after")
        own_shop.wait_for_ends({"over", "after"})
        assert worker.stop() == 0
        assert own_shop.count("start") == {"over": 1, "after": 1}
