"""The Console's details in a real Chromium: exact payloads, jumps, choices, search, problems, and what
pages say in words.
"""

import asyncio
import re
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import asyncpg
import httpx
import pytest
from adbc_driver_postgresql import dbapi

from tests.browser.support import ack, destination, pop, push, visit
from tests.support.wait import until

EXACT = '{"id":9007199254740993,"total":0.10000000000000000000001}'


def push_text(broker, queue: str, text: str) -> None:
    """Push a payload as it is written."""
    body = f'{{"items":[{{"queue":"{queue}","payload":{text}}}]}}'
    httpx.post(f"{broker.url}/api/v1/push", content=body).raise_for_status()


def bury(broker, queue: str, text: str, error: str = "no such street") -> None:
    push_text(broker, queue, text)
    ack(broker, "g", pop(broker, queue, "g", 1), "dlq", error)


def payloads(broker, queue: str, group: str) -> list[str]:
    """What a group gets, as text."""
    answer = httpx.get(
        f"{broker.url}/api/v1/pop/queue/{queue}", params={"consumerGroup": group, "batch": 100}
    )
    return re.findall(r'"(?:payload|data)":(\{[^}]*\}|\d+)', answer.text)


def test_large_integers_and_decimals_survive_every_form_and_a_copy(page, broker):
    push_text(broker, "exact", EXACT)
    [message] = pop(broker, "exact", "g", 1)
    visit(page, broker, f"messages/{message['partitionId']}/{message['transactionId']}")
    page.locator(".json-number", has_text="9007199254740993").wait_for()
    page.locator(".json-number", has_text="0.10000000000000000000001").wait_for()
    copied = page.get_by_role("button", name="Copy payload").get_attribute("data-text")
    assert copied == EXACT
    page.get_by_role("link", name="raw", exact=True).click()
    assert page.locator("pre.raw").inner_text() == EXACT
    page.get_by_role("link", name="hex", exact=True).click()
    page.locator("pre.hex", has_text="9007199254").wait_for()
    page.get_by_role("button", name="Push a copy").click()
    page.get_by_role("dialog").get_by_role("button", name="Push a copy").click()
    page.get_by_text(re.compile("^queued: ")).wait_for()
    assert payloads(broker, "exact", "other") == [EXACT, EXACT]


def test_a_pushed_payload_is_stored_as_it_was_typed(page, broker):
    push(broker, "typed", 0)
    visit(page, broker, "queues/typed")
    page.get_by_role("button", name="Push a message").click()
    page.get_by_label("Payload (JSON)").fill("{broken")
    page.get_by_role("button", name="Push", exact=True).click()
    page.get_by_role("alert").filter(has_text="JSON").wait_for()
    page.get_by_label("Payload (JSON)").fill(EXACT)
    page.get_by_role("button", name="Push", exact=True).click()
    page.get_by_text(re.compile("^queued: ")).wait_for()
    assert payloads(broker, "typed", "g") == ["0", EXACT]


