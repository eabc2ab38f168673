"""The examples, run as a person would run them, against one broker."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import SyncClient
from tests.conftest import fresh_database
from tests.support import guard
from tests.support.broker import BrokerProcess
from tests.support.ports import free_port
from tests.support.wait import until

EXAMPLES = Path(__file__).parents[2] / "examples"
CHROMIUM = os.environ.get("PENSTOCK_TEST_CHROMIUM") or shutil.which("chromium")
PATIENCE_SECONDS = 60
pytestmark = pytest.mark.xdist_group("examples")


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """What `python -m http.server -d examples/tail` serves; its address."""

    class Files(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(EXAMPLES / "tail"))

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def database(postgres: Any) -> str:
    return fresh_database(postgres)


@pytest.fixture(scope="module")
def broker(
    database: str, page: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("examples")
    with BrokerProcess(directory, database_url=database, http_server__cors_origin=page) as process:
        yield process


def run(broker: BrokerProcess, name: str, *words: str) -> list[str]:
    """A script from its start to its end; what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words],
        env={**os.environ, "PENSTOCK_URL": broker.url},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@contextmanager
def web(broker: BrokerProcess, application: str, **env: str) -> Iterator[httpx.Client]:
    """A web application under uvicorn."""
    port = free_port()
    words = ["--app-dir", str(EXAMPLES), application, "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", *words],
        env={**os.environ, "PENSTOCK_URL": broker.url, **env},
    )
    guard.watch(process.pid)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

            def answers() -> bool:
                assert process.poll() is None
                try:
                    return client.get("/openapi.json").is_success
                except httpx.TransportError:
                    return False

            until(answers, PATIENCE_SECONDS)
            yield client
    finally:
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) in (0, -15)


def test_the_readme_names_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        assert path.name == "README.md" or path.name.startswith("__") or f"[{path.name}" in text


def test_a_web_application_and_its_worker(broker: BrokerProcess) -> None:
    with web(broker, "web_and_worker:app") as client:
        statuses = [client.post("/orders/7").json()["status"] for _ in range(2)]
        assert statuses == ["queued", "duplicate"]
        mails = until(lambda: client.get("/mails").json(), PATIENCE_SECONDS)
        assert mails == ["to anna: we have your order 7"]


def test_two_groups_and_the_runbook_of_dead_letters(broker: BrokerProcess) -> None:
    assert run(broker, "orders.py") == [
        "shipped: [1, 2, 3, 'four']",
        "billed: [1, 3, 'four']",
        "dead letter: {'id': 2, 'total': -5} because order 2 has a negative total",
        "delivered again: 1",
        "billed at last: 2",
    ]


def test_a_shop_with_an_outbox(broker: BrokerProcess, database: str) -> None:
    with web(broker, "outbox_shop:app", SHOP_DATABASE=database) as client:
        assert client.post("/orders/1", params={"total": 10}).status_code == 201
        assert client.post("/orders/1", params={"total": 11}).status_code == 409
        assert client.post("/orders/2", params={"total": 0}).status_code == 409
        assert client.post("/orders/3", params={"total": 30}).status_code == 201
        until(lambda: len(client.get("/invoices").json()) >= 2, PATIENCE_SECONDS)
        assert client.get("/invoices").json() == [[1, 10], [3, 30]]
        stored = httpx.get(f"{broker.url}/api/v1/messages?queue=shop-orders").json()["messages"]
        assert len(stored) == 2  # nothing of the orders that were refused


def test_the_shop_from_its_setup_to_its_report(broker: BrokerProcess, database: str) -> None:
    env = {**os.environ, "PENSTOCK_URL": broker.url, "PYTHONPATH": str(EXAMPLES)}
    env["SHOP_DATABASE"] = database
    for _ in range(2):  # a deployment may run it again
        subprocess.run([sys.executable, "-m", "shop.setup"], env=env, check=True, timeout=100)
    command = [sys.executable, "-m", "penstock", "worker", "shop.worker:client"]
    worker = subprocess.Popen([*command, "--processes", "2"], env=env)
    guard.watch(worker.pid)
    try:
        with web(broker, "shop.web:app", SHOP_DATABASE=database) as client:
            for number in range(20):
                order = {"id": number, "customer": "anna", "total": 100}
                assert client.post("/orders", json=order).status_code == 202
            assert client.post("/orders", json=order).status_code == 409
            bad = {"id": 20, "customer": "anna", "total": -1}
            assert client.post("/orders", json=bad).status_code == 202
            until(
                lambda: all(
                    client.get(f"/orders/{number}").json()["state"] == "paid"
                    for number in range(20)
                ),
                PATIENCE_SECONDS,
            )
            with SyncClient(broker.url) as operator:
                letters = until(
                    lambda: operator.admin.dead_letters("shop.orders").messages, PATIENCE_SECONDS
                )
                assert [letter.data["id"] for letter in letters] == [20]
                operator.schedules.run("shop-report")
            events = client.get("/events", params={"limit": 21}).text
            assert events.count('"event": "paid"') == 20
            assert '"event": "report", "orders": {"paid": 20, "new": 1}' in events.replace(
                '{"new": 1, "paid": 20}', '{"paid": 20, "new": 1}'
            )
    finally:
        worker.terminate()
        assert worker.wait(PATIENCE_SECONDS) == 0
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / "shop")],
        env={**env, "PENSTOCK_TEST_URL": broker.url},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_spans_that_survive_a_backend_that_is_away(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKEND_PORT", str(free_port()))
    away, back = run(broker, "telemetry.py")
    assert away.startswith("the backend is away, requests in the queue: ")
    assert int(away.rpartition(" ")[2]) > 0
    assert back == "the backend is back, spans delivered: 1000"


def test_a_nightly_report(broker: BrokerProcess) -> None:
    planned, made = run(broker, "nightly.py", "--now")
    assert planned.startswith("next reports: ")
    assert made.startswith("made the daily report of schedule:nightly-report:")


def test_a_test_of_code_that_uses_queues(broker: BrokerProcess) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(EXAMPLES / "test_with_pytest.py")],
        env={**os.environ, "PENSTOCK_TEST_URL": broker.url},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "1 passed" in done.stdout, done.stdout


def test_one_trace_from_the_request_to_the_worker(broker: BrokerProcess) -> None:
    assert run(broker, "tracing.py") == [
        "one trace:",
        "  POST /orders",
        "  send traced-orders",
        "  process traced-orders",
        "  bill order 7",
    ]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: tools/chromium installs it")
@pytest.mark.browser
def test_a_topic_in_the_browser(broker: BrokerProcess, page: str) -> None:
    from playwright.sync_api import expect, sync_playwright

    produce = f"{broker.url}/topics/clicks"
    httpx.post(produce).raise_for_status()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page()
        tab.goto(f"{page}?topic=clicks&broker={broker.url}")
        for number in range(3):
            httpx.post(f"{produce}/produce", json={"payload": f"click {number}"}).raise_for_status()
        expect(tab.locator("li")).to_have_text(
            ["0: click 0", "1: click 1", "2: click 2"], timeout=1000 * PATIENCE_SECONDS
        )
        browser.close()
