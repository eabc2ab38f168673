"""The Console in a real Chromium, against a real broker: what a person sees and does."""

import http.client
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.browser.accessibility import COLOURS, focus_problems, problems
from tests.browser.support import PATIENCE_MS, ack, destination, pop, push, visit
from tests.support.tokens import token
from tests.support.wait import until


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
    page.keyboard.press("f")
    page.keyboard.type("appl")
    page.wait_for_url("**filter=appl**")
    page.locator("tr[data-key='pears']").wait_for(state="detached")
    page.reload()
    page.locator("tr[data-key='apples']").wait_for()
    assert page.locator("tr[data-key='pears']").count() == 0


def test_requeue_of_all_that_match_is_done_by_the_broker_and_the_others_stay(page, broker):
    push(broker, "failing", *range(6))
    taken = pop(broker, "failing", "mail", 10)
    ack(broker, "mail", taken[:4], "dlq", "gateway timeout")
    ack(broker, "mail", taken[4:], "dlq", "bad address")
    visit(page, broker, "dead-letters?queue=failing")
    page.locator("tr", has_text="gateway timeout").first.click()
    page.wait_for_url("**filter=gateway+timeout**")
    page.get_by_role("button", name="Requeue all 4").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("failing@mail", exact=True).wait_for()  # the destination, before it happens
    dialog.get_by_role("button", name="Requeue 4 messages").click()
    page.get_by_text("4 of 4 requeued").wait_for()
    page.get_by_text("No dead letter matches").wait_for()
    assert len(pop(broker, "failing", "mail", 10)) == 4
    visit(page, broker, "dead-letters?queue=failing")
    page.get_by_role("button", name="Purge all 2").click()
    page.get_by_label("Type failing to confirm").fill("failing")
    page.get_by_role("button", name="Delete 2 dead letters").click()
    page.get_by_text("2 of 2 deleted").wait_for()
    visit(page, broker, "system?tab=audit&filter=failing")
    for action in ("deadletters.requeue", "deadletters.purge.ended"):
        page.locator("tr", has=page.get_by_text(action, exact=True)).first.wait_for()


def test_a_message_has_a_life_line_and_is_found_by_its_content(page, broker):
    push(broker, "lives", {"order": {"id": 1}}, {"order": {"id": 2}})
    ack(broker, "mail", pop(broker, "lives", "mail", 1), "dlq", "no such street")
    visit(page, broker, "queues/lives?tab=messages")
    page.get_by_text("Read on a standby, up to date.").wait_for()
    page.get_by_label("Search payloads: text, or order.id=7").fill("order.id=1")
    page.get_by_text("2 messages searched").wait_for()
    assert page.locator("tbody tr").count() == 1
    page.locator("tbody tr").click()
    page.locator(".timeline", has_text="no such street").wait_for()
    failed = page.locator(".timeline li", has=page.get_by_text("failed", exact=True))
    failed.get_by_text("by 127.0.0.1").wait_for()  # who answered so
    page.get_by_role("button", name="Push a copy").click()
    page.get_by_role("dialog").get_by_role("button", name="Push a copy").click()
    page.get_by_text(re.compile("^queued: ")).wait_for()
    assert len(pop(broker, "lives", "other", 10)) == 3


def test_partitions_come_by_lag_and_only_changed_options_are_sent(page, broker):
    items = [
        {"queue": "shaped", "partition": name, "payload": 1} for name in ("few", *["many"] * 5)
    ]
    httpx.post(f"{broker.url}/api/v1/push", json={"items": items}).raise_for_status()
    pop(broker, "shaped", "g", 1)
    visit(page, broker, "queues/shaped?tab=partitions")
    page.locator("tbody tr").first.wait_for()
    names = [row.inner_text().split()[0] for row in page.locator("tbody tr").all()]
    assert names[:2] == ["many", "few"]
    visit(page, broker, "queues/shaped?tab=options")
    sent: list[str] = []
    page.on("request", lambda request: request.method == "PATCH" and sent.append(request.post_data))
    page.get_by_role("button", name="Change options").click()
    page.get_by_label("retryLimit").fill("7")
    page.get_by_role("button", name="Save changes").click()
    page.get_by_text("Changed: retryLimit = 7.").wait_for()
    assert sent == ['{"retryLimit":7}']