def test_messages_show_previews_and_are_opened_by_keyboard(page, broker):
    push(broker, "listed", {"order": 1}, {"order": 2})
    visit(page, broker, "queues/listed?tab=messages")
    page.locator("td.preview", has_text='{"order":2}').wait_for()
    assert page.locator("tbody a[href^='#/messages/']").count() == 2
    page.locator("main").focus()
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**/messages/**")
    page.locator(".json", has_text="order: 1").first.wait_for()


def test_chosen_dead_letters_are_requeued_and_deleted_and_the_others_stay(page, broker):
    for number in range(4):
        bury(broker, "chosen", f'{{"n":{number}}}')
    visit(page, broker, "dead-letters?queue=chosen")

    def choose(*numbers: int) -> None:
        for number in numbers:
            row = page.locator("tr", has=page.locator("td.preview", has_text=f'{{"n":{number}}}'))
            row.get_by_role("checkbox").check()

    choose(0, 2)
    page.get_by_role("button", name="Requeue 2 selected").click()
    page.get_by_role("button", name="Requeue 2 messages").click()
    page.get_by_text("2 messages requeued.").wait_for()
    assert sorted(payloads(broker, "chosen", "g")) == ['{"n":0}', '{"n":2}']
    page.locator("td.preview", has_text='{"n":0}').wait_for(state="detached")
    choose(1)
    page.get_by_role("button", name="Delete 1 selected").click()
    page.get_by_role("button", name="Delete 1 dead letter").click()
    page.get_by_text("1 dead letter deleted.").wait_for()
    page.locator("td.preview", has_text='{"n":3}').wait_for()
    letters = httpx.get(f"{broker.url}/api/v1/dlq?queue=chosen").json()
    assert letters["total"] == 1


def test_a_dead_letter_is_shown_whole_edited_and_requeued_and_keeps_its_old_payload(page, broker):
    long = f'{{"id":9007199254740993,"text":"{"x" * 500}"}}'
    bury(broker, "edited", long)
    visit(page, broker, "dead-letters?queue=edited")
    page.locator("td.preview button").click()
    page.get_by_role("dialog").get_by_text("x" * 500).wait_for()
    page.get_by_role("dialog").get_by_text("9007199254740993").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Edit …").click()
    field = page.get_by_label("Payload (JSON)")
    assert field.input_value() == long
    page.get_by_role("button", name="Requeue the edited message").click()
    page.get_by_role("alert").get_by_text("Nothing has changed").wait_for()
    field.fill('{"id":9007199254740995}')
    page.get_by_role("button", name="Requeue the edited message").click()
    page.get_by_text("Requeued as").wait_for()
    page.locator("#toast a").click()
    page.locator(".timeline", has_text="9007199254740993").wait_for()  # the old payload
    assert payloads(broker, "edited", "g") == ['{"id":9007199254740995}']
    visit(page, broker, "system?tab=audit&filter=deadletters.edit")
    page.get_by_text("deadletters.edit").first.wait_for()


def test_a_topic_shows_times_and_jumps_to_an_offset_and_a_time(page, broker):
    topic = f"{broker.url}/topics/jumpy/produce"
    httpx.post(topic, json={"payloads": [f"r{n}" for n in range(120)]}).raise_for_status()
    visit(page, broker, "topics/jumpy")
    page.locator("tbody tr td", has_text=re.compile("^r119$")).wait_for()
    row = page.locator("tr[data-key='119']")
    row.locator("time").wait_for()
    page.get_by_label("from offset").fill("7")
    page.get_by_label("from offset").press("Enter")
    page.wait_for_url("**offset=7**")
    page.locator("tr[data-key='7']").wait_for()
    page.locator("tr[data-key='119']").wait_for(state="detached")
    page.get_by_label("from time").fill("2001-01-01T00:00:00")
    page.get_by_label("from time").press("Enter")
    page.locator("tr[data-href][data-key='0']").wait_for()
    page.get_by_role("link", name="newer →").click()
    page.locator("tr[data-key='50']").wait_for()
    page.locator("tr[data-key='50'] td").nth(1).click()
    page.get_by_role("heading", name="offset 50").wait_for()
    page.locator("pre.raw", has_text="r50").wait_for()
    page.get_by_role("link", name="next →").click()
    page.locator("pre.raw", has_text="r51").wait_for()


def test_records_have_keys_and_headers_and_partitions_are_chosen(page, broker):
    ask = httpx.Client(base_url=broker.url)
    ask.post("/topics/keyed", params={"format": "kafka", "partitions": 3}).raise_for_status()
    record = {"payload": EXACT, "key": "customer-7", "headers": [["tenant", "t-7"]]}
    produce = "/topics/keyed/produce"
    ask.post(produce, params={"partition": 2}, json=record).raise_for_status()
    visit(page, broker, "topics/keyed")
    page.get_by_role("heading", name="Partitions", exact=True).wait_for()
    page.get_by_label("Partition", exact=True).select_option("2")
    page.wait_for_url("**partition=2**")
    page.get_by_text("customer-7").wait_for()
    page.locator("tr[data-href] a").first.click()
    for text in ("customer-7", "tenant", "t-7", "9007199254740993"):
        page.locator("main").get_by_text(text).first.wait_for()


def test_the_members_of_a_group_of_kafka_clients_are_shown_with_their_partitions(page, broker):
    aiokafka = pytest.importorskip("aiokafka")
    ports = httpx.get(f"{broker.url}/health").json()["listeners"]
    address = next(value for name, value in ports.items() if name.lower() == "kafka")
    ask = httpx.Client(base_url=broker.url)
    ask.post("/topics/grouped", params={"format": "kafka", "partitions": 2}).raise_for_status()

    import asyncio
    import threading

    stop = threading.Event()

    async def consume() -> None:
        consumer = aiokafka.AIOKafkaConsumer(
            "grouped",
            bootstrap_servers=address.rpartition("/")[2],
            group_id="billing",
            client_id="biller",
            auto_offset_reset="earliest",
        )
        await consumer.start()
        try:
            while not stop.is_set():
                await consumer.getmany(timeout_ms=200)
                await consumer.commit()
        finally:
            await consumer.stop()

    thread = threading.Thread(target=lambda: asyncio.run(consume()))
    thread.start()
    try:
        for partition in (0, 1):
            body = {"payload": "x", "key": "k"}
            ask.post("/topics/grouped/produce", params={"partition": partition}, json=body)
        visit(page, broker, "topics/grouped")
        row = page.locator("tr[data-key='billing']")
        row.get_by_text("biller").wait_for()
        row.get_by_text("partitions 0, 1").wait_for()
        row.get_by_text("2 partitions").wait_for()
    finally:
        stop.set()
        thread.join(30)


def test_an_error_in_a_live_tail_is_said_and_is_not_a_record(page, broker):
    httpx.post(f"{broker.url}/topics/torn/produce", json={"payload": "fine"}).raise_for_status()
    visit(page, broker, "topics/torn")
    error = 'event: error\ndata: {"topic": "torn", "error": "3 records are damaged"}\n\n'
    record = 'id: 9\nevent: message\ndata: {"offset": 9, "topic": "torn", "payload": "after"}\n\n'
    page.route(
        "**/topics/torn/stream**",
        lambda route: route.fulfill(content_type="text/event-stream", body=error + record),
        times=1,
    )
    # The answer ends at once, and the tail with it: what it drew is looked at as it comes.
    page.evaluate(
        """() => { window.drawn = ""; new MutationObserver(() => { window.drawn += document.body.innerText; })
             .observe(document.body, { childList: true, subtree: true, characterData: true }); }"""
    )
    page.get_by_role("button", name="Live tail").click()
    page.locator("#toast", has_text="3 records are damaged").wait_for()
    page.get_by_role("button", name="Live tail").wait_for()  # the stream has ended
    assert "undefined" not in page.evaluate("window.drawn")


