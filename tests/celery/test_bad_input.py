"""What is wrong is said in Celery's own way, and nothing is lost."""

import time
from pathlib import Path
from typing import Any

import httpx
import kombu
import pytest
from kombu.exceptions import OperationalError

from penstock.errors import InvalidRequest, Unauthorized
from tests.celery.support import Shop
from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.tokens import SECRET, token
from tests.support.wait import until


def dead_letters(api: httpx.Client, queue: str) -> list[str]:
    answer = api.get("/api/v1/dlq", params={"queue": queue}).raise_for_status().json()
    return [one["errorMessage"] for one in answer["messages"]]


def test_a_broker_that_is_down_is_an_operational_error_at_once(own_shop: Shop) -> None:
    own_shop.url = f"penstock://127.0.0.1:{free_port()}"
    started = time.monotonic()
    with pytest.raises(OperationalError, match="cannot connect"):
        own_shop.send(own_shop.app(), "note", "x")
    assert time.monotonic() - started < 30


def test_a_worker_waits_for_a_broker_that_is_down_at_its_start(
    postgres: Any, tmp_path: Path, own_shop: Shop
) -> None:
    (tmp_path / "broker").mkdir()
    broker = BrokerProcess(tmp_path / "broker", database_url=fresh_database(postgres))
    own_shop.url = f"penstock://127.0.0.1:{broker.ports['http']}"
    worker = own_shop.start_worker("prefork", retry=1)
    until(lambda: "Cannot connect to penstock" in worker.log, 120, "it says so")
    with broker:
        worker.wait_ready()
        own_shop.send(own_shop.app(), "note", "x")
        own_shop.wait_for_ends({"x"})
        assert worker.stop() == 0


@pytest.mark.parametrize("url", ["penstock://127.0.0.1:99999999", "penstock://[::1:6632"])
def test_a_wrong_url_is_reported(url: str) -> None:
    with pytest.raises((InvalidRequest, ValueError, OverflowError)):
        kombu.Connection(url).connect()


def test_a_server_that_is_not_a_broker_is_reported(broker: BrokerProcess) -> None:
    _, port = broker.tcp
    with (
        kombu.Connection(f"penstock://127.0.0.1:{port}") as connection,
        pytest.raises(Exception, match=r"127\.0\.0\.1"),
    ):
        connection.connect()


def test_tls_and_a_token_work_and_a_wrong_token_ends_the_worker(
    postgres: Any, tmp_path: Path, own_shop: Shop
) -> None:
    authority = Authority()
    certificate, key = authority.issue(tmp_path)
    ca, _ = authority.write(tmp_path, "ca", "ca-key")
    (tmp_path / "broker").mkdir()
    settings = {"tls__certificate": certificate, "tls__private_key": key, "auth__secret": SECRET}
    settings["auth__enabled"] = "true"
    with BrokerProcess(
        tmp_path / "broker", database_url=fresh_database(postgres), **settings
    ) as broker:
        port = broker.ports["http"]
        use_ssl = {"ca_certs": str(ca)}
        own_shop.url = f"penstocks://:{token(role='read-write')}@localhost:{port}"
        own_shop.settings = {"ca": ca}
        app = own_shop.app(broker_use_ssl=use_ssl)
        worker = own_shop.worker()
        own_shop.send(app, "note", "secret")
        own_shop.wait_for_ends({"secret"})
        assert app.control.ping([worker.name], timeout=20)
        assert worker.stop() == 0

        own_shop.url = f"penstocks://:wrong@localhost:{port}"
        with pytest.raises((Unauthorized, OperationalError)):
            own_shop.send(own_shop.app(broker_use_ssl=use_ssl), "note", "refused")
        refused = own_shop.start_worker("prefork")
        refused.process.wait(120)
        assert refused.process.returncode != 0
        assert "Unauthorized" in refused.log or "token" in refused.log


def test_a_token_that_cannot_delete_is_enough(
    postgres: Any, tmp_path: Path, own_shop: Shop
) -> None:
    """What goes with a connection stays then."""
    (tmp_path / "broker").mkdir()
    settings = {"auth__secret": SECRET, "auth__enabled": "true"}
    with BrokerProcess(
        tmp_path / "broker", database_url=fresh_database(postgres), **settings
    ) as broker:
        url = f"penstock://:{token(role='read-write')}@127.0.0.1:{broker.ports['http']}"
        with kombu.Connection(url) as connection:
            channel = connection.channel()
            everyone = kombu.Exchange("all", type="fanout")
            kombu.Queue("bound", everyone, auto_delete=True)(channel).declare()
            kombu.Queue("replies", routing_key="replies", auto_delete=True)(channel).declare()
            kombu.Producer(channel).publish("a result", routing_key="replies")
            channel.close()
            assert channel.closed


def test_a_full_queue_is_an_operational_error(shop: Shop, api: httpx.Client) -> None:
    options = {"ordering": "none", "maxSize": 2}
    api.post("/api/v1/configure", json={"queue": shop.queue, "options": options}).raise_for_status()
    app = shop.app()
    for number in range(2):
        shop.send(app, "note", f"n{number}")
    with pytest.raises(OperationalError, match=r"(?i)full|maxSize"):
        shop.send(app, "note", "too-many")
    shop.worker("solo")
    shop.wait_for_ends({"n0", "n1"})
    path = f"/api/v1/resources/queues/{shop.queue}"
    until(lambda: api.get(path).json()["totals"]["completed"] == 2, what="both are acknowledged")
    shop.send(app, "note", "fits")
    shop.wait_for_ends({"fits"})


def test_what_a_worker_cannot_understand_becomes_a_dead_letter(
    shop: Shop, api: httpx.Client
) -> None:
    app = shop.app()
    worker = shop.worker("solo")
    app.send_task("tests.celery.shop.unknown", ["x"])
    body = {"body": "{", "content-type": "application/json", "content-encoding": "utf-8"}
    empty = {"headers": {}, "properties": {}}
    payloads = [
        {"not": "a message"},
        body | empty,
        body | empty | {"body": "*", "properties": {"body_encoding": "base64"}},
        body | empty | {"headers": {"compression": "application/x-gzip"}},
        {"__type__": "of no decoder", "__value__": 1},
        {"__type__": "datetime", "__value__": "someday"},
    ]
    items = [{"queue": shop.queue, "payload": payload} for payload in payloads]
    api.post("/api/v1/push", json={"items": items}).raise_for_status()
    shop.send(app, "note", "after")  # the worker continues
    shop.wait_for_ends({"after"})
    until(lambda: len(dead_letters(api, shop.queue)) == 1 + len(payloads), 60, worker.log)
    reasons = " ".join(sorted(dead_letters(api, shop.queue)))
    for reason in ("rejected", "not a message of kombu", "cannot be decoded"):
        assert reason in reasons
    assert "Received unregistered task" in worker.log
