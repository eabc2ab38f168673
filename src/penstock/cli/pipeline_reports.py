"""`penstock pipeline run rollup` and `run dlq-report`: figures and reports made by Spark."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import LOCAL_URL, Token, Url
from penstock.cli.pipeline import (
    LOCAL,
    LOCAL_BROKER,
    Broker,
    Database,
    Master,
    reporting,
    run_commands,
    say,
    session,
)
from penstock.cli.tables import Column, Table, View, count, print_json, when

Since = Annotated[
    str | None,
    typer.Option(
        help="Start of the period: a time (2026-01-31T12:00Z), or how long ago (90m, 24h, 7d)."
    ),
]
Until = Annotated[
    str | None, typer.Option(help="End of the period, in the same form; default: now.")
]
Queues = Annotated[
    list[str] | None, typer.Option("--queue", help="Only this queue; may be repeated.")
]
Html = Annotated[Path | None, typer.Option(help="Write the report to this HTML file.")]


@run_commands.command()
def rollup(
    since: Since = None,
    until: Until = None,
    queue: Queues = None,
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", help="Only this topic; may be repeated."),
    ] = None,
    html: Html = None,
    keep_days: Annotated[
        int | None, typer.Option(min=1, help="Delete statistics older than this many days.")
    ] = None,
    broker: Broker = LOCAL_BROKER,
    url: Url = LOCAL_URL,
    database: Database = None,
    token: Token = "",
    master: Master = LOCAL,
) -> None:
    """Compute statistics per minute: counts, bytes, latencies, lag, retries and dead letters.

    It resumes where the last run ended, and running it again changes nothing. The broker serves the
    result at /api/v1/analytics. With a report of the last day:

    `penstock pipeline run rollup --since 24h --html day.html`
    """
    with reporting():
        from penstock.pipeline.jobs.html_report import check_target
        from penstock.pipeline.jobs.rollup import RollupOptions
        from penstock.pipeline.jobs.rollup import rollup as job
        from penstock.pipeline.jobs.rollup_report import write_report

        check_target(html)
        queues, topics = queue or [], topic or []
        options = RollupOptions(
            database=database,
            broker=broker if topics or not queues else None,
            url=url,
            token=token,
            queues=queues,
            topics=topics,
            since=since,
            until=until,
            keep_days=keep_days,
        )
        done = job(session("rollup", master), options, say)
        if html:
            window = (done.since, max(done.until, done.since))
            write_report(*window, database=database, queues=queues, topics=topics, html=html)
    print_json(done)


@run_commands.command("dlq-report")
def dlq_report(
    since: Since = None,
    until: Until = None,
    queue: Queues = None,
    samples: Annotated[
        int, typer.Option(min=0, max=100, help="Dead letters to show per kind of error.")
    ] = 3,
    html: Html = None,
    database: Database = None,
    master: Master = LOCAL,
) -> View:
    """Report dead letters by error and queue, with samples.

    Errors that differ only in ids, numbers and times count as one kind. Example:

    `penstock pipeline run dlq-report --since 7d --html dead.html`
    """
    with reporting():
        from penstock.pipeline.jobs.dlq_report import ReportOptions
        from penstock.pipeline.jobs.dlq_report import dlq_report as job

        options = ReportOptions(
            database=database,
            queues=queue or [],
            since=since,
            until=until,
            samples=samples,
            html=html,
        )
        figures = job(session("dlq-report", master), options, say)
    made = {key: value for key, value in dataclasses.asdict(figures).items() if key != "times"}
    columns = (
        Column("count", format=count),
        Column("queue"),
        Column("error", prose=True),
        Column("groups", lambda kind: ", ".join(kind.groups), prose=True),
        Column("attempts", format=count),
        Column("first", lambda kind: kind.first.isoformat(), when),
        Column("last", lambda kind: kind.last.isoformat(), when),
        Column("sample", _sample, prose=True, optional=True),
    )
    return View(made, [Table(columns, figures.kinds, "no dead letters")])


def _sample(kind: Any) -> str | None:
    return next((one.payload for one in kind.samples if one.payload), None)
