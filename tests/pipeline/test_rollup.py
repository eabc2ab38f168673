"""rollup and dlq-report: every number against a ledger of what was really done."""

import json
import random
import re
import time
import uuid
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from penstock.cli import app
from penstock.cli import pipeline as _pipeline_commands  # noqa: F401
from penstock.errors import InvalidRequest, NotFound, Unavailable
from penstock.net.topic_link import TopicLink
from penstock.pipeline.jobs import rollup_minutes as minutes
from penstock.pipeline.jobs.dlq_report import ReportOptions, dlq_report
from penstock.pipeline.jobs.html_report import HtmlReport, check_target, colors, fit, to_html, write
from penstock.pipeline.jobs.rollup import (
    REACHED,
    RollupOptions,
    _catalog,
    _topic_names,
    _window,
    rollup,
)
from penstock.pipeline.jobs.rollup_minutes import bytes_queries, levels_now, merge_queue
from penstock.pipeline.jobs.rollup_report import Point, build
from penstock.pipeline.jobs.svg_chart import ChartSeries, Panel
from penstock.pipeline.options import ReachOptions
from penstock.pipeline.sources.postgres import Postgres
from penstock.protocol import frames
from penstock.protocol.latency import ERROR, LAST, Latencies, bucket_of, seconds_of
from penstock.queues.schema import SCHEMA
from tests.support.api import call
from tests.support.broker import BrokerProcess
from tests.support.cli import CliRunner