def test_anything_is_found_from_every_page(page, broker):
    push(broker, "sought-queue", 1)
    [message] = pop(broker, "sought-queue", "sought-group", 1)
    ask = httpx.Client(base_url=broker.url)
    ask.post("/topics/sought-topic/produce", json={"payload": "x"}).raise_for_status()
    schedule = {"cron": "0 3 * * *", "queue": "sought-queue"}
    ask.put("/api/v1/schedules/sought-schedule", json=schedule).raise_for_status()
    route = {"name": "sought-route", "destination": {"type": "http", "url": "http://127.0.0.1:9/"}}
    ask.post("/api/v1/routes", json=route).raise_for_status()
    visit(page, broker, "system")
    page.get_by_role("heading", name="Listeners").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("sought")
    found = page.get_by_role("option")
    for name in ("queue", "queue@sought-group", "topic", "schedule", "route"):
        found.filter(has_text=f"sought-{name}").first.wait_for()
    page.get_by_role("combobox").fill("sought-topic")
    found.filter(has_text="sought-topic").first.wait_for()
    page.locator("#found li").nth(1).wait_for(state="detached")
    page.keyboard.press("Enter")
    page.wait_for_url("**/topics/sought-topic")
    page.keyboard.press("/")
    page.keyboard.type(message["transactionId"])
    found.filter(has_text=message["transactionId"]).wait_for()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/messages/**/{message['transactionId']}")
    page.keyboard.press("/")
    page.get_by_role("combobox").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("combobox").wait_for(state="detached")