def test_a_route_is_paused_and_resumed(page, broker):
    route = {"name": "r", "destination": {"type": "http", "url": "http://127.0.0.1:9/"}}
    httpx.post(f"{broker.url}/api/v1/routes", json=route).raise_for_status()

    def paused() -> bool:
        return httpx.get(f"{broker.url}/api/v1/routes/r").json()["paused"] is not None

    visit(page, broker, "routes/r")
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").wait_for()
    assert paused()
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("button", name="Pause").wait_for()
    assert not paused()


def test_dead_letters_of_a_route_are_replayed_and_it_is_purged_and_drained(page, broker):
    ask = httpx.Client(base_url=broker.url, timeout=30)
    carrier = "/api/v1/routes/carrier"

    def books() -> dict:
        return ask.get(carrier).json()["queue"]["accounting"]

    with destination() as (url, statuses):
        route = {"name": "carrier", "destination": {"type": "http", "url": url}}
        ask.post("/api/v1/routes", json=route).raise_for_status()
        ask.post(f"{carrier}/push", json={"records": [1]}).raise_for_status()
        visit(page, broker, "routes/carrier")
        page.get_by_text("✓ all accounted for").wait_for()
        page.get_by_role("button", name="Replay 1 dead letter").click()
        statuses.append(200)
        page.get_by_role("button", name="Replay 1 record").click()
        page.get_by_text("1 dead letter queued again.").wait_for()
        until(lambda: books()["delivered"] == 1, 30)
        ask.post(f"{carrier}/pause").raise_for_status()
        ask.post(f"{carrier}/push", json={"records": [2, 3]}).raise_for_status()
        page.reload()
        page.get_by_role("button", name="Resume").wait_for()
        page.get_by_role("button", name="Purge").click()
        page.get_by_label("Type carrier to confirm").fill("carrier")
        page.get_by_role("button", name="Drop 2 records").click()
        page.get_by_text("2 records dropped.").wait_for()
        assert (books()["queued"], sum(books()["dropped"].values())) == (0, 2)
        page.get_by_role("button", name="Drain").click()
        page.get_by_role("dialog").get_by_role("button", name="Drain").click()
        page.get_by_text("Draining: queued records are sent").wait_for()
        assert ask.get(carrier).json()["state"] in ("draining", "drained")
        ask.delete(carrier, params={"force": True}).raise_for_status()


