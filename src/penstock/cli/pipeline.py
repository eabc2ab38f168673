"""`penstock pipeline`: write, check, run and watch pipelines.

On a terminal, progress is a live line on standard error. Otherwise, it is one JSON object per
change on standard output. Exit codes: 0 done, 1 failed or refused, 2 wrong usage. Ctrl-C stops
after the batch; a second Ctrl-C stops at once.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from penstock.cli import BrokerApi, Token, WatchApi, command_group, completer, say
from penstock.cli.tables import Column, Facts, View, count, rate, table
from penstock.errors import PenstockError

commands = command_group("pipeline")
run_commands = App(name="run")
commands.command(run_commands)
PIPELINES = "/api/v1/pipelines"
Name = Annotated[
    str, Parameter(help="Name of the pipeline.", completer=completer(PIPELINES, "pipelines"))
]


@Parameter(name="*")
@dataclass(frozen=True)
class Spark:
    master: Annotated[
        str,
        Parameter(env_var="SPARK_MASTER", help="Spark master, or sc://host for Spark Connect."),
    ] = "local[*]"

    def session(self, name: str) -> Callable[[], Any]:
        """Return a function that creates the session, for a job that checks its arguments first."""
        from penstock.pipeline.session import build

        return partial(build, f"penstock-{name}", self.master)


@dataclass(frozen=True)
class LoggedSpark(Spark):
    """A Spark session with a log level."""

    spark_log: Annotated[
        str,
        Parameter(env_var="PENSTOCK_SPARK_LOG", help="Show Spark's log at this level and above."),
    ] = ""

    def show_log(self) -> None:
        """Set the log level of the next session."""
        if self.spark_log:
            os.environ["PENSTOCK_SPARK_LOG"] = self.spark_log


File = Annotated[Path, Parameter(help="The pipeline file.")]
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
    """Report an error of Spark by its cause, in one line without Spark's stack."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
            raise
        from penstock.pipeline.failure import cause

        raise PenstockError(cause(error)) from None


def load_file(file: Path, token: str) -> Any:
    """Return the decoded pipeline file. A given token replaces that of the file."""
    from penstock.pipeline.pipeline_file import load

    pipeline = load(file)
    pipeline.token = token or pipeline.token
    return pipeline


@commands.command
def init(file: Path = Path("pipeline.yaml"), /, *, name: str = "big-orders") -> None:
    """Create a pipeline file to start from.

    Example: `penstock pipeline init orders.yaml --name orders`

    :param file: The file to write.
    :param name: Name of the pipeline.
    """
    if file.exists():
        raise PenstockError(f"{file} already exists")
    file.write_text(TEMPLATE.format(name=name, file=file))
    print(f"wrote {file}; next: penstock pipeline validate {file}")


@commands.command
def validate(
    file: File, /, *, offline: bool = False, no_spark: bool = False, token: Token = ""
) -> None:
    """Check a pipeline file: options, functions, topics and queues, and then with Spark, which
    reports what a run would report of SQL, columns and types. Without Java, only the first runs.

    Example: `penstock pipeline validate orders.yaml`

    :param offline: Do not contact the broker or the database.
    :param no_spark: Only the quick check: the file, options, functions, topics and queues.
    """
    with reporting():
        from penstock.pipeline.session import find_java
        from penstock.pipeline.validation import check

        columns: list[str] = []
        pipeline = check(load_file(file, token), ask_broker=not offline)
        # Spark plans a batch by asking the broker.
        by_spark = not no_spark and find_java() is not None and (pipeline.streaming or not offline)
        if by_spark:
            from penstock.pipeline.query_builder import build

            columns = build(Spark(master="local[1]").session("validate")(), pipeline).columns
    print(f"{file} is fine" + (f"; the sink gets {', '.join(columns)}" if columns else ""))
    if not by_spark:
        asked = no_spark or (offline and find_java())
        why = "as requested" if asked else "Java 17 or newer was not found"
        say(
            f"checked without Spark ({why}), so not the SQL, columns, types and what streams "
            "support"
        )


@run_commands.default
def run_file(
    file: File,
    /,
    *,
    spark: LoggedSpark = LoggedSpark(),
    token: Token = "",
    no_check: bool = False,
) -> None:
    """Run a pipeline file (`run FILE`), or one of the built-in jobs.

    Example: `penstock pipeline run orders.yaml`

    :param no_check: Skip the check before the run; Spark reports errors during the run.
    """
    spark.show_log()
    with reporting():
        from penstock.pipeline.report import Heartbeat
        from penstock.pipeline.runner import Runner
        from penstock.pipeline.validation import check

        pipeline = load_file(file, token)
        if not no_check:
            pipeline = check(pipeline)
        heartbeat = Heartbeat(pipeline.url, pipeline.name, pipeline.token)
        runner = Runner(pipeline, spark.master, [ShowReports(), heartbeat])
        stop_by_signal(runner.stop, "batch")
        runner.run()


def stop_by_signal(stop: Callable[[], None], after: str) -> None:
    """Call `stop` on Ctrl-C and SIGTERM. A second Ctrl-C interrupts as usual."""

    def handle(_signal: int, _frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stderr.write(f"\nstopping after this {after}; Ctrl-C again to stop at once\n")
        stop()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)


class ShowReports:
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
            print(json.dumps(report.fields()))
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


@commands.command(name="list")
def list_pipelines(name: Name = "", /, *, api: WatchApi = WatchApi()) -> View:
    """List the pipelines with their state, lag and last error, or show the last report of one.

    Examples:

    `penstock pipeline list --watch`

    `penstock pipeline list big-orders --json | jq .lag`
    """
    if not name:
        rows = api.get(PIPELINES)["pipelines"]
        return table(rows, *COLUMNS, empty="no pipelines; write one: penstock pipeline init")
    report = api.get(PIPELINES, name)
    keys = [one.value or one.title for one in COLUMNS]
    others = [
        Column(key)
        for key, value in report.items()
        if key not in keys and not isinstance(value, list)  # only --json shows lists
    ]
    return View(report, [Facts([*COLUMNS, *others], report)])


@commands.command
def stop(name: Name, /, *, api: BrokerApi = BrokerApi()) -> None:
    """Ask a running pipeline, on any machine, to stop after its current batch.

    Example: `penstock pipeline stop big-orders`
    """
    report = api.post(PIPELINES, name, "stop")
    print(f"{name} on {report['host']} is {report['state']} and will stop after its batch")


@commands.command
def forget(name: Name, /, *, api: BrokerApi = BrokerApi()) -> None:
    """Delete the report of a pipeline that failed or is lost and will not run again.

    Example: `penstock pipeline forget big-orders`
    """
    api.delete(PIPELINES, name)
    print(f"the report of {name} is deleted; the pipeline is shown again when it reports")


import penstock.cli.pipeline_jobs  # noqa: E402  # registers more commands
import penstock.cli.pipeline_trials  # noqa: E402, F401