def test_problems_are_one_line_that_opens_and_is_acknowledged(page, broker):
    for name in ("one", "two"):
        report = {"state": "failed", "started_at": 1.0, "error": f"no column {name}"}
        url = f"{broker.url}/api/v1/pipelines/broken-{name}"
        httpx.put(url, json=report).raise_for_status()
    page.set_viewport_size({"width": 380, "height": 700})
    visit(page, broker, "overview")
    strip = page.get_by_role("region", name="Problems")
    more = strip.get_by_role("button", name=re.compile(r"\d+ more"))
    more.wait_for()
    height = strip.evaluate("strip => strip.getBoundingClientRect().height")
    assert height < 50, "it is one line, also on a phone"
    more.click()
    links = strip.get_by_role("link", name=re.compile("pipeline broken-"))
    until(lambda: links.count() == 2, 30)
    strip.get_by_role("button", name="Acknowledge").click()
    strip.wait_for(state="detached")
    page.reload()
    page.get_by_role("button", name=re.compile("acknowledged problem")).wait_for()
    assert strip.count() == 0
    report = {"state": "failed", "started_at": 1.0, "error": "something new"}
    httpx.put(f"{broker.url}/api/v1/pipelines/broken-new", json=report).raise_for_status()
    strip.get_by_role("link", name=re.compile("pipeline broken-new")).wait_for()
    page.get_by_role("button", name=re.compile("acknowledged problem")).click()
    counted = strip.locator("b")
    until(lambda: int(re.findall(r"\d+", counted.inner_text())[0]) >= 3, 30)
    for name in ("one", "two", "new"):
        httpx.delete(f"{broker.url}/api/v1/pipelines/broken-{name}").raise_for_status()


def test_groups_and_consumers_agree_on_how_many_consumers_there_are(page, broker):
    push(broker, "agreed", *range(4))
    with httpx.Client(base_url=broker.url) as one, httpx.Client(base_url=broker.url) as other:
        for client in (one, other):  # two connections that report nothing
            client.get("/api/v1/pop/queue/agreed", params={"consumerGroup": "plain"})
        one.get("/api/v1/pop/queue/agreed", params={"consumerGroup": "reported"})
        report = {"id": "x", "name": "biller-1", "queue": "agreed", "group": "reported"}
        one.post("/api/v1/consumers", json={"consumers": [report]}).raise_for_status()
        visit(page, broker, "queues/agreed")

        def counted(group: str) -> str:
            return page.locator(f"tr[data-key='{group}'] td[data-title='Consumers']").inner_text()

        page.locator("tr[data-key='plain']").wait_for()
        until(lambda: (counted("plain"), counted("reported")) == ("2", "1"), 30)
        page.get_by_role("link", name="Consumers", exact=True).click()
        page.get_by_text("2 connections without reports").wait_for()
        assert page.locator("tbody tr").count() == 2
        assert page.locator("tbody tr", has_text="biller-1").count() == 1


def test_a_route_with_an_open_breaker_is_not_running(page, broker):
    with destination() as (url, statuses):
        statuses.append(503)
        route = {
            "name": "broken",
            "destination": {"type": "http", "url": url},
            "queue": {"circuit_breaker": {"threshold": 1, "reset_timeout": "60s"}},
        }
        httpx.post(f"{broker.url}/api/v1/routes", json=route).raise_for_status()
        push_url = f"{broker.url}/api/v1/routes/broken/push"
        httpx.post(push_url, json={"records": [1, 2]}).raise_for_status()
        status = f"{broker.url}/api/v1/routes/broken"
        until(lambda: httpx.get(status).json()["breaker"]["state"] in ("open", "half_open"), 60)
        visit(page, broker, "routes")
        row = page.locator("tr[data-key='broken']")
        state = row.locator("td[data-title='State']")
        state.get_by_text(re.compile("^(failing|probing)$")).wait_for()
        assert "running" not in row.inner_text()
        httpx.delete(status, params={"force": True}).raise_for_status()