class Ledger:
    """A queue, and what was done to it."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url, self.queue = url, f"q-{uuid.uuid4().hex[:8]}"
        self.counts: Counter[str] = Counter()
        self.took: list[tuple[float, float]] = []  # from push to ack: seconds at least, at most
        call(
            f"{url}/api/v1/configure",
            "POST",
            {"queue": self.queue, "options": {"retryDelay": 1, **options}},
        )

    def push(self, count: int) -> None:
        payloads = [{"n": "x" * random.randint(1, 50)} for _ in range(count)]
        items = [
            {"queue": self.queue, "partition": f"p{i % 3}", "payload": p}
            for i, p in enumerate(payloads)
        ]
        call(f"{self.url}/api/v1/push", "POST", {"items": items})
        self.counts["pushed"] += count
        self.counts["bytes"] += sum(len(json.dumps(p)) for p in payloads)

    def pop(self, group: str = "g", batch: int = 10) -> list[dict[str, Any]]:
        query = f"batch={batch}&partitions=10&wait=true&timeout=5000"
        query += f"&consumerGroup={group}&subscriptionMode=all"
        return call(f"{self.url}/api/v1/pop/queue/{self.queue}?{query}")["messages"]

    def ack(
        self,
        messages: list[dict[str, Any]],
        status: str = "completed",
        error: str | None = None,
        group: str = "g",
    ) -> None:
        acks = [
            {name: message[name] for name in ("transactionId", "partitionId", "leaseId")}
            | {"status": status, "error": error}
            for message in messages
        ]
        sent = time.time()
        call(
            f"{self.url}/api/v1/ack/batch",
            "POST",
            {"acknowledgments": acks, "consumerGroup": group},
        )
        if status == "completed":
            created = [
                datetime.fromisoformat(m["createdAt"]).timestamp() for m in messages
            ]  # cut to milliseconds
            self.took += [(sent - at - 0.001, time.time() - at) for at in created]
        self.counts[status] += len(messages)


def test_percentiles_are_within_the_stated_error_whatever_is_added_up() -> None:
    draw = random.Random(7)
    parts = [[draw.lognormvariate(-3, 2) for _ in range(500)] for _ in range(4)]
    together = Latencies()
    for part in parts:
        counted = Counter(map(bucket_of, part))
        together.add(counted.keys(), counted.values())
    every = sorted(value for part in parts for value in part)
    for percent in (1, 50, 95, 99, 100):
        truth = every[max(0, -(-len(every) * percent // 100) - 1)]
        assert together.percentile(percent) == pytest.approx(max(truth, 1e-4), rel=ERROR + 1e-9)
    assert together.total == 2000
    assert Latencies().percentile(50) is None
    assert (bucket_of(0), bucket_of(-1), bucket_of(1e9)) == (0, 0, LAST)
    assert all(bucket_of(seconds_of(bucket)) == bucket for bucket in range(1, LAST))


async def test_the_database_sorts_into_the_same_buckets(server) -> None:
    draw = random.Random(3)
    latencies = sorted((round(10 ** draw.uniform(-4.3, 7), 6) for _ in range(400)), reverse=True)

    async def ask() -> tuple[list[int], int, list[int]]:
        connection = await asyncpg.connect(
            server.database_url, server_settings={"search_path": SCHEMA.search_path("penstock")}
        )
        seconds = [timedelta(seconds=value) for value in latencies]
        one_by_one = await connection.fetch(
            "SELECT latency_bucket(x) FROM unnest($1::interval[]) x", seconds
        )
        now = datetime.now(UTC)
        created = [now - took for took in seconds]
        first = await connection.fetchval(
            "SELECT latency_bucket($1::timestamptz - $2)", now, created[-1]
        )
        counts = await connection.fetchval("SELECT latency_counts($1, $2)", created, now)
        alone = await connection.fetchval("SELECT latency_counts($1, $2)", [now] * 3, now)
        assert alone is None
        await connection.close()
        return [row[0] for row in one_by_one], first, counts

    buckets, first, counts = await ask()
    assert buckets == [bucket_of(value) for value in latencies]
    spread = {first + place: count for place, count in enumerate(counts) if count}
    assert spread == dict(Counter(buckets))


def test_lag_is_told_for_every_minute_in_which_the_queue_changed() -> None:
    at = [datetime(2026, 1, 31, 12, minute, tzinfo=UTC) for minute in range(6)]

    def changed(group: int, minute: int, level: int, moved: int, **more: Any) -> dict[str, Any]:
        return {"group": group, "minute": at[minute], "level": level, "moved": moved, **more}

    rows = [
        changed(0, 1, 100, 60, pushed=60),
        changed(0, 3, 150, 50, pushed=50),
        {
            "group": 0,
            "minute": at[3],
            "bytes": 700,
            "level": None,
        },  # the stored messages know bytes only
        changed(1, 2, 30, 10, acked=10),
        changed(1, 4, 90, 60, acked=60),
        changed(0, 5, 140, -10),  # retention took ten
    ]
    result = list(
        merge_queue(rows, "q", {1: "busy", 2: "idle"}, lambda group: {0: 140, 1: 90, 2: 7}[group])
    )
    lags = {
        name: [row["lag"] for row in result if row["group_name"] == name]
        for name in ("", "busy", "idle")
    }
    assert lags == {
        "": [None] * 5,
        "busy": [100 - 20, 100 - 30, 150 - 30, 150 - 90, 140 - 90],
        "idle": [100 - 7, 100 - 7, 150 - 7, 150 - 7, 140 - 7],
    }
    (full,) = [row for row in result if row["minute"] == at[3] and row["kind"] == "queue"]
    assert (full["pushed"], full["bytes"], full["acked"]) == (50, 700, None)
    assert sum(row["acked"] or 0 for row in result) == 70


async def test_the_analytics_endpoint_is_bounded_typed_and_adds_minutes_up(server) -> None:
    name = f"a-{uuid.uuid4().hex[:8]}"
    start = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)

    connection = await asyncpg.connect(
        server.database_url, server_settings={"search_path": SCHEMA.search_path("penstock")}
    )
    for minute in range(90):
        at = start + timedelta(minutes=minute)
        sql = (
            "INSERT INTO analytics (minute, kind, name, group_name, pushed, acked, lag, "
            "latency_buckets, "
        )
        sql += "latency_counts) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)"
        await connection.execute(sql, at, "queue", name, "", 10, 0, None, None, None)
        await connection.execute(
            sql, at, "group", name, "g", 0, 3, minute, [bucket_of(0.1), bucket_of(5)], [2, 1]
        )
        await connection.execute(sql, at, "topic", name, "", 7, 0, None, None, None)
    await connection.close()
    window = f"{server.url}/api/v1/analytics?from=2026-01-31T12:00:00Z&to=2026-01-31T14:00:00Z"
    hours = call(f"{window}&queue={name}&interval=hour")["points"]
    assert [(p["time"], p["kind"], p["pushed"], p["acked"], p["lag"]) for p in hours] == [
        ("2026-01-31T12:00:00.000Z", "group", 0, 180, 59),
        ("2026-01-31T12:00:00.000Z", "queue", 600, 0, None),
        ("2026-01-31T13:00:00.000Z", "group", 0, 90, 89),
        ("2026-01-31T13:00:00.000Z", "queue", 300, 0, None),
    ]
    latency = hours[0]["latency"]
    assert latency["count"] == 180
    assert latency["p50"] == pytest.approx(100, rel=ERROR + 0.001)
    assert latency["p99"] == pytest.approx(5000, rel=ERROR + 0.001)
    (topic,) = call(f"{window}&topic={name}&interval=day")["points"]
    assert (topic["topic"], topic["queue"], topic["pushed"]) == (name, None, 630)

    seen: list[str] = []
    page = call(f"{window}&queue={name}&limit=71")
    assert page["truncated"]
    while page["truncated"]:  # whole minutes, none twice
        seen += [p["time"] for p in page["points"]]
        page = call(
            f"{server.url}/api/v1/analytics?from={page['next']}&to=2026-01-31T14:00:00Z&queue={name}&limit=71"
        )
    seen += [p["time"] for p in page["points"]]
    assert Counter(Counter(seen).values()) == {2: 90}
    assert page["next"] is None
    for wrong in (
        "interval=week",
        "limit=0",
        "limit=10001",
        "from=yesterday",
        "from=2026-01-02&to=2026-01-01",
        "topic=a&queue=b",
    ):
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            call(f"{server.url}/api/v1/analytics?{wrong}")
    described = call(f"{server.url}/openapi.json")["paths"]["/api/v1/analytics"]["get"]
    names = {parameter["name"] for parameter in described["parameters"]}
    assert names == {"from", "to", "queue", "topic", "group", "interval", "limit"}


class Outside(HTMLParser):
    """What a page would fetch from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "link" or any(name in ("src", "href") for name, _ in attributes):
            self.tags.append(tag)


