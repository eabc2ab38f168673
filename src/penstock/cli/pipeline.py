"""`penstock pipeline`: write, check, run and watch pipelines.

Progress goes to standard error as a live line on a terminal; otherwise to standard output as one
JSON object per change. Exit codes: 0 done, 1 failed or refused, 2 wrong usage. Ctrl-C stops after
the batch; a second one stops at once.
"""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.cli import (
    LOCAL_URL,
    Commands,
    Json,
    Token,
    Url,
    Watch,
    app,
    ask,
    completer,
)
from penstock.cli.tables import Column, Facts, View, count, print_json, rate, show, table
from penstock.errors import PenstockError
from penstock.net.addresses import resource

commands = Commands("Create, check, run and monitor Spark pipelines.", app, name="pipeline")
PIPELINES = "/api/v1/pipelines"
Name = Annotated[
    str,
    typer.Argument(help="Name of the pipeline.", autocompletion=completer(PIPELINES, "pipelines")),
]


class _FileOrJob(TyperGroup):
    """`run FILE` is short for `run file FILE`; a job's name goes to the job."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args.insert(0, "file")
        return super().parse_args(ctx, args)


run_commands = Commands(
    "Run a pipeline file (`run FILE`), or one of the built-in jobs.",
    commands,
    name="run",
    cls=_FileOrJob,
)

File = Annotated[Path, typer.Argument(help="The pipeline file.")]
Master = Annotated[
    str,
    typer.Option(
        "--master", envvar="SPARK_MASTER", help="Spark master, or sc://host for Spark Connect."
    ),
]
SparkLog = Annotated[
    str,
    typer.Option(
        "--spark-log", envvar="PENSTOCK_SPARK_LOG", help="Show Spark's log at this level and above."
    ),
]
Broker = Annotated[
    str, typer.Option("--broker", "-b", envvar="PENSTOCK_BROKER", help="The broker's TCP address.")
]
Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        envvar="DATABASE_URL",
        help="PostgreSQL URL of the queues; default: that of the broker on this machine.",
    ),
]
LOCAL, LOCAL_BROKER = "local[*]", "127.0.0.1:12345"

BAR_CHARACTERS = 24

TEMPLATE = """\
# A pipeline: what it reads, the steps in between, where it writes.
# Run it with: penstock pipeline run {file}
name: {name}
sources:
  orders:                       # the view's name in SQL
    topic: orders
    format: json                # or raw: the columns topic, offset, timestamp, payload
    schema: "id BIGINT, amount DOUBLE, at TIMESTAMP"
    # Records that do not fit; without it they stay, with their text in _corrupt.
    deadLetter: {{topic: orders-bad}}
steps:
  - name: big
    sql: SELECT id, amount, at FROM orders WHERE amount > 100
sink:
  topic: big-orders             # or queue: name, or parquet: directory
# All there is, then end; "10 seconds" to keep running; batch for a bounded read.
trigger: availableNow
checkpoint: ./checkpoints/{name}
broker: 127.0.0.1:12345
url: http://127.0.0.1:6632
spark: {{}}
"""


@contextmanager
def reporting() -> Iterator[None]:
    """When a query failed, as opposed to our code, its cause in one line, without Spark's stack."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
            raise
        from penstock.pipeline.failure import cause

        raise PenstockError(cause(error)) from None


def load_file(file: Path, token: str) -> Any:
    """The pipeline file, decoded; a token that is given takes the place of its own."""
    from penstock.pipeline.pipeline_file import load

    pipeline = load(file)
    pipeline.token = token or pipeline.token
    return pipeline


@commands.command()
def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("pipeline.yaml"),
    name: Annotated[str, typer.Option(help="Name of the pipeline.")] = "big-orders",
) -> None:
    """Create a pipeline file to start from.

    Example: `penstock pipeline init orders.yaml --name orders`
    """
    if file.exists():
        raise PenstockError(f"{file} is there already")
    file.write_text(TEMPLATE.format(name=name, file=file))
    typer.echo(f"wrote {file}; next: penstock pipeline validate {file}")