def test_a_pipeline_has_a_page_with_its_graph_batches_and_error(page, broker):
    name = "enrich-orders-with-customers-and-prices-from-the-warehouse"
    report = {
        "state": "failed",
        "started_at": time.time() - 60,
        "batch": 7,
        "batch_ms": 830,
        "rows": 1200,
        "error": "no column 'currency'",
        "graph": [
            {"kind": "source", "name": "orders", "title": "queue orders", "inputs": []},
            {"kind": "step", "name": "paid", "title": "", "inputs": ["orders"]},
            {"kind": "sink", "name": "lake", "title": "delta lake/orders", "inputs": ["paid"]},
        ],
        "batches": [{"batch": 7, "at": "2026-01-01T00:00:00.000Z", "rows": 200, "ms": 830}],
    }
    httpx.put(f"{broker.url}/api/v1/pipelines/{name}", json=report).raise_for_status()
    visit(page, broker, "pipelines")
    link = page.locator(f"tr[data-key='{name}'] a")
    link.wait_for()
    height = link.evaluate("link => link.getClientRects().length")
    assert height == 1, "its name is not wrapped"
    link.click()
    page.get_by_role("alert").get_by_text("no column 'currency'").wait_for()
    graph = page.get_by_role("img", name=re.compile("sink lake from paid"))
    assert graph.locator(".node").count() == 3
    assert graph.locator(".edge").count() == 2
    assert "200" in page.get_by_role("table", name="Last batches").inner_text()
    httpx.delete(f"{broker.url}/api/v1/pipelines/{name}").raise_for_status()


def test_a_schedule_is_said_in_words_with_its_next_five_times(page, broker):
    schedule = {"cron": "30 9,17 * * 1-5", "timezone": "Europe/Rome", "queue": "worded"}
    httpx.put(f"{broker.url}/api/v1/schedules/worded", json=schedule).raise_for_status()
    visit(page, broker, "schedules")
    row = page.locator("tr[data-key='worded']")
    row.get_by_text("at 09:30 and 17:30, Monday to Friday").wait_for()
    row.locator("summary").click()
    assert row.get_by_role("list", name="Next times of worded").locator("li").count() == 5


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("* * * * *", "every minute"),
        ("*/5 * * * *", "every 5 minutes"),
        ("0 * * * *", "every hour"),
        ("0 3 * * *", "at 03:00"),
        ("0 0 1 1 *", "at 00:00, on day 1 of the month, in January"),
        ("0 0 13 * fri", "at 00:00, on day 13 of the month or Friday"),
        ("@daily", "at 00:00"),
        ("5 4 L * *", ""),
    ],
)
def test_cron_expressions_have_words(page, broker, cron, words):
    page.goto(f"{broker.url}/console/")
    said = page.evaluate("cron => import('./cron.js').then((it) => it.inWords(cron))", cron)
    assert said == words


def test_a_name_that_equals_its_namespace_is_shown_once(page, broker):
    for queue, namespace in (("twice", "twice"), ("once", "shop")):
        body = {"queue": queue, "namespace": namespace, "options": {}}
        httpx.post(f"{broker.url}/api/v1/configure", json=body).raise_for_status()
    visit(page, broker, "queues?filter=ce")
    cell = page.locator("tr[data-key='twice'] td").first
    cell.wait_for()
    assert cell.inner_text().strip() == "twice"
    assert page.locator("tr[data-key='once'] td").first.inner_text().split() == ["once", "shop"]