def is_report(html: Path, *texts: str) -> None:
    page = html.read_text()
    outside = Outside()
    outside.feed(page)
    assert outside.tags == []
    assert all(text in page for text in texts)
    assert "<svg viewBox" in page
    assert len(page) < 500_000


@dataclass
class Rolled:
    """A queue and a topic whose history is known, and what the command's rollup of them says."""

    ledger: Ledger
    topic: str
    commit_seconds: float  # from the append to the topic to its last commit
    since: datetime
    until: datetime
    server: BrokerProcess
    html: Path
    printed: dict[str, Any]  # by the command

    @property
    def tcp(self) -> str:
        return "{}:{}".format(*self.server.tcp)

    def points(self, query: str) -> list[dict[str, Any]]:
        window = f"from={self.since:%FT%TZ}&to={self.until:%FT%TZ}&interval=day"
        return call(f"{self.server.url}/api/v1/analytics?{window}&{query}")["points"]

    def point_of_queue(self) -> dict[str, Any]:
        (point,) = [p for p in self.points(f"queue={self.ledger.queue}") if p["kind"] == "queue"]
        return point

    def point_of_group(self) -> dict[str, Any]:
        (point,) = self.points(f"queue={self.ledger.queue}&group=g")
        return point


def roll(server: BrokerProcess, directory: Path) -> Rolled:
    ledger = Ledger(server.url, retryLimit=1)
    topic = f"t-{uuid.uuid4().hex[:8]}"
    tcp = "{}:{}".format(*server.tcp)
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch(topic, [b"abc", b"", b"defgh"]))
        appended = time.monotonic()
        for offset in (0, 2):
            link.commit(topic, "indexer", offset)
        took = time.monotonic() - appended
    ledger.push(40)
    ledger.ack(ledger.pop(batch=20))
    ledger.ack(ledger.pop(batch=6), "retry")
    ledger.push(10)
    failed = ledger.pop(batch=4)
    ledger.ack(failed, "failed", "boom")
    waiting = {message["transactionId"] for message in failed}
    # Each comes once more and is given up; everything else that comes with it is done.
    while waiting:
        popped = ledger.pop(batch=5)
        again = [message for message in popped if message["transactionId"] in waiting]
        ledger.ack(again, "failed", "boom")
        ledger.ack([message for message in popped if message not in again])
        waiting -= {message["transactionId"] for message in again}
    since = datetime.now(UTC) - timedelta(minutes=10)
    until = datetime.now(UTC) + timedelta(minutes=1)
    html = directory / "r.html"
    arguments = ["--since", since.isoformat(), "--until", until.isoformat()]
    arguments += ["--broker", tcp, "--url", server.url, "--database", server.database_url]
    arguments += ["--queue", ledger.queue, "--topic", topic]
    arguments += ["--html", str(html), "--master", "local[2]"]
    ran = CliRunner().invoke(app, ["pipeline", "run", "rollup", *arguments])
    assert ran.exit_code == 0, ran.output
    printed = json.loads(ran.stdout.strip().splitlines()[-1])
    return Rolled(ledger, topic, took, since, until, server, html, printed)


