"""`penstock pipeline run archive` and its like: the jobs that come with Penstock."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import LOCAL_URL, Token, Url, argument, option
from penstock.cli.pipeline import ShowReports, Spark, reporting, run_commands, say, stop_by_signal
from penstock.cli.tables import Column, Table, View, count, print_json, when

LOCAL_BROKER = "127.0.0.1:12345"
Broker = Annotated[str, option("The broker's TCP address.", "-b", envvar="PENSTOCK_BROKER")]
Database = Annotated[
    str | None,
    option(
        "PostgreSQL URL of the queues; default: that of the broker on this machine.",
        envvar="DATABASE_URL",
    ),
]
Since = Annotated[
    str | None,
    option("Start of the period: a time (2026-01-31T12:00Z), or how long ago (90m, 24h, 7d)."),
]
Until = Annotated[str | None, option("End of the period, in the same form; default: now.")]
Queues = Annotated[list[str] | None, option("Only this queue; may be repeated.")]
Html = Annotated[Path | None, option("Write the report to this HTML file.")]


@run_commands.command()
def archive(
    spark: Spark,
    target: Annotated[
        str,
        argument(
            "Location of the archives: a directory, or an s3://, gs:// or az:// address.",
            envvar="PENSTOCK_ARCHIVE",
        ),
    ],
    topic: Annotated[str | None, option("The topic to archive.")] = None,
    queue: Annotated[str | None, option("The queue to archive.")] = None,
    file_mib: Annotated[int, option("Approximate size of the files in MiB.", min=1)] = 128,
    keep_days: Annotated[
        int | None,
        option(
            "Delete archived days that are older than this many days. Default: keep all.", min=1
        ),
    ] = None,
    vacuum_hours: Annotated[
        int, option("Old versions of the table can be read for this many hours.", min=1)
    ] = 48,
    schema: Annotated[
        str | None,
        option(
            "Fields of JSON payloads to store as columns: 'id BIGINT, amount DOUBLE', or "
            "'infer' to detect them from the records. Default: the columns of the table."
        ),
    ] = None,
    dead_letter: Annotated[
        str | None, option("Topic for copies of records that do not match the columns.")
    ] = None,
    with_outcomes: Annotated[
        float | None,
        option(
            "With --queue: archive messages older than this many minutes, with their outcome "
            "in each consumer group.",
            metavar="MINUTES",
            min=0,
        ),
    ] = None,
    watch: Annotated[
        float | None, option("Keep running, at most about so many seconds behind.", min=1)
    ] = None,
    convert: Annotated[
        bool, option("First convert an archive of an earlier release to a table.")
    ] = False,
    broker: Broker = LOCAL_BROKER,
    url: Url = LOCAL_URL,
    database: Database = None,
    token: Token = "",
) -> None:
    """Archive everything added since the last run to a Delta table, each record once.

    Example: `penstock pipeline run archive s3://lake --topic orders`
    """
    with reporting():
        from penstock.pipeline.jobs.archive import Archiver, Origin, Payloads
        from penstock.pipeline.jobs.archive import archive as job
        from penstock.pipeline.jobs.archive_watch import ArchiveWatch
        from penstock.pipeline.lake.maintenance import Upkeep
        from penstock.pipeline.report import Heartbeat

        origin = Origin(
            topic=topic,
            queue=queue,
            broker=broker if topic or dead_letter else None,
            database=database,
            url=url,
            token=token,
        )
        upkeep = Upkeep(file_mib << 20, keep_days, vacuum_hours)
        payloads = Payloads(schema, dead_letter, with_outcomes)
        session = spark.session("archive")
        if watch is None:
            print_json(job(session, target, origin, upkeep, payloads, convert_old=convert, say=say))
            return
        archiver = Archiver(target, origin, upkeep, payloads)
        if convert:
            archiver.convert()
        heartbeat = Heartbeat(url, f"archive-{origin.name}", token)
        watching = ArchiveWatch(archiver, watch, [ShowReports(), heartbeat])
        stop_by_signal(watching.stop, "run")
        watching.run(session)


@dataclass(frozen=True, slots=True)
class Replay:
    topic: Annotated[str, argument("Topic to replay.")]
    id: Annotated[
        str, option("Name of this replay; another run with the same id adds no duplicates.")
    ]
    to_topic: Annotated[str | None, option("Write to this topic.")] = None
    to_queue: Annotated[str | None, option("Write to this queue.")] = None
    archive: Annotated[
        str | None, option("Read from this archive instead of the topic.", "--from-archive")
    ] = None
    where: Annotated[
        str | None, option("SQL condition over topic, offset, timestamp, payload.")
    ] = None
    start: Annotated[int | None, option("First offset to replay.")] = None
    end: Annotated[int | None, option("Offset to stop before.")] = None
    rate: Annotated[float, option("Most records per second; 0 = no limit.")] = 0.0
    execute: Annotated[
        bool, option("Write the records. Without it, only the counts are printed.")
    ] = False
    broker: Broker = LOCAL_BROKER
    url: Url = LOCAL_URL
    token: Token = ""


@run_commands.command()
def replay(given: Replay, spark: Spark) -> None:
    """Copy records of a topic or its archive to a topic or a queue. This is a dry run unless you
    use --execute.

    Example: `penstock pipeline run replay orders --id fix-17 --to-queue orders --start 1000`
    """
    with reporting():
        from penstock.pipeline.jobs.replay import ReplayOptions
        from penstock.pipeline.jobs.replay import replay as job

        done = job(spark.session("replay"), ReplayOptions(**asdict(given)), say)
    print_json(done)


@dataclass(frozen=True, slots=True)
class Compact:
    topic: Annotated[str, option("The topic to compact.")]
    key: Annotated[str | None, option("Key as a JSON path in the payload: '$.id'.")] = None
    key_sql: Annotated[
        str | None, option("Key as an SQL expression over topic, offset, timestamp, payload.")
    ] = None
    to_topic: Annotated[str | None, option("Append the latest records to this topic.")] = None
    to: Annotated[str | None, option("Write a Parquet snapshot to this directory.")] = None
    in_place: Annotated[bool, option("Replace the sealed segments of the topic itself.")] = False
    tombstone: Annotated[
        str | None, option("JSON path that is true in tombstones (records that delete a key).")
    ] = None
    tombstone_sql: Annotated[
        str | None, option("SQL condition that is true in tombstones. Default: an empty payload.")
    ] = None
    tombstone_hours: Annotated[
        float, option("With --in-place: hours to keep tombstones.", min=0)
    ] = 24.0
    roll: Annotated[bool, option("With --in-place: seal the active segment first.")] = False
    segment_mib: Annotated[int, option("Merge segments up to this size in MiB.", min=1)] = 256
    dry_run: Annotated[bool, option("Only count; change nothing.")] = False
    broker: Broker = LOCAL_BROKER
    url: Url = LOCAL_URL
    token: Token = ""


@run_commands.command()
def compact(given: Compact, spark: Spark) -> None:
    """Keep only the latest record per key of a topic. Records without a key, or that are not JSON,
    are kept and counted.

    Examples:

    `penstock pipeline run compact --topic prices --key '$.id' --to-topic prices-latest`

    `penstock topic policy prices compact && penstock pipeline run compact --topic prices --key
    '$.id' --in-place`
    """
    with reporting():
        from penstock.pipeline.jobs.compact import CompactOptions
        from penstock.pipeline.jobs.compact import compact as job

        values = asdict(given)
        seconds, size = 3600 * values.pop("tombstone_hours"), values.pop("segment_mib") << 20
        options = CompactOptions(**values, tombstone_seconds=seconds, segment_bytes=size)
        done = job(spark.session("compact"), options, say)
    print_json({**asdict(done), "bytes_saved": done.bytes_saved})


@run_commands.command()
def recover(
    spark: Spark,
    directories: Annotated[list[str], argument("Buffer directories of one or more brokers.")],
    tasks: Annotated[int, option("Number of parallel tasks.", min=1)] = 8,
    dry_run: Annotated[bool, option("Only count; push nothing.")] = False,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Push the events of buffer files, each once and in order per partition. The files are kept.

    Example: `penstock pipeline run recover /backup/broker-1/buffers /backup/broker-2/buffers`
    """
    with reporting():
        from penstock.pipeline.jobs.recover import recover as job

        done = job(
            spark.session("recover"), directories, url, tasks=tasks, dry_run=dry_run, token=token
        )
    print_json(done)
    if done.rejected or done.unreadable:
        raise typer.Exit(1)


@run_commands.command()
def rollup(
    spark: Spark,
    since: Since = None,
    until: Until = None,
    queue: Queues = None,
    topic: Annotated[list[str] | None, option("Only this topic; may be repeated.")] = None,
    html: Html = None,
    keep_days: Annotated[
        int | None, option("Delete statistics older than this many days.", min=1)
    ] = None,
    broker: Broker = LOCAL_BROKER,
    url: Url = LOCAL_URL,
    database: Database = None,
    token: Token = "",
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
        done = job(spark.session("rollup"), options, say)
        if html:
            window = (done.since, max(done.until, done.since))
            write_report(*window, database=database, queues=queues, topics=topics, html=html)
    print_json(done)


@run_commands.command("dlq-report")
def dlq_report(
    spark: Spark,
    since: Since = None,
    until: Until = None,
    queue: Queues = None,
    samples: Annotated[int, option("Dead letters to show per kind of error.", min=0, max=100)] = 3,
    html: Html = None,
    database: Database = None,
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
        figures = job(spark.session("dlq-report"), options, say)
    made = {key: value for key, value in asdict(figures).items() if key != "times"}
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
