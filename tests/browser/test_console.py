"""The Console in a real Chromium, against a real broker: what a person sees and does."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess
from tests.support.tokens import AUDIENCE, ISSUER, SECRET, token

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
PATIENCE_MS = 30_000  # the machine may be busy
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: tools/chromium installs it"),
    pytest.mark.chaos,
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def browser(broker, guarded):  # begun last: Playwright keeps an event loop in this thread
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def broker(postgres, tmp_path_factory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("console")
    with BrokerProcess(directory / "data", database_url=fresh_database(postgres)) as process:
        yield process


@pytest.fixture(scope="module")
def guarded(postgres, tmp_path_factory) -> Iterator[BrokerProcess]:
    """A broker that asks for tokens."""
    directory = tmp_path_factory.mktemp("guarded")
    env = {
        "JWT_ENABLED": "true",
        "JWT_SECRET": SECRET,
        "JWT_ALGORITHM": "HS256",
        "JWT_ISSUER": ISSUER,
        "JWT_AUDIENCE": AUDIENCE,
    }
    with BrokerProcess(
        directory / "data", database_url=fresh_database(postgres), env=env
    ) as process:
        yield process


@pytest.fixture
def page(browser, broker):
    """A page that fails the test when the browser complains about anything."""
    opened = browser.new_page(viewport={"width": 1200, "height": 800})
    opened.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("console", lambda line: line.type == "error" and complaints.append(line.text))
    yield opened
    opened.close()
    away = re.compile(
        "ERR_CONNECTION_REFUSED|ERR_INCOMPLETE|ERR_EMPTY|40[13]|Failed to load resource"
    )
    assert [line for line in complaints if not away.search(line)] == []


def push(broker: BrokerProcess, queue: str, *payloads: object) -> None:
    items = [{"queue": queue, "payload": payload} for payload in payloads]
    httpx.post(f"{broker.url}/api/v1/push", json={"items": items}).raise_for_status()


def pop(broker: BrokerProcess, queue: str, group: str, batch: int) -> list[dict]:
    answer = httpx.get(
        f"{broker.url}/api/v1/pop/queue/{queue}", params={"consumerGroup": group, "batch": batch}
    )
    return answer.json()["messages"] if answer.status_code == 200 else []


def ack(
    broker: BrokerProcess, group: str, messages: list[dict], status: str, error: str = ""
) -> None:
    answers = [
        {k: m[k] for k in ("transactionId", "partitionId", "leaseId")}
        | {"status": status, "error": error}
        for m in messages
    ]
    body = {"acknowledgments": answers, "consumerGroup": group}
    httpx.post(f"{broker.url}/api/v1/ack/batch", json=body).raise_for_status()


def visit(page, broker: BrokerProcess, address: str) -> None:
    page.goto(f"{broker.url}/console/#/{address}")


def test_a_browser_is_led_to_the_console_and_a_program_is_not(page, broker):
    page.goto(broker.url)
    page.get_by_role("link", name="Penstock").wait_for()
    assert page.url.startswith(f"{broker.url}/console/")
    assert httpx.get(broker.url).json()["docs"] == "/docs"


def test_messages_that_are_pushed_appear_by_themselves(page, broker):
    visit(page, broker, "queues")
    push(broker, "lively", *range(7))
    row = page.locator("tr[data-key='lively']")
    row.wait_for()
    assert row.locator("td").nth(1).inner_text() == "7"
    push(broker, "lively", *range(5))
    row.locator("td", has_text=re.compile("^12$")).first.wait_for()


def test_a_filter_stands_in_the_address_and_survives_a_reload(page, broker):
    push(broker, "apples", 1)
    push(broker, "pears", 1)
    visit(page, broker, "queues")
    page.locator("tr[data-key='pears']").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("appl")
    page.wait_for_url("**filter=appl**")
    page.locator("tr[data-key='pears']").wait_for(state="detached")
    page.reload()
    page.locator("tr[data-key='apples']").wait_for()
    assert page.locator("tr[data-key='pears']").count() == 0


def test_requeue_of_what_matches_empties_the_list_and_delivers_again(page, broker):
    push(broker, "failing", 1, 2, 3)
    ack(broker, "mail", pop(broker, "failing", "mail", 10), "dlq", "gateway timeout")
    visit(page, broker, "dead-letters?queue=failing&group=mail")
    page.get_by_text("gateway timeout").first.wait_for()
    page.get_by_role("button", name="Requeue all 3 of failing@mail").click()
    page.get_by_role("button", name="Requeue 3 messages").click()
    page.get_by_text("No dead letter matches").wait_for()
    assert len(pop(broker, "failing", "mail", 10)) == 3


def test_what_seek_previews_is_what_comes_again(page, broker):
    push(broker, "again", *range(9))
    ack(broker, "bill", pop(broker, "again", "bill", 9), "completed")
    visit(page, broker, "queues/again")
    page.get_by_role("button", name="Seek").click()
    page.get_by_role("button", name="Preview").click()
    page.get_by_role("button", name="Deliver 9 messages again").click()
    page.get_by_text("goes on from beginning").wait_for()
    assert len(pop(broker, "again", "bill", 20)) == 9


@pytest.mark.parametrize(
    "payload",
    [
        "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>",
        "\x00\x1b[31m\u202e",
        "x" * 1_000_000,
        eval("[" * 60 + "]" * 60),
    ],
    ids=["markup", "control characters", "1 MB", "deep"],
)
def test_a_payload_is_shown_harmlessly(page, broker, payload):
    push(broker, "odd", payload)
    message = pop(broker, "odd", f"g{hash(str(payload))}", 100)[-1]
    visit(page, broker, f"messages/{message['partitionId']}/{message['transactionId']}")
    page.locator(".json").first.wait_for()
    for mode in ("raw", "hex"):
        page.get_by_role("link", name=mode, exact=True).click()
        page.locator(f"pre.{mode}").wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img").count() == 0


def test_on_a_phone_nothing_is_wider_than_the_screen(page, broker):
    push(broker, "phone", 1)
    page.set_viewport_size({"width": 380, "height": 700})
    for address in (
        "overview",
        "queues",
        "queues/phone",
        "dead-letters",
        "topics",
        "buffers",
        "system",
    ):
        visit(page, broker, address)
        page.locator("main h1").first.wait_for(state="attached")
        page.wait_for_timeout(300)
        wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0, address


def test_it_says_when_the_broker_is_away_and_goes_on_when_it_is_back(page, broker):
    visit(page, broker, "overview")
    page.get_by_text("● live").wait_for()
    broker.kill()
    page.get_by_text("broker away").wait_for()
    broker.start()
    page.get_by_text("● live").wait_for()
    push(broker, "after", 1)
    visit(page, broker, "queues?filter=after")
    page.locator("tr[data-key='after']").wait_for()


def test_everything_it_needs_comes_from_the_broker_under_a_strict_policy(page, broker):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    visit(page, broker, "overview")
    page.get_by_text("● live").wait_for()
    assert all(url.startswith(broker.url) for url in asked)
    policy = httpx.get(f"{broker.url}/console/").headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    files = Path(__file__).parents[2] / "src" / "penstock" / "wire" / "console"
    assert sum(file.stat().st_size for file in files.rglob("*") if file.suffix != ".pyc") < 250_000


@pytest.mark.parametrize(
    ("role", "may_push", "may_clear"),
    [("read-only", False, False), ("read-write", True, False), ("admin", True, True)],
)
def test_a_token_is_asked_for_and_what_a_role_may_not_do_is_greyed_out_and_refused(
    browser, guarded, role, may_push, may_clear
):
    admin, mine = ({"Authorization": f"Bearer {token(one)}"} for one in ("admin", role))
    body = {"items": [{"queue": "q", "payload": 1}]}
    httpx.post(f"{guarded.url}/api/v1/push", json=body, headers=admin).raise_for_status()
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"{guarded.url}/console/#/queues/q")
    page.get_by_label("Token").fill(token(role, "ana"))
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("button", name=re.compile("ana")).wait_for()
    page.get_by_role("button", name="Clear").wait_for()
    assert page.get_by_role("button", name="Push a message").is_enabled() == may_push
    assert page.get_by_role("button", name="Clear").is_enabled() == may_clear
    pushed = httpx.post(f"{guarded.url}/api/v1/push", json=body, headers=mine)
    assert pushed.is_success == may_push
    cleared = httpx.delete(f"{guarded.url}/api/v1/queues/q/clear", headers=mine)
    assert cleared.is_success == may_clear
    page.close()


def test_the_consumers_of_a_queue_are_shown_with_their_last_error(page, broker):
    report = {
        "id": "one", "name": "biller-1", "queue": "billed", "group": "billing", "concurrency": 8,
        "inFlight": 3, "failed": 2, "lastError": "ValueError: no such customer",
        "lastErrorAt": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    push(broker, "billed", 1)
    httpx.post(f"{broker.url}/api/v1/consumers", json={"consumers": [report]}).raise_for_status()
    visit(page, broker, "queues/billed?tab=consumers")
    row = page.locator("tr", has_text="biller-1")
    row.wait_for()
    text = row.inner_text()
    assert "3 of 8" in text
    assert "billing" in text
    assert "ValueError: no such customer" in text


def test_the_page_of_the_api_runs_its_own_script_and_asks_nobody_else(page, broker):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{broker.url}/docs#post_api_v1_push")
    page.wait_for_selector("#post_api_v1_push[open]")
    assert page.text_content("#base") == broker.url
    page.keyboard.press("/")
    page.fill("input", "/topics/{topic}/produce")
    page.wait_for_function(
        "[...document.querySelectorAll('main details.post')].filter(one => !one.hidden).length == 1"
    )
    verbs = page.eval_on_selector_all(
        "summary b", "all => all.map(one => getComputedStyle(one).color)"
    )
    assert len(set(verbs)) >= 4, "verbs are told apart by colour"
    assert {url.partition("#")[0] for url in asked} == {f"{broker.url}/docs"}