@commands.command()
def validate(
    file: File,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not contact the broker or the database.")
    ] = False,
    no_spark: Annotated[
        bool,
        typer.Option(
            "--no-spark", help="Only the quick check: names of columns, views, options and topics."
        ),
    ] = False,
    token: Token = "",
) -> None:
    """Check a pipeline file: columns, views, schemas, functions and topics, and then with Spark,
    which reports what a run would report. Without Java, only the quick check runs.

    Example: `penstock pipeline validate orders.yaml`
    """
    with reporting():
        from penstock.pipeline.session import find_java
        from penstock.pipeline.validation import check, resolve_routes

        pipeline = load_file(file, token)
        columns = check(pipeline, ask_broker=not offline)
        # To plan a batch is to ask the broker for it.
        by_spark = not no_spark and find_java() is not None and (pipeline.streaming or not offline)
        if by_spark:
            from penstock.pipeline.query_builder import verify

            if not offline:
                pipeline = resolve_routes(pipeline)
            columns = verify(session("validate", "local[1]")(), pipeline)
    typer.echo(f"{file} is fine" + (f"; the sink gets {', '.join(columns)}" if columns else ""))
    if not by_spark:
        asked = no_spark or (offline and find_java())
        why = "as asked for" if asked else "Java 17 or newer was not found"
        say(
            f"checked without Spark ({why}): types, functions and what streams can do were not "
            "looked at"
        )


@run_commands.command("file")
def run_file(
    file: File,
    master: Master = LOCAL,
    token: Token = "",
    spark_log: SparkLog = "",
    no_check: Annotated[
        bool,
        typer.Option(
            "--no-check", help="Skip the check before the run; Spark reports errors during the run."
        ),
    ] = False,
) -> None:
    """Run a pipeline file.

    Example: `penstock pipeline run file orders.yaml`, or short `penstock pipeline run orders.yaml`
    """
    show_spark_log(spark_log)
    with reporting():
        from penstock.pipeline.report import Heartbeat
        from penstock.pipeline.runner import Runner
        from penstock.pipeline.validation import check

        pipeline = load_file(file, token)
        if not no_check:
            check(pipeline)
        heartbeat = Heartbeat(pipeline.url, pipeline.name, pipeline.token)
        runner = Runner(pipeline, master, [_Show(), heartbeat])
        _stop_by_signal(runner.stop, "batch")
        runner.run()


def _stop_by_signal(stop: Callable[[], None], after: str) -> None:
    """Ctrl-C and SIGTERM call `stop`; a second Ctrl-C is as usual."""

    def handle(_signal: int, _frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stderr.write(f"\nstopping after this {after}; Ctrl-C again to stop at once\n")
        stop()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)


