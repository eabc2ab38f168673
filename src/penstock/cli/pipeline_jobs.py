"""`penstock pipeline run archive` and its like: the jobs that come with Penstock."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.cli import LOCAL_URL, JsonOutput, NotNegative, Positive, Token, Url, say, usage
from penstock.cli.pipeline import ShowReports, Spark, reporting, run_commands, stop_by_signal
from penstock.cli.tables import Column, TableBlock, View, count, print_json, when

LOCAL_BROKER = "127.0.0.1:12345"
Broker = Annotated[
    str, Parameter(alias="-b", env_var="PENSTOCK_BROKER", help="The broker's TCP address.")
]
Database = Annotated[
    str | None,
    Parameter(
        env_var="DATABASE_URL",
        help="PostgreSQL URL of the queues; default: that of the broker on this machine.",
    ),
]
Since = Annotated[
    str | None,
    Parameter(
        help="Start of the period: a time (2026-01-31T12:00Z), or how long ago (90m, 24h, 7d)."
    ),
]
Until = Annotated[str | None, Parameter(help="End of the period, in the same form; default: now.")]
Queues = Annotated[list[str] | None, Parameter(help="Only this queue; may be repeated.")]
Html = Annotated[Path | None, Parameter(help="Write the report to this HTML file.")]
PositiveInt = Annotated[int, Parameter(validator=Positive)]
Days = Annotated[int | None, Parameter(validator=Positive)]


@run_commands.command
def archive(
    target: Annotated[str, Parameter(env_var="PENSTOCK_ARCHIVE")],
    /,
    *,
    topic: str | None = None,
    queue: str | None = None,
    file_mib: PositiveInt = 128,
    keep_days: Days = None,
    vacuum_hours: PositiveInt = 48,
    schema: str | None = None,
    dead_letter: str | None = None,
    with_outcomes: Annotated[float | None, Parameter(validator=NotNegative)] = None,
    watch: Annotated[float | None, Parameter(validator=Positive)] = None,
    convert: bool = False,
    broker: Broker = LOCAL_BROKER,
    url: Url = LOCAL_URL,
    database: Database = None,
    token: Token = "",
    spark: Spark = Spark(),
) -> None:
    """Archive everything added since the last run to a Delta table, each record once.

    Example: `penstock pipeline run archive s3://lake --topic orders`

    :param target: Location of the archives: a directory, or an s3://, gs:// or az:// address.
    :param topic: The topic to archive.
    :param queue: The queue to archive.
    :param file_mib: Approximate size of the files in MiB.
    :param keep_days: Delete archived days that are older than this many days. Default: keep all.
    :param vacuum_hours: Old versions of the table can be read for this many hours.
    :param schema: Fields of JSON payloads to store as columns: 'id BIGINT, amount DOUBLE', or
        'infer' to detect them from the records. Default: the columns of the table.
    :param dead_letter: Topic for copies of records that do not match the columns.
    :param with_outcomes: With --queue: archive messages older than this many minutes, with their
        outcome in each consumer group.
    :param watch: Keep running, at most about so many seconds behind.
    :param convert: First convert an archive of an earlier release to a table.
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


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReplayArguments:
    """The options of `replay`.

    :param id: Name of this replay; another run with the same id adds no duplicates.
    :param to_topic: Write to this topic.
    :param to_queue: Write to this queue.
    :param archive: Read from this archive instead of the topic.
    :param where: SQL condition over topic, offset, timestamp, payload.
    :param start: First offset to replay.
    :param end: Offset to stop before.
    :param rate: Most records per second; 0 = no limit.
    :param execute: Write the records. Without it, only the counts are printed.
    """

    id: str
    to_topic: str | None = None
    to_queue: str | None = None
    archive: Annotated[str | None, Parameter(name="--from-archive")] = None
    where: str | None = None
    start: int | None = None
    end: int | None = None
    rate: float = 0.0
    execute: bool = False
    broker: Broker = LOCAL_BROKER
    url: Url = LOCAL_URL
    token: Token = ""