def test_minutes_and_seconds_join_without_a_gap_or_a_spike(page, broker):
    page.goto(f"{broker.url}/console/")
    minutes = [[60_000 * n + 30_000, 100.0] for n in range(5)]
    seconds = [[300_000 + 1000 * n, 900.0 if n == 22 else 100.0] for n in range(23)]
    joined = page.evaluate(
        """async (samples) => {
          const { inSteps, lines } = await import("./components/chart.js");
          const { html, render } = await import("./html.js");
          const times = samples.map(([at]) => at);
          const values = samples.map(([, value]) => value);
          values[5] = null;  // the first second has no rate
          const steps = inSteps({ times, series: { pushed: values } });
          const place = document.createElement("div");
          render(place, lines({ ...steps, series: [{ name: "pushed", values: steps.series.pushed }], title: "t" }));
          return { values: steps.series.pushed, path: place.querySelector("path.line").getAttribute("d") };
        }""",
        minutes + seconds,
    )
    assert joined["values"] == [100.0] * 7, "five minutes and two whole steps of ten seconds"
    assert joined["path"].count("M") == 1, "one line without a gap"


def test_after_a_reload_the_chart_has_no_empty_minutes_and_no_vertical_end(page, broker):
    push(broker, "charted", *range(10))

    async def count_minutes() -> None:
        """Count 600 pushes in each of the last 20 minutes, as a broker that ran so long has."""
        database = await asyncpg.connect(broker.database_url)
        try:
            await database.execute(
                """INSERT INTO penstock.history (minute, queue_id, group_id, pushed)
                   SELECT date_trunc('minute', now()) - n * interval '1 minute', q.id, 0, 600
                     FROM generate_series(1, 20) n, penstock.queues q WHERE q.name = 'charted'
                   ON CONFLICT DO NOTHING"""
            )
        finally:
            await database.close()

    run_apart(count_minutes)
    page.wait_for_timeout(2500)  # nobody watches: the broker stops to sample
    visit(page, broker, "overview")
    drawn = page.locator("figure.chart path.line").first
    drawn.wait_for()
    push(broker, "charted", *range(2000))  # a spike in one second
    rates = "import('./live.js').then(({ live }) => live.history.series.pushed)"
    until(lambda: any((rate or 0) > 500 for rate in page.evaluate(rates)), 30, "it is sampled")
    page.reload()
    drawn.wait_for()
    path = drawn.get_attribute("d")
    places = points(path)
    assert path.count("M") == 1, "one line without a gap"
    assert places[0][0] == 44.0, "it begins at the left edge"
    start, end = page.evaluate(
        "(({ times }) => [times.at(0), times.at(-1)])(document.querySelector('figure.chart').points)"
    )
    assert end - start > 13 * 60_000, "the minutes before the reload are there"
    for (x, y), (next_x, next_y) in pairwise(places):
        assert next_x - x > 3 or abs(next_y - y) < 5, f"a vertical line at {x}: {path}"


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+) ([\d.]+)", path)]