def test_a_hidden_tab_pauses_the_stream_and_goes_on_when_it_is_seen(page, broker):
    def become(hidden: str) -> None:
        page.evaluate(
            f"Object.defineProperty(document, 'hidden', {{value: {hidden}, configurable: true}});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )

    visit(page, broker, "overview")
    page.get_by_text("● live").wait_for()
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/live")):
        become("true")
    page.get_by_text("paused").wait_for()
    with page.expect_request("**/api/v1/live"):
        become("false")
    page.get_by_text("● live").wait_for()


def test_a_buffer_file_that_was_refused_is_shown_with_its_reason_and_retried(page, broker):
    def press(button: str, confirmed_by: str, said: str) -> None:
        page.get_by_role("button", name=button).click()
        page.get_by_role("dialog").get_by_role("button", name=confirmed_by).click()
        page.get_by_text(said).wait_for()

    ask = httpx.Client(base_url=f"{broker.url}/api/v1", timeout=30)
    body = {"queue": "tight", "options": {"maxSize": 1}}
    ask.post("/configure", json=body).raise_for_status()
    push(broker, "tight", 1)
    visit(page, broker, "buffers")
    press("Switch maintenance on", "Send pushes to the buffer", "Pushes go to the buffer.")
    push(broker, "tight", 2)
    press("Switch maintenance off", "Replay the buffer", "The buffer is being replayed.")
    page.locator("tr", has_text="failed").get_by_text(re.compile("full")).wait_for()
    ask.delete("/queues/tight/clear").raise_for_status()
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("0 failed events left.").wait_for()
    page.get_by_text("No buffered events.").wait_for()


def test_a_pipeline_that_failed_needs_somebody_until_it_is_forgotten(page, broker):
    for rows, lag in ((10, 5), (30, 2)):
        report = {"state": "running", "started_at": 1.0, "rows": rows, "lag": lag}
        httpx.put(f"{broker.url}/api/v1/pipelines/minutely", json=report).raise_for_status()
    report = {"state": "failed", "started_at": 1.0, "rows": 30, "error": "no such column"}
    report |= {"lag": 2, "lag_seconds": 90.0, "target_seconds": 60.0}
    httpx.put(f"{broker.url}/api/v1/pipelines/minutely", json=report).raise_for_status()
    visit(page, broker, "overview")
    page.get_by_role("link", name="pipeline minutely failed: no such column").click()
    row = page.locator("tr[data-key='minutely']")
    row.locator(".bad", has_text="90 s of 60 s").wait_for()
    minutes = httpx.get(f"{broker.url}/api/v1/pipelines/minutely").json()["minutes"]
    assert sum(minute["rows"] for minute in minutes) == 30
    page.get_by_role("heading", name="Runs").wait_for()
    row.get_by_role("button", name="Remove").click()
    page.get_by_role("button", name="Remove minutely").click()
    row.wait_for(state="detached")


def test_a_group_on_a_topic_is_reset_after_a_preview(page, broker):
    records = {"payloads": ["a", "b", "c", "d"]}
    httpx.post(f"{broker.url}/topics/clicks/produce", json=records).raise_for_status()
    group = f"{broker.url}/topics/clicks/groups/g"
    httpx.post(f"{group}/commit", json={"offset": 4}).raise_for_status()
    visit(page, broker, "topics/clicks")
    page.get_by_role("button", name="Reset").click()
    page.get_by_role("button", name="Preview").click()
    page.get_by_role("button", name="Read 4 records again").click()
    page.get_by_text("g continues at offset 0.").wait_for()
    assert httpx.get(group).json()["lag"] == 4
    httpx.post(f"{broker.url}/api/v1/tier/flush").raise_for_status()
    until(lambda: httpx.get(f"{broker.url}/topics/clicks").json()["tier_offset"] == 4, 60)
    visit(page, broker, "topics")
    visit(page, broker, "topics/clicks")
    page.get_by_text("up to 4, local from 0").wait_for()


def test_what_seek_previews_is_what_comes_again(page, broker):
    push(broker, "again", *range(9))
    ack(broker, "bill", pop(broker, "again", "bill", 9), "completed")
    visit(page, broker, "queues/again")
    page.get_by_role("button", name="Seek").click()
    page.get_by_role("button", name="Preview").click()
    page.get_by_role("button", name="Deliver 9 messages again").click()
    page.get_by_text("continues from beginning").wait_for()
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


def test_a_record_that_is_no_text_is_shown_harmlessly(page, broker):
    body = b"\xff\xfe\x00<script>window.hacked = 1</script>"
    produce = f"{broker.url}/topics/bytes/produce"
    httpx.post(
        produce, content=body, headers={"Content-Type": "application/octet-stream"}
    ).raise_for_status()
    visit(page, broker, "topics/bytes")
    page.locator("tbody tr td a").first.click()
    page.locator("pre.hex").wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script").count() == 0


VIEWS = {  # address -> what is there when it has loaded
    "overview": "Where everything is",
    "queues": "shown",
    "queues/shown": "Group",
    "queues/shown?tab=partitions": "Default",
    "queues/shown?tab=consumers": "shown-consumer",
    "queues/shown?tab=messages": "Default",
    "queues/shown?tab=scheduled": "shown-later",
    "queues/shown?tab=charts": "Messages per second",
    "queues/shown?tab=options": "leaseTime",
    "dead-letters": "no such street, at all",
    "MESSAGE": "dead letter",  # the address of the newest dead letter
    "topics": "shown-topic",
    "topics/shown-topic": "Records",
    "routes": "shown-route",
    "routes/shown-route": "Records by outcome",
    "schedules": "shown-schedule",
    "buffers": "Failover",
    "pipelines": "shown-pipeline",
    "pipelines/shown-pipeline": "Last batches",
    "topics/shown-topic/0/0": "partition 0",
    "system": "Listeners",
    "system?tab=config": "database.url",
    "system?tab=log": "of this process",
    "system?tab=audit": "route.create",
}


@pytest.fixture(scope="module")
def filled(broker) -> None:
    """Something to show in every view."""
    push(broker, "shown", *range(3))
    ack(broker, "g", pop(broker, "shown", "g", 1), "dlq", "no such street, at all")
    ask = httpx.Client(base_url=broker.url)
    ask.post("/topics/shown-topic/produce", json={"payload": "x"}).raise_for_status()
    ask.post("/topics/shown-topic/groups/g/commit", json={"offset": 0}).raise_for_status()
    route = {"name": "shown-route", "destination": {"type": "http", "url": "http://127.0.0.1:9/"}}
    ask.post("/api/v1/routes", json=route).raise_for_status()
    schedule = {"cron": "0 3 * * *", "timezone": "Europe/Rome", "queue": "shown"}
    ask.put("/api/v1/schedules/shown-schedule", json=schedule).raise_for_status()
    report = {"state": "failed", "error": "no column", "started_at": 1.0}
    ask.put("/api/v1/pipelines/shown-pipeline", json=report).raise_for_status()
    later = {"queue": "shown", "payload": 1, "transactionId": "shown-later", "delay": 3600}
    ask.post("/api/v1/push", json={"items": [later]}).raise_for_status()
    consumer = {"id": "c", "name": "shown-consumer", "queue": "shown", "group": "g",
                "concurrency": 1, "inFlight": 0, "lastError": "no such street"}  # fmt: skip
    ask.post("/api/v1/consumers", json={"consumers": [consumer]}).raise_for_status()


def test_every_view_has_labels_contrast_and_focus_and_fits_a_phone(page, broker, filled):
    page.emulate_media(reduced_motion="reduce")
    wrong: list[tuple[str, ...]] = []
    for address, content in VIEWS.items():
        page.set_viewport_size({"width": 1200, "height": 800})
        if address == "MESSAGE":
            page.locator("main a[href^='#/messages/']").first.click()
        else:
            visit(page, broker, address)
        page.locator("main").get_by_text(content).first.wait_for()
        for scheme, rules in (("dark", COLOURS), ("light", None)):
            page.emulate_media(color_scheme=scheme)
            wrong += [(address, scheme, problem) for problem in problems(page, rules)]
        page.set_viewport_size({"width": 380, "height": 700})
        wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0, address
    assert not wrong, "\n".join(map(" ".join, wrong))
    visit(page, broker, "queues/shown")
    page.get_by_role("button", name="Clear").click()
    page.get_by_role("dialog").wait_for()
    assert problems(page) == []
    page.keyboard.press("Escape")
    assert focus_problems(page) == []


def test_a_message_for_later_is_pushed_with_headers_shown_and_cancelled(page, broker):
    push(broker, "reminders", 0)
    visit(page, broker, "queues/reminders?tab=scheduled")
    page.get_by_role("button", name="Push a message").click()
    page.get_by_label("Deliver in").fill("3600")
    page.get_by_label("Headers (JSON)").fill('{"tenant": "t-7"}')
    page.get_by_role("button", name="Push", exact=True).click()
    page.get_by_text(re.compile("^scheduled: ")).wait_for()
    page.get_by_role("button", name="Show").click()
    page.get_by_role("dialog").get_by_text("t-7").wait_for()
    page.keyboard.press("Escape")
    page.locator("tbody").get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel 1 message").click()
    page.get_by_text("No delayed message.").wait_for()
    assert httpx.get(f"{broker.url}/api/v1/scheduled?queue=reminders").json()["messages"] == []


def test_rows_stay_where_they_are_under_the_pointer(page, broker):
    push(broker, "steady-a", *range(3))
    push(broker, "steady-b", *range(2))
    visit(page, broker, "queues?filter=steady-")

    def names() -> list[str]:
        return page.locator("tbody tr").evaluate_all("rows => rows.map(row => row.dataset.key)")

    page.locator("tr[data-key='steady-b']").hover()
    assert names() == ["steady-a", "steady-b"]
    push(broker, "steady-b", *range(7))
    page.locator("tr[data-key='steady-b'] td", has_text=re.compile("^9$")).first.wait_for()
    assert names() == ["steady-a", "steady-b"], "the values change, the places do not"
    page.mouse.move(2, 2)
    page.locator("tbody tr:first-child[data-key='steady-b']").wait_for()


def test_a_schedule_is_created_run_paused_and_deleted(page, broker):
    visit(page, broker, "schedules")
    page.get_by_role("button", name="Create a schedule").click()
    for label, value in {"Name": "nightly", "Cron": "0 3 * *", "Queue": "at-night"}.items():
        page.get_by_label(label, exact=label != "Cron").fill(value)
    page.get_by_role("button", name="Create", exact=True).click()
    page.get_by_role("alert").get_by_text("five fields").wait_for()
    page.get_by_label("Cron").fill("0 3 * * *")
    page.get_by_role("button", name="Create", exact=True).click()
    row = page.locator("tr[data-key='nightly']")
    row.get_by_role("button", name="Run now").click()
    row.get_by_text("queued, run manually").wait_for()
    assert len(pop(broker, "at-night", "g", 9)) == 1
    row.get_by_role("button", name="Pause").click()
    row.get_by_text("paused").wait_for()
    row.get_by_role("button", name="Runs").click()
    page.get_by_role("dialog").get_by_text("schedule:nightly:").wait_for()
    page.keyboard.press("Escape")
    row.get_by_role("button", name="Delete").click()
    page.get_by_label("Type nightly to confirm").fill("nightly")
    page.get_by_role("button", name="Delete nightly").click()
    row.wait_for(state="detached")


@contextmanager
def proxy(target: str, prefix: str) -> Iterator[str]:
    """A reverse proxy that serves `target` below `prefix`; its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(f"{prefix}/"):
                self.send_error(404)
                return
            connection = http.client.HTTPConnection(urlsplit(target).netloc)
            accept = {"Accept": self.headers["Accept"]}
            connection.request("GET", self.path.removeprefix(prefix), headers=accept)
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "date"):
                    self.send_header(name, value)
            self.end_headers()
            try:
                while piece := answer.read1():
                    self.wfile.write(piece)
            except ConnectionError:
                pass  # the page has gone
            connection.close()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}{prefix}"
    server.shutdown()


def test_it_works_below_a_path_of_a_reverse_proxy(page, broker):
    push(broker, "proxied", 1)
    with proxy(broker.url, "/tools/penstock") as address:
        page.goto(f"{address}/")
        page.get_by_text("● live").wait_for()
        page.get_by_role("link", name="Queues").click()
        page.locator("tr[data-key='proxied']").wait_for()
        assert page.url.startswith(f"{address}/console/#/queues")
        page.goto("about:blank")


def test_it_says_when_the_broker_is_away_and_goes_on_when_it_is_back(page, broker):
    visit(page, broker, "overview")
    page.get_by_text("● live").wait_for()
    broker.kill()
    page.get_by_text("broker unreachable").wait_for()
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
    ask = httpx.Client(base_url=guarded.url, verify=False)
    ask.post("/api/v1/push", json=body, headers=admin).raise_for_status()
    page = browser.new_page(ignore_https_errors=True)
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"{guarded.url}/console/#/queues/q")
    page.get_by_label("Token").fill(token(role, "ana"))
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("button", name=re.compile("ana")).wait_for()
    page.get_by_role("button", name="Clear").wait_for()
    assert page.get_by_role("button", name="Push a message").is_enabled() == may_push
    assert page.get_by_role("button", name="Clear").is_enabled() == may_clear
    assert ask.post("/api/v1/push", json=body, headers=mine).is_success == may_push
    assert ask.delete("/api/v1/queues/q/clear", headers=mine).is_success == may_clear
    assert ask.get("/api/v1/audit", headers=mine).is_success == may_clear
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


def test_the_page_of_the_api_shows_every_operation_and_asks_nobody_else(page, broker):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{broker.url}/docs#post_api_v1_push")
    page.wait_for_selector("#post_api_v1_push[open]")
    assert page.evaluate("document.scrollingElement.scrollTop") > 0, "a link leads to its operation"
    sections = page.eval_on_selector_all("h2", "all => all.map(one => one.textContent)")
    assert sections[-2:] == ["queen", "internal"]
    assert page.text_content("#base") == broker.url
    document = httpx.get(f"{broker.url}/openapi.json").json()
    text = page.text_content("main")
    assert "#/components" not in text, "types are written out"
    for path, operations in document["paths"].items():
        for operation in operations.values():
            words = [path, operation["operationId"], operation.get("summary", "")]
            words += [one.get("description", "") for one in operation.get("parameters", ())]
            shown = page.text_content(f"#{operation['operationId']}")
            assert all(word in shown or word == words[1] for word in words), words
    page.keyboard.press("/")
    page.fill("input", "/topics/{topic}/produce")
    page.wait_for_function(
        "[...document.querySelectorAll('main details.post')].filter(one => !one.hidden).length == 1"
    )
    verbs = page.eval_on_selector_all(
        "summary b", "all => all.map(one => getComputedStyle(one).color)"
    )
    assert len(set(verbs)) >= 4, "verbs are told apart by colour"
    assert all(url.startswith(f"{broker.url}/") for url in asked), asked


def test_the_page_of_the_api_has_a_curl_line_per_operation_that_works(page, broker):
    page.goto(f"{broker.url}/docs")
    page.wait_for_selector("main pre.curl", state="attached")
    lines = page.eval_on_selector_all("pre.curl", "all => all.map(one => one.textContent)")
    document = httpx.get(f"{broker.url}/openapi.json").json()
    assert len(lines) == sum(len(path) for path in document["paths"].values())
    (push,) = [line for line in lines if '/api/v1/push"' in line]
    where = {"PENSTOCK_URL": broker.url, "PATH": os.environ["PATH"]}
    done = subprocess.run(["sh", "-c", f"{push} -s"], capture_output=True, env=where, check=True)
    assert {row["status"] for row in json.loads(done.stdout)} <= {"queued", "duplicate"}


def test_the_page_of_the_api_runs_no_script_but_its_own(page, broker):
    """What operations say of themselves is text, and nothing else may run on the page."""
    policy = httpx.get(f"{broker.url}/docs", follow_redirects=True).headers[
        "content-security-policy"
    ]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    document = httpx.get(f"{broker.url}/openapi.json").json()
    document["paths"]["/evil"] = {
        "get": {"operationId": "evil", "summary": "<b id=x>bold</b>", "responses": {}}
    }
    page.route("**/openapi.json", lambda route: route.fulfill(json=document))
    page.goto(f"{broker.url}/docs")
    page.wait_for_selector("#evil")
    assert page.text_content("#evil i") == "<b id=x>bold</b>"
    assert page.query_selector("#x") is None


def test_the_demo_fills_a_broker_and_removes_everything_when_it_is_interrupted(broker):
    demo = subprocess.Popen(
        [sys.executable, "-m", "penstock", "demo", "--url", broker.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with httpx.Client(base_url=broker.url, timeout=30) as ask:

        def acked() -> int:
            queues = ask.get("/api/v1/queues?filter=demo-").json()["queues"]
            return sum(queue["pushed"] for queue in queues if queue["groups"])

        try:
            until(lambda: acked() > 0, 60)
            until(lambda: "demo-warehouse" in ask.get("/api/v1/routes").text, 60)
            until(lambda: "demo-enrich-orders" in ask.get("/api/v1/pipelines").text, 60)
        finally:
            demo.send_signal(signal.SIGINT)
            output, _ = demo.communicate(timeout=60)
        assert (demo.returncode, "Traceback" in output) == (0, False), output
        for address in ("/api/v1/queues?filter=demo-", "/topics", "/api/v1/routes"):
            assert "demo-" not in ask.get(address).text
        assert "demo-" not in ask.get("/api/v1/pipelines").text