@pytest.fixture(scope="module")
def rolled(server: BrokerProcess, spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Rolled:
    return roll(server, tmp_path_factory.mktemp("rollup"))


@pytest.mark.spark
def test_a_rollup_prints_what_it_counted_and_writes_a_report(rolled: Rolled) -> None:
    printed = rolled.printed
    assert (printed["queues"], printed["groups"], printed["topics"]) == (1, 1, 1)
    charts = ("Latency from push to ack", "Dead letters, by group")
    is_report(rolled.html, rolled.ledger.queue, rolled.topic, *charts, "indexer")


@pytest.mark.spark
def test_a_rollup_of_a_queue_agrees_with_the_ledger(rolled: Rolled) -> None:
    ledger = rolled.ledger
    acked = ledger.counts["completed"]
    of_queue, of_group = rolled.point_of_queue(), rolled.point_of_group()
    assert (of_queue["pushed"], of_queue["bytes"]) == (50, ledger.counts["bytes"])
    assert (of_group["queue"], of_group["group"], of_group["topic"]) == (ledger.queue, "g", None)
    expected = {"acked": acked, "failed": 8, "retried": 6 + 4, "deadLetters": 4, "dropped": 0}
    expected["lag"] = 50 - acked - 4
    assert {name: of_group[name] for name in expected} == expected
    assert of_group["latency"]["count"] == acked == len(ledger.took)
    least, most = (sorted(took[side] for took in ledger.took) for side in (0, 1))
    for percent in (50, 95, 99):
        nth = -(-acked * percent // 100) - 1
        output = of_group["latency"][f"p{percent}"] / 1000
        assert least[nth] * (1 - ERROR) <= output <= most[nth] * (1 + ERROR)


@pytest.mark.spark
def test_a_rollup_of_a_topic_has_its_records_and_its_groups(rolled: Rolled) -> None:
    of_topic, of_indexer = rolled.points(f"topic={rolled.topic}")
    counts = [of_topic[name] for name in ("kind", "pushed", "bytes", "latency", "lag")]
    assert counts == ["topic", 3, 8, None, None]
    assert [of_indexer] == rolled.points(f"topic={rolled.topic}&group=indexer")
    names = [of_indexer[name] for name in ("kind", "topic", "queue", "group")]
    assert names == ["group", rolled.topic, None, "indexer"]
    counts = [of_indexer[name] for name in ("acked", "retried", "lag", "pushed")]
    assert counts == [2, 0, 1, 0]
    assert of_indexer["latency"]["count"] == 2
    longest = (rolled.commit_seconds + 0.1) * (1 + ERROR)
    assert 0 < of_indexer["latency"]["p99"] / 1000 <= longest


@pytest.mark.spark
def test_a_second_rollup_changes_nothing_and_keeps_what_was_cleared(
    server: BrokerProcess, spark: Any, tmp_path: Path
) -> None:
    rolled = roll(server, tmp_path)
    ledger = rolled.ledger
    of_queue, of_group = rolled.point_of_queue(), rolled.point_of_group()
    options = RollupOptions(
        database=server.database_url,
        broker=rolled.tcp,
        url=server.url,
        since=rolled.since,
        until=rolled.until,
        queues=[ledger.queue],
        topics=[rolled.topic],
    )
    assert rollup(spark, options).rows == rolled.printed["rows"]
    assert (rolled.point_of_queue(), rolled.point_of_group()) == (of_queue, of_group)
    # Its bytes can be read no more.
    call(f"{server.url}/api/v1/queues/{ledger.queue}/clear", "DELETE")
    later = replace(rolled, until=datetime.now(UTC) + timedelta(minutes=1))
    rollup(
        spark,
        RollupOptions(
            queues=[ledger.queue],
            database=server.database_url,
            since=later.since,
            until=later.until,
        ),
    )
    kept = later.point_of_queue()
    assert (kept["pushed"], kept["bytes"]) == (50, ledger.counts["bytes"])
    kept = later.point_of_group()
    expected = (ledger.counts["completed"], of_group["latency"], 0)
    assert (kept["acked"], kept["latency"], kept["lag"]) == expected


@pytest.mark.spark
def test_a_rollup_finds_every_queue_and_topic_and_refuses_unknown_ones(
    rolled: Rolled, spark: Any
) -> None:
    database, tcp = rolled.server.database_url, rolled.tcp
    postgres = Postgres(ReachOptions(database=database))
    named = _catalog(postgres, [rolled.ledger.queue])
    assert _catalog(postgres, []).queues.items() >= named.queues.items()
    assert rolled.topic in _topic_names(tcp, None, [])
    with pytest.raises(NotFound, match="topic 'nobody' does not exist"):
        rollup(spark, RollupOptions(topics=["nobody"], broker=tcp, database=database))
    with pytest.raises(NotFound, match="queue 'nobody' does not exist"):
        rollup(spark, RollupOptions(queues=["nobody"], database=database))
    with pytest.raises(InvalidRequest, match="since is a time such as"):
        rollup(spark, RollupOptions(since="last week", database=database))


def test_a_report_shows_names_as_they_are_and_runs_nothing_in_them(tmp_path) -> None:
    start = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
    nasty = "</script><img src=x onerror=alert(1)> & <n> $\\frac{$"
    counts = dict.fromkeys(("pushed", "bytes", "acked", "failed", "retried", "dead", "dropped"), 5)
    many = [f"q{i}" for i in range(12)]  # more than a panel shows
    latency = Latencies([bucket_of(0.2)], [5])
    points = [Point(start, "queue", name, "", counts, None, Latencies()) for name in (nasty, *many)]
    points += [Point(start, "group", name, nasty, counts, 3, latency) for name in (nasty, *many)]
    made = build(points, start, start + timedelta(minutes=3))
    pushed = made.panels[0]
    assert [series.label for series in pushed.series] == [
        nasty,
        "q0",
        "q1",
        "q10",
        "q11",
        "q2",
        "q3",
        "q4",
        "all others",
    ]
    assert pushed.series[-1].values == pytest.approx([5 * 5 / 60, 0, 0])
    assert dict(made.tiles)["messages pushed"] == "65"
    assert made.tables[0].rows[0][2:] == ["5", "5 B", "5", "5", "5", *["196 ms"] * 3, "3"]
    html = tmp_path / "r.html"
    write(made, html)
    is_report(html, "all others")
    empty = build([], start, start + timedelta(days=30))
    write(empty, html)
    assert empty.step == "per 6 hours"
    assert "nothing in this time" in html.read_text()
    assert "no dead letters" in html.read_text()
    with pytest.raises(Unavailable, match="is not a directory"):
        check_target(tmp_path / "nowhere" / "r.html")


def test_charts_fill_their_window_and_coinciding_lines_stay_visible() -> None:
    noon = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
    day = (noon - timedelta(hours=12), noon + timedelta(hours=12))
    half_an_hour = [noon + timedelta(minutes=i) for i in range(30)]
    since, until = fit(*day, half_an_hour)
    assert since <= noon
    assert until > half_an_hour[-1]
    assert until - since < timedelta(minutes=40)
    assert fit(*day, []) == day
    assert fit(*day, [day[0], noon, day[1]]) == day

    times = half_an_hour[:12]
    same: list[float | None] = [float(i) for i in range(12)]
    hole = [None if i in (4, 6) else 5.0 for i in range(12)]
    panels = [
        Panel(
            "a", "n", [ChartSeries("x", same), ChartSeries("y", list(same)), ChartSeries("z", hole)]
        ),
        Panel(
            "b",
            "n",
            [ChartSeries("y", same), ChartSeries("x", hole), ChartSeries("w", [1.0] * 12)],
            "bar",
        ),
    ]
    chosen = colors(panels)
    assert len({chosen[label] for label in "xyzw"}) == 4
    page = to_html(HtmlReport("r", times[0], times[-1], times, panels))
    first, second = page.split("<svg ")[1:]
    dashed = re.findall(r'<g stroke="(#\w+)"[^/]*?stroke-dasharray="10 10"', first)
    assert dashed == [chosen["y"]]  # with x between the dashes
    assert first.count("<circle") == 1  # a value between two gaps
    assert chosen["x"] in second
    many = [ChartSeries(f"q{i}", [i + 0.123456 for _ in range(180)]) for i in range(9)]
    steps = [noon + timedelta(minutes=i) for i in range(180)]
    large = HtmlReport("r", noon, steps[-1], steps, [Panel("p", "n", many)] * 10)
    assert len(to_html(large)) < 500_000


def test_bytes_are_the_same_however_the_stored_messages_are_shared_out(server, monkeypatch) -> None:
    ledger = Ledger(server.url)
    ledger.push(60)
    postgres = Postgres(ReachOptions(database=server.database_url))
    known = _catalog(postgres, [ledger.queue])
    end = datetime.now(UTC) + timedelta(minutes=1)
    since = end - timedelta(minutes=10)

    def total(tasks: int) -> tuple[int, int]:
        queries = bytes_queries(postgres, known, levels_now(postgres, known), since, end, tasks)
        return len(queries), sum(row[2] for query in queries for row in postgres.rows(query))

    assert total(4) == (1, ledger.counts["bytes"])  # with other small queues
    monkeypatch.setattr(minutes, "SMALL_QUEUE_MESSAGES", 10)
    assert total(3) == (3, ledger.counts["bytes"])  # by its three partitions
    assert total(5) == (5, ledger.counts["bytes"])  # by time
    late = bytes_queries(
        postgres, known, levels_now(postgres, known), since, since + timedelta(minutes=1), 3
    )
    assert [row for query in late for row in postgres.rows(query)] == []


def test_a_run_goes_on_where_the_last_one_of_its_kind_ended(server) -> None:
    postgres = Postgres(ReachOptions(database=server.database_url))
    tag = uuid.uuid4().hex[:8]
    ((now,),) = postgres.rows("SELECT date_trunc('minute', clock_timestamp())")

    def since(*scopes: str) -> timedelta:
        return now - _window(postgres, list(scopes), None, None)[0]

    def ran(scope: str, begin: timedelta, end: timedelta) -> None:
        postgres.rows(REACHED, (scope, (now - begin).isoformat(), (now - end).isoformat()))

    hour, minute = timedelta(hours=1), timedelta(minutes=1)
    a, b = f"x{tag}:a", f"x{tag}:b"
    assert since(a) >= timedelta(hours=23)
    ran(a, 24 * hour, 2 * hour)
    assert 2 * hour <= since(a) <= 2 * hour + 6 * minute
    assert since(a, b) >= timedelta(hours=23)  # as far back as the one that lags
    ran(a, hour, minute)  # leaves out an hour, so it does not count
    assert 2 * hour <= since(a) <= 2 * hour + 6 * minute
    ran(a, 2 * hour, minute)
    assert since(a) <= 7 * minute
    end = _window(postgres, [a], None, now + timedelta(days=3))[1]
    assert end <= now + timedelta(minutes=3)  # the future is not rolled up


@pytest.mark.spark
def test_dead_letters_are_grouped_by_error_and_queue_with_samples(server, spark, tmp_path) -> None:
    one, other = Ledger(server.url, retryLimit=0), Ledger(server.url, retryLimit=0)
    errors = [
        "timeout after 30 s calling 10.0.0.7:8080",
        "timeout after 5 s calling 10.0.0.12:80",
        f"order {uuid.uuid4()} at 2026-01-31T12:00:00Z: it's 'sold out'",
        f"order {uuid.uuid4()} at 2026-02-01T08:30:11.5Z: it's 'sold out'",
        "Traceback (most recent call last):\n  File x, line 3\nKeyError: 'price'",
    ]
    for ledger, count in ((one, 5), (other, 2)):
        ledger.push(count)
        taken = ledger.pop(batch=count)
        for message, error in zip(taken, errors, strict=False):
            ledger.ack([message], "failed", error)
    html = tmp_path / "d.html"
    arguments = [
        "--database",
        server.database_url,
        "--html",
        str(html),
        "--json",
    ]
    arguments += [
        "--queue",
        one.queue,
        "--queue",
        other.queue,
        "--samples",
        "2",
        "--master",
        "local[2]",
    ]
    ran = CliRunner().invoke(app, ["pipeline", "run", "dlq-report", *arguments])
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout.strip().splitlines()[-1])
    assert result["total"] == 7
    assert {(kind["error"], kind["queue"], kind["count"]) for kind in result["kinds"]} == {
        ("timeout after <n> s calling <address>", one.queue, 2),
        ("timeout after <n> s calling <address>", other.queue, 2),
        ("order <id> at <time>: it's 'sold out'", one.queue, 2),
        ("KeyError: 'price'", one.queue, 1),
    }
    listed = call(f"{server.url}/api/v1/dlq?queue={one.queue}&limit=10")["messages"]
    by_id = {letter["dlqId"]: letter for letter in listed}
    for kind in result["kinds"]:
        assert len(kind["samples"]) == kind["count"]
        assert (kind["groups"], kind["attempts"]) == (["g"], 1)
        if kind["queue"] == one.queue:
            letters = [by_id[sample["id"]] for sample in kind["samples"]]
            assert [json.loads(sample["payload"]) for sample in kind["samples"]] == [
                one_["data"] for one_ in letters
            ]
            times = sorted(datetime.fromisoformat(letter["failedAt"]) for letter in letters)
            assert datetime.fromisoformat(kind["first"]) - times[0] < timedelta(milliseconds=1)
            assert datetime.fromisoformat(kind["last"]) - times[-1] < timedelta(milliseconds=1)
    is_report(html, one.queue, other.queue, "timeout after &lt;n&gt; s", "By error")
    quiet = Ledger(server.url)
    nothing = dlq_report(
        spark, ReportOptions(database=server.database_url, queues=[quiet.queue], html=html)
    )
    assert (nothing.total, nothing.kinds) == (0, [])
    assert "no dead letters" in html.read_text()