def run_apart(work) -> None:
    """Run a coroutine function in a thread: Playwright keeps an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(work())).result(30)


def test_waiting_and_outstanding_are_two_names_for_two_things(page, broker):
    push(broker, "two-groups", *range(3))
    for group in ("a", "b"):
        pop(broker, "two-groups", group, 1)
    visit(page, broker, "overview")
    page.get_by_text("Where everything is").wait_for()
    card = page.locator(".card", has=page.get_by_role("heading", name="Where everything is"))
    card.get_by_text("outstanding").first.wait_for()
    assert "waiting" not in card.inner_text()
    tile = page.locator(".figure", has=page.get_by_text("waiting", exact=True)).first
    assert tile.locator("[title*='no group reads']").count() == 1


def test_templates_are_parsed_once_and_only_changed_values_are_written(page, broker):
    page.goto(f"{broker.url}/console/")
    result = page.evaluate(
        """async () => {
          const { each, html, render } = await import("./html.js");
          let parsed = 0;
          const inner = Object.getOwnPropertyDescriptor(Element.prototype, "innerHTML");
          Object.defineProperty(Element.prototype, "innerHTML", { ...inner, set(text) { parsed += 1; inner.set.call(this, text); } });
          const place = document.createElement("div");
          document.body.append(place);
          const row = ([key, value]) => html`<tr data-key="${key}"><td class="${value > 1 ? "many" : null}">${value}</td></tr>`;
          const draw = (rows) => render(place, html`<table><tbody>${each(rows, ([key]) => key, row)}</tbody></table>`);
          draw([["a", 1], ["b", 1]]);
          const first = place.querySelector("[data-key=a]");
          const before = parsed;
          const changes = [];
          const seen = new MutationObserver((list) => changes.push(...list));
          seen.observe(place, { childList: true, subtree: true, characterData: true, attributes: true });
          draw([["a", 1], ["b", 1]]);
          const idle = seen.takeRecords().length;
          draw([["a", 2], ["b", 1]]);
          const changed = seen.takeRecords().map((one) => one.type).sort();
          draw([["c", 1], ["b", 1], ["a", 2]]);
          const keys = [...place.querySelectorAll("tr")].map((one) => one.dataset.key);
          const text = html`<p title="${'"><img src=x>'}">${"<b>no</b>"}</p>`;
          render(place, text);
          return { again: parsed - before - 1, idle, changed, keys, same: first === null ? null : first.dataset.key,
                   markup: place.querySelector("p").outerHTML.replaceAll("<!---->", "") };
        }"""
    )
    assert result["again"] == 0, "the rows' template was parsed before"
    assert result["idle"] == 0
    assert result["changed"] == ["attributes", "characterData"]
    assert result["keys"] == ["c", "b", "a"]
    assert "<b>no</b>" not in result["markup"]
    assert "&lt;b&gt;no" in result["markup"]


def test_the_console_and_the_docs_have_one_logo(broker):
    from pathlib import Path

    root = Path(__file__).parents[2]
    icon = (root / "src/penstock/wire/console/icon.svg").read_text()
    assert (root / "docs/assets/logo.svg").read_text() == icon
    assert "logo: assets/logo.svg" in (root / "mkdocs.yml").read_text()
    assert httpx.get(f"{broker.url}/console/icon.svg").text == icon


def test_a_shared_topic_shows_where_its_records_are(page, broker):
    ask = httpx.Client(base_url=broker.url)
    asked = {"placement": "shared", "partitions": 2}
    ask.post("/topics/pooled", params=asked).raise_for_status()
    for number in range(3):
        ask.post("/topics/pooled/produce", json={"payload": f"r{number}"}).raise_for_status()
    visit(page, broker, "topics")
    page.locator("tr[data-key='pooled'] .badge", has_text="shared").wait_for()
    visit(page, broker, "topics/pooled")
    page.locator("h1 .badge", has_text="shared").wait_for()
    place = page.get_by_role("table", name="Where the records are")
    page.locator("h2", has_text="old records move to object storage on schedule").wait_for()
    assert place.locator("tr[data-key='0'] td").all_inner_texts()[:2] == ["0", "3"]
    assert page.get_by_text("Segments").count() == 0
    with dbapi.connect(broker.database_url, autocommit=True) as connection:
        aged = "UPDATE penstock.shared_batches SET appended_at = appended_at - interval '1 hour'"
        connection.cursor().execute(aged)
    until(lambda: _moved(ask) == 1, 60)
    page.reload()
    place.locator("tr[data-key='0'] td").nth(3).get_by_text("1", exact=True).wait_for()
    cells = place.locator("tr[data-key='0'] td").all_inner_texts()
    assert (cells[1], cells[3], cells[5]) == ("0", "1", "3")
    page.locator("tbody tr td", has_text=re.compile("^r2$")).wait_for()


def _moved(ask: httpx.Client) -> int:
    """How many ranges of the first partition are in object storage."""
    parts = ask.get("/api/v1/topics/pooled/partitions").json()["partitions"]
    return parts[0]["shared"]["tiered_ranges"]