class _Show:
    """A live line on a terminal, JSON lines otherwise."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._last: tuple[Any, ...] = ()

    def __call__(self, report: Any) -> None:
        now = (report.state, report.batch, report.rows, report.lag, report.progress)
        if now == self._last:
            return
        self._last = now
        if not self._live:
            typer.echo(json.dumps(report.fields()))
            return
        position = f"; {report.position}" if report.position else ""
        bar = ""
        if report.progress is not None:
            done = round(BAR_CHARACTERS * report.progress)
            bar = f" [{'█' * done:·<{BAR_CHARACTERS}}] {report.progress:4.0%}"
        text = (
            f"{report.name}:{bar} {report.state}, batch {report.batch}, {report.rows:,} rows, "
            f"{report.rows_per_second:,.0f} rows/s, {report.batch_ms} ms a batch{position}"
        )
        end = "\n" if report.state in ("finished", "failed") else ""
        sys.stderr.write(f"\r\x1b[K{text}{end}")
        sys.stderr.flush()


@run_commands.command()
def archive(
    target: Annotated[
        str,
        typer.Argument(
            envvar="PENSTOCK_ARCHIVE",
            help="Location of the archives: a directory, or an s3://, gs:// or az:// address.",
        ),
    ],
    topic: Annotated[str | None, typer.Option(help="The topic to archive.")] = None,
    queue: Annotated[str | None, typer.Option(help="The queue to archive.")] = None,
    file_mib: Annotated[
        int, typer.Option("--file-mib", min=1, help="Approximate size of the files in MiB.")
    ] = 128,
    keep_days: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Delete archived days that are older than this many days. Default: keep all.",
        ),
    ] = None,
    vacuum_hours: Annotated[
        int, typer.Option(min=1, help="Old versions of the table can be read for this many hours.")
    ] = 48,
    schema: Annotated[
        str | None,
        typer.Option(
            help="Fields of JSON payloads to store as columns: 'id BIGINT, amount DOUBLE', or "
            "'infer' to detect them from the records. Default: the columns of the table."
        ),
    ] = None,
    dead_letter: Annotated[
        str | None, typer.Option(help="Topic for copies of records that do not match the columns.")
    ] = None,
    with_outcomes: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES",
            min=0,
            help="With --queue: archive messages older than this many minutes, with their outcome "
            "in each consumer group.",
        ),
    ] = None,
    watch: Annotated[
        float | None,
        typer.Option("--watch", min=1, help="Keep running, at most about so many seconds behind."),
    ] = None,
    convert: Annotated[
        bool,
        typer.Option(
            "--convert", help="First convert an archive of an earlier release to a table."
        ),
    ] = False,
    broker: Broker = LOCAL_BROKER,
    url: Url = LOCAL_URL,
    database: Database = None,
    token: Token = "",
    master: Master = LOCAL,
) -> None:
    """Archive everything added since the last run to a Delta table, each record once.

    Example: `penstock pipeline run archive s3://lake --topic orders`
    """
    with reporting():
        from penstock.pipeline.jobs.archive import Archiver, Origin, Payloads
        from penstock.pipeline.jobs.archive import archive as job
        from penstock.pipeline.lake.maintenance import Upkeep

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
        spark = session("archive", master)
        if watch is None:
            done = job(spark, target, origin, upkeep, payloads, convert_old=convert, say=say)
        else:
            archiver = Archiver(target, origin, upkeep, payloads)
            if convert:
                archiver.convert()
            _watch_archive(archiver, watch, spark)
            return
    print_json(done)


def _watch_archive(archiver: Any, target_seconds: float, spark: Any) -> None:
    """Until Ctrl-C, SIGTERM or `penstock pipeline stop`."""
    from penstock.pipeline.jobs.archive_watch import ArchiveWatch
    from penstock.pipeline.report import Heartbeat

    name = f"archive-{archiver.origin.name}"
    heartbeat = Heartbeat(archiver.origin.url, name, archiver.origin.token)
    watch = ArchiveWatch(archiver, target_seconds, [_Show(), heartbeat])
    _stop_by_signal(watch.stop, "run")
    watch.run(spark)


@run_commands.command()
def replay(
    topic: Annotated[str, typer.Argument(help="Topic to replay.")],
    id: Annotated[
        str,
        typer.Option(
            "--id", help="Name of this replay; another run with the same id adds no duplicates."
        ),
    ],
    to_topic: Annotated[str | None, typer.Option(help="Write to this topic.")] = None,
    to_queue: Annotated[str | None, typer.Option(help="Write to this queue.")] = None,
    from_archive: Annotated[
        str | None, typer.Option(help="Read from this archive instead of the topic.")
    ] = None,
    where: Annotated[
        str | None, typer.Option(help="SQL condition over topic, offset, timestamp, payload.")
    ] = None,
    start: Annotated[int | None, typer.Option(help="First offset to replay.")] = None,
    end: Annotated[int | None, typer.Option(help="Offset to stop before.")] = None,
    rate: Annotated[float, typer.Option(help="Most records per second; 0 = no limit.")] = 0.0,
    execute: Annotated[
        bool,
        typer.Option(
            "--execute", help="Write the records. Without it, only the counts are printed."
        ),
    ] = False,
    broker: Broker = LOCAL_BROKER,
    url: Url = LOCAL_URL,
    token: Token = "",
    master: Master = LOCAL,
) -> None:
    """Copy records of a topic or its archive to a topic or a queue. This is a dry run unless you
    use --execute.

    Example: `penstock pipeline run replay orders --id fix-17 --to-queue orders --start 1000`
    """
    with reporting():
        from penstock.pipeline.jobs.replay import ReplayOptions
        from penstock.pipeline.jobs.replay import replay as job

        options = ReplayOptions(
            topic=topic,
            id=id,
            to_topic=to_topic,
            to_queue=to_queue,
            archive=from_archive,
            broker=broker,
            url=url,
            token=token,
            where=where,
            start=start,
            end=end,
            rate=rate,
            execute=execute,
        )
        done = job(session("replay", master), options, say)
    print_json(done)


@run_commands.command()
def compact(
    topic: Annotated[str, typer.Option(help="The topic to compact.")],
    key: Annotated[
        str | None, typer.Option(help="Key as a JSON path in the payload: '$.id'.")
    ] = None,
    key_sql: Annotated[
        str | None,
        typer.Option(help="Key as an SQL expression over topic, offset, timestamp, payload."),
    ] = None,
    to_topic: Annotated[
        str | None, typer.Option(help="Append the latest records to this topic.")
    ] = None,
    to: Annotated[
        str | None, typer.Option(help="Write a Parquet snapshot to this directory.")
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Replace the sealed segments of the topic itself.")
    ] = False,
    tombstone: Annotated[
        str | None,
        typer.Option(help="JSON path that is true in tombstones (records that delete a key)."),
    ] = None,
    tombstone_sql: Annotated[
        str | None,
        typer.Option(help="SQL condition that is true in tombstones. Default: an empty payload."),
    ] = None,
    tombstone_hours: Annotated[
        float, typer.Option(min=0, help="With --in-place: hours to keep tombstones.")
    ] = 24.0,
    roll: Annotated[
        bool, typer.Option("--roll", help="With --in-place: seal the active segment first.")
    ] = False,
    segment_mib: Annotated[
        int, typer.Option("--segment-mib", min=1, help="Merge segments up to this size in MiB.")
    ] = 256,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count; change nothing.")] = False,
    broker: Broker = LOCAL_BROKER,
    url: Url = LOCAL_URL,
    token: Token = "",
    master: Master = LOCAL,
) -> None:
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

        options = CompactOptions(
            topic=topic,
            key=key,
            key_sql=key_sql,
            to_topic=to_topic,
            to=to,
            in_place=in_place,
            tombstone=tombstone,
            tombstone_sql=tombstone_sql,
            tombstone_seconds=3600 * tombstone_hours,
            roll=roll,
            segment_bytes=segment_mib << 20,
            dry_run=dry_run,
            broker=broker,
            url=url,
            token=token,
        )
        done = job(session("compact", master), options, say)
    print_json({**dataclasses.asdict(done), "bytes_saved": done.bytes_saved})


@run_commands.command()
def recover(
    directories: Annotated[
        list[str], typer.Argument(help="Buffer directories of one or more brokers.")
    ],
    tasks: Annotated[int, typer.Option(min=1, help="Number of parallel tasks.")] = 8,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count; push nothing.")] = False,
    url: Url = LOCAL_URL,
    token: Token = "",
    master: Master = LOCAL,
) -> None:
    """Push the events of buffer files, each once and in order per partition. The files are kept.

    Example: `penstock pipeline run recover /backup/broker-1/buffers /backup/broker-2/buffers`
    """
    with reporting():
        from penstock.pipeline.jobs.recover import recover as job

        done = job(
            session("recover", master), directories, url, tasks=tasks, dry_run=dry_run, token=token
        )
    print_json(done)
    if done.rejected or done.unreadable:
        raise typer.Exit(1)


COLUMNS = (
    Column("pipeline", "name"),
    Column("state"),
    Column("batch", format=count),
    Column("rows", format=count),
    Column("rows/s", "rows_per_second", rate),
    Column("behind", "lag", count),
    Column("position", prose=True, optional=True),
    Column("host", optional=True),
    Column("error", prose=True),
)


@commands.command("list")
def list_pipelines(
    url: Url = LOCAL_URL, token: Token = "", as_json: Json = False, watch: Watch = None
) -> None:
    """List the pipelines with their state, lag and last error.

    Example: `penstock pipeline list --watch`
    """

    def look() -> View:
        rows = ask(url, token, "GET", PIPELINES)["pipelines"]
        return table(rows, *COLUMNS, empty="no pipelines; write one: penstock pipeline init")

    show(look, as_json, watch)


@commands.command()
def status(
    name: Name,
    url: Url = LOCAL_URL,
    token: Token = "",
    as_json: Json = False,
    watch: Watch = None,
) -> None:
    """Show the last report of a pipeline.

    Example: `penstock pipeline status big-orders --json | jq .lag`
    """

    def look() -> View:
        report = ask(url, token, "GET", resource(PIPELINES, name))
        keys = [one.value or one.title for one in COLUMNS]
        others = [
            Column(key)
            for key, value in report.items()
            if key not in keys and not isinstance(value, list)  # --json has runs and minutes
        ]
        return View(report, [Facts([*COLUMNS, *others], report)])

    show(look, as_json, watch)


@commands.command()
def stop(name: Name, url: Url = LOCAL_URL, token: Token = "") -> None:
    """Ask a running pipeline, on any machine, to stop after its current batch.

    Example: `penstock pipeline stop big-orders`
    """
    report = ask(url, token, "POST", resource(PIPELINES, name, "stop"))
    typer.echo(f"{name} on {report['host']} is {report['state']} and will stop after its batch")


@commands.command()
def forget(name: Name, url: Url = LOCAL_URL, token: Token = "") -> None:
    """Delete the report of a pipeline that failed or is lost and will not run again.

    Example: `penstock pipeline forget big-orders`
    """
    ask(url, token, "DELETE", resource(PIPELINES, name))
    typer.echo(f"{name} is forgotten; it is shown again when it reports")


def session(name: str, master: str) -> Callable[[], Any]:
    """Makes the session a job runs in, once the job has looked at its arguments."""
    from penstock.pipeline.session import build

    return partial(build, f"penstock-{name}", master)


def show_spark_log(level: str) -> None:
    """Of the session that is made next."""
    if level:
        os.environ["PENSTOCK_SPARK_LOG"] = level


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


import penstock.cli.pipeline_reports  # noqa: E402  # their commands join those above
import penstock.cli.pipeline_trials  # noqa: E402, F401