@run_commands.command
def replay(topic: str, /, *, given: ReplayArguments, spark: Spark = Spark()) -> None:
    """Copy records of a topic or its archive to a topic or a queue. This is a dry run unless you
    use --execute.

    Example: `penstock pipeline run replay orders --id fix-17 --to-queue orders --start 1000`

    :param topic: Topic to replay.
    """
    with reporting():
        from penstock.pipeline.jobs.replay import ReplayOptions
        from penstock.pipeline.jobs.replay import replay as job

        done = job(spark.session("replay"), ReplayOptions(topic=topic, **asdict(given)), say)
    print_json(done)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CompactArguments:
    """The options of `compact`.

    :param topic: The topic to compact.
    :param key: Key as a JSON path in the payload: '$.id'.
    :param key_sql: Key as an SQL expression over topic, offset, timestamp, payload.
    :param to_topic: Append the latest records to this topic.
    :param to: Write a Parquet snapshot to this directory.
    :param in_place: Replace the sealed segments of the topic itself.
    :param tombstone: JSON path that is true in tombstones (records that delete a key).
    :param tombstone_sql: SQL condition that is true in tombstones. Default: an empty payload.
    :param tombstone_hours: With --in-place: hours to keep tombstones.
    :param roll: With --in-place: seal the active segment first.
    :param segment_mib: Merge segments up to this size in MiB.
    :param dry_run: Only count; change nothing.
    """

    topic: str
    key: str | None = None
    key_sql: str | None = None
    to_topic: str | None = None
    to: str | None = None
    in_place: bool = False
    tombstone: str | None = None
    tombstone_sql: str | None = None
    tombstone_hours: Annotated[float, Parameter(validator=NotNegative)] = 24.0
    roll: bool = False
    segment_mib: PositiveInt = 256
    dry_run: bool = False
    broker: Broker = LOCAL_BROKER
    url: Url = LOCAL_URL
    token: Token = ""


@run_commands.command
def compact(*, given: CompactArguments, spark: Spark = Spark()) -> None:
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


@run_commands.command
def recover(
    *directories: str,
    tasks: PositiveInt = 8,
    dry_run: bool = False,
    url: Url = LOCAL_URL,
    token: Token = "",
    spark: Spark = Spark(),
) -> None:
    """Push the events of buffer files, each once and in order per partition. The files are kept.

    Example: `penstock pipeline run recover /backup/broker-1/buffers /backup/broker-2/buffers`

    :param directories: Buffer directories of one or more brokers.
    :param tasks: Number of parallel tasks.
    :param dry_run: Only count; push nothing.
    """
    if not directories:
        raise usage("name the buffer directories")
    with reporting():
        from penstock.pipeline.jobs.recover import recover as job

        done = job(
            spark.session("recover"),
            list(directories),
            url,
            tasks=tasks,
            dry_run=dry_run,
            token=token,
        )
    print_json(done)
    if done.rejected or done.unreadable:
        raise SystemExit(1)


@run_commands.command
def rollup(
    *,
    since: Since = None,
    until: Until = None,
    queue: Queues = None,
    topic: list[str] | None = None,
    html: Html = None,
    keep_days: Days = None,
    broker: Broker = LOCAL_BROKER,
    url: Url = LOCAL_URL,
    database: Database = None,
    token: Token = "",
    spark: Spark = Spark(),
) -> None:
    """Compute statistics per minute: counts, bytes, latencies, lag, retries and dead letters.

    It resumes where the last run ended, and running it again changes nothing. The broker serves the
    result at /api/v1/analytics.

    Example: `penstock pipeline run rollup --since 24h --html day.html`

    :param topic: Only this topic; may be repeated.
    :param keep_days: Delete statistics older than this many days.
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


@run_commands.command
def dlq_report(
    *,
    since: Since = None,
    until: Until = None,
    queue: Queues = None,
    samples: Annotated[int, Parameter(validator=Number(gte=0, lte=100))] = 3,
    html: Html = None,
    database: Database = None,
    spark: Spark = Spark(),
    output: JsonOutput = JsonOutput(),  # noqa: ARG001  # `run` reads it
) -> View:
    """Report dead letters by error and queue, with samples.

    Errors that differ only in ids, numbers and times count as one kind.

    Example: `penstock pipeline run dlq-report --since 7d --html dead.html`

    :param samples: Dead letters to show per kind of error.
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
    return View(made, [TableBlock(columns, figures.kinds, "no dead letters")])


def _sample(kind: Any) -> str | None:
    return next((one.payload for one in kind.samples if one.payload), None)
