"""Report throughput, latency, lag, retries and dead letters by queue and topic, per interval."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.pipeline.jobs import html_report
from penstock.pipeline.jobs.html_report import HtmlReport, ReportTable, duration, size, top
from penstock.pipeline.jobs.postgres_frames import database_at
from penstock.pipeline.jobs.svg_chart import ChartSeries, Panel, number
from penstock.pipeline.sources.postgres import Postgres
from penstock.protocol.analytics import Point, point_of
from penstock.protocol.latency import ERROR, Latencies
from penstock.protocol.names import QUEUE_MODE

MAX_POINTS = 1_000_000
SQL = (
    "SELECT * FROM analytics_points('{since}', '{until}', {step}, '{{queue,group,topic}}', "
    "NULL, NULL, {most})"
)
PERCENTILES = (50, 95, 99)


def write_report(
    since: datetime,
    until: datetime,
    *,
    database: str | None = None,
    queues: Sequence[str] = (),
    topics: Sequence[str] = (),
    html: str | Path,
) -> HtmlReport:
    """Write an HTML report about the time from `since` to `until`."""
    postgres = database_at(database)
    points = load(postgres, since, until)
    shown = html_report.fit(since, until, (point.at for point in points))
    if shown != (since, until):  # a shorter time has finer steps
        points = load(postgres, *shown)
    made = build(points, *shown, queues, topics)
    made.window = (since, until)
    html_report.write(made, html)
    return made


def load(postgres: Postgres, since: datetime, until: datetime) -> list[Point]:
    """Read the points of this time, in the steps of the report."""
    step, _ = html_report.bins(since, until)
    rows = postgres.rows(
        SQL.format(since=since.isoformat(), until=until.isoformat(), step=step, most=MAX_POINTS)
    )
    return [point_of(row) for row in rows]


def build(
    points: list[Point],
    since: datetime,
    until: datetime,
    queues: Sequence[str] = (),
    topics: Sequence[str] = (),
) -> HtmlReport:
    """Build the report about the named queues and topics, or about all."""
    step, called = html_report.bins(since, until)
    times = html_report.times_of(since, until, step)
    place = {at: index for index, at in enumerate(times)}
    of: dict[str, list[Point]] = {"queue": [], "group": [], "topic": []}
    for point in points:
        wanted = (topics if point.kind == "topic" else queues) if queues or topics else [point.name]
        if point.at in place and point.name in wanted:
            of["group" if point.group else point.kind].append(point)

    ranks = {kind: _ranks(of[kind], "acked" if kind == "group" else "pushed") for kind in of}

    def lines(
        kind: str, value: Callable[[Point], float | None], missing: float | None = None
    ) -> dict[str, list[float | None]]:
        """Return the values by label, one for each time."""
        series: dict[str, list[float | None]] = defaultdict(lambda: [missing] * len(times))
        for point in of[kind]:
            series[point.label][place[point.at]] = value(point)
        return {label: values for label, values in series.items() if any(values)}

    def rates(kind: str, column: str, per: float) -> list[ChartSeries]:
        return top(lines(kind, lambda point: point.counts[column] / per, 0.0), ranks[kind])

    overall: list[Latencies] = [Latencies() for _ in times]
    whole = Latencies()
    for point in of["group"]:
        overall[place[point.at]].merge(point.latency)
        whole.merge(point.latency)
    percentiles = [
        ChartSeries(f"p{p}", [_ms(one.percentile(p)) for one in overall]) for p in PERCENTILES
    ]
    slowest = lines("group", lambda point: _ms(point.latency.percentile(99)))
    busiest = ranks["group"][: html_report.MAX_SERIES]
    p99 = [ChartSeries(label, slowest[label]) for label in busiest if label in slowest]
    lagging = lines("group", lambda point: point.lag)
    for values in lagging.values():
        for index in range(1, len(times)):  # only changes are stored
            if values[index] is None:
                values[index] = values[index - 1]
    lags = top(lagging, ranks["group"])
    retried, dead = rates("group", "retried", 1), rates("group", "dead", 1)
    appended, kib_appended = rates("topic", "pushed", step), rates("topic", "bytes", step * 1024)
    unacked, idle = "nothing was acknowledged in this time", "nothing was appended to a topic"
    panels = [
        Panel("Pushed, by queue", "messages/s", rates("queue", "pushed", step)),
        Panel("Acknowledged, by group", "messages/s", rates("group", "acked", step)),
        Panel("Latency from push to ack, all groups", "ms", percentiles, empty=unacked, log=True),
        Panel("Latency p99, by group", "ms", p99, empty=unacked, log=True),
        Panel("Lag, by group", "messages", lags, empty="no group was behind"),
        Panel("Retries, by group", f"deliveries {called}", retried, "bar", "nothing was retried"),
        Panel("Dead letters, by group", f"messages {called}", dead, "bar", "no dead letters"),
        Panel("Topics: appended", "records/s", appended, empty=idle),
        Panel("Bytes pushed, by queue", "KiB/s", rates("queue", "bytes", step * 1024)),
        Panel("Bytes appended, by topic", "KiB/s", kib_appended, empty=idle),
    ]

    def total(kind: str, column: str) -> int:
        return sum(point.counts[column] for point in of[kind])

    tiles = [
        ("messages pushed", number(total("queue", "pushed"))),
        ("pushed", size(total("queue", "bytes"))),
        ("acknowledged", number(total("group", "acked"))),
        ("latency p50", duration(whole.percentile(50))),
        ("latency p99", duration(whole.percentile(99))),
        ("retries", number(total("group", "retried"))),
        ("dead letters", number(total("group", "dead"))),
        ("topic records", number(total("topic", "pushed"))),
    ]
    notes = [
        f"Latencies are from push to ack, with an error of at most {ERROR:.1%}.",
        "Lag is measured at the end of each interval, to within 5 s.",
        "A retry is a delivery without an ack: failed, asked for again, or not answered in time.",
    ]
    title = "Penstock: queues and topics"
    return HtmlReport(title, since, until, times, panels, tiles, _tables(of), notes, step=called)


def _ranks(points: list[Point], column: str) -> list[str]:
    """Return the labels, busiest first."""
    totals: dict[str, int] = defaultdict(int)
    for point in points:
        totals[point.label] += point.counts[column]
    return sorted(totals, key=lambda label: (-totals[label], label))


COLUMNS = ["group", "pushed", "bytes", "acked", "retries", "dead letters"]
COLUMNS += ["p50", "p95", "p99", "lag at the end"]


def _tables(of: dict[str, list[Point]]) -> list[ReportTable]:
    queues, topics = (
        _rows(of[kind], [point for point in of["group"] if point.kind == of_group])
        for kind, of_group in (("queue", "group"), ("topic", "topic"))
    )
    topic_columns = ["topic", *COLUMNS]
    dead = topic_columns.index("dead letters")  # topics have no dead letters
    for row in [topic_columns, *topics]:
        del row[dead]
    return [
        ReportTable("Queues and groups", ["queue", *COLUMNS], queues, text=2),
        ReportTable("Topics and groups", topic_columns, topics, text=2),
    ]


def _rows(own: list[Point], groups: list[Point]) -> list[list[str]]:
    """Return a row per group of each queue or topic, busiest first; at least one each."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for point in own:
        totals[point.name][0] += point.counts["pushed"]
        totals[point.name][1] += point.counts["bytes"]
    by_name: dict[str, dict[str, list[Point]]] = {name: {} for name in totals}
    for point in groups:
        by_name.setdefault(point.name, {}).setdefault(point.group, []).append(point)
    rows = []
    for name in sorted(by_name, key=lambda name: (-totals[name][0], name)):
        by_group = by_name[name] or {"": []}
        cells = [number(totals[name][0]), size(totals[name][1])]
        for group in sorted(by_group):
            shown = "–" if group in ("", QUEUE_MODE) else group
            rows.append([name, shown, *cells, *_group_cells(by_group[group])])
    return rows


def _group_cells(points: list[Point]) -> list[str]:
    latency = Latencies()
    for point in points:
        latency.merge(point.latency)
    lags = [point.lag for point in points if point.lag is not None]
    sums = [
        number(sum(point.counts[column] for point in points))
        for column in ("acked", "retried", "dead")
    ]
    return [
        *sums,
        *(duration(latency.percentile(p)) for p in PERCENTILES),
        number(lags[-1]) if lags else "–",
    ]


def _ms(seconds: float | None) -> Any:
    return None if seconds is None else seconds * 1000
