"""One browser and two brokers for all tests of the Console."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.browser.support import PATIENCE_MS
from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess
from tests.support.certificates import certificate
from tests.support.tokens import AUDIENCE, ISSUER, SECRET

CHROMIUM = os.environ.get("PENSTOCK_TEST_CHROMIUM") or shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/browser/" in str(item.path):
            item.add_marker(pytest.mark.xdist_group("browser"))
            if CHROMIUM is None:
                why = "needs Chromium: tools/chromium installs it"
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="package")
def browser(broker, guarded):  # begun last: Playwright keeps an event loop in this thread
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="package")
def brokers(postgres, tmp_path_factory) -> Iterator[tuple[BrokerProcess, BrokerProcess]]:
    """A plain one, and one of two processes that asks for tokens, over TLS; started together."""
    directory = tmp_path_factory.mktemp("console")
    cert, key = certificate(directory)
    env = {
        "JWT_ENABLED": "true",
        "JWT_SECRET": SECRET,
        "JWT_ALGORITHM": "HS256",
        "JWT_ISSUER": ISSUER,
        "JWT_AUDIENCE": AUDIENCE,
    }
    url = fresh_database(postgres)
    plain = BrokerProcess(
        directory / "plain",
        database_url=url,
        # The server itself stands for its standby: what is shown of it is the same.
        database__read_url=url,
        topics__tier=f"file://{directory}/tier",
        topics__shared_tier=f"file://{directory}/shared",
        topics__tier_interval="500ms",
    )
    plain.database_url = url
    guarded = BrokerProcess(
        directory / "guarded",
        database_url=fresh_database(postgres),
        env=env,
        workers=2,
        http_server__ssl_cert_path=cert,
        http_server__ssl_key_path=key,
    )
    with ExitStack() as stack:
        for process in (plain, guarded):
            process.start(wait=False)
            stack.callback(process.stop)
        for process in (plain, guarded):
            process.wait_until_started()
        yield plain, guarded


@pytest.fixture(scope="package")
def broker(brokers) -> BrokerProcess:
    return brokers[0]


@pytest.fixture(scope="package")
def guarded(brokers) -> BrokerProcess:
    return brokers[1]


@pytest.fixture(scope="package")
def window(browser):
    """One for all pages, so that what the Console is made of is fetched once."""
    opened = browser.new_context(viewport={"width": 1200, "height": 800})
    opened.set_default_timeout(PATIENCE_MS)
    yield opened
    opened.close()


@pytest.fixture
def page(window, broker):
    """A page that fails the test when the browser complains about anything."""
    opened = window.new_page()
    complaints: list[str] = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("console", lambda line: line.type == "error" and complaints.append(line.text))
    yield opened
    opened.close()
    away = re.compile(
        "ERR_CONNECTION_REFUSED|ERR_INCOMPLETE|ERR_EMPTY|40[13]|Failed to load resource"
    )
    assert [line for line in complaints if not away.search(line)] == []
