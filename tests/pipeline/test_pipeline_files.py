"""Pipeline files: what is refused before Spark starts, and what they do when they run."""

import importlib
import json
import linecache
import sys
import threading
import urllib.request
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import ParseException

from penstock.cli import app
from penstock.cli import pipeline as pipeline_commands
from penstock.contract import pipelines as contract
from penstock.errors import ConfigError, NotFound, PenstockError
from penstock.metrics import Metrics
from penstock.net.topic_link import TopicLink
from penstock.pipeline import query_builder
from penstock.pipeline.failure import PipelineFailed, cause
from penstock.pipeline.pipeline_file import parse
from penstock.pipeline.report import Heartbeat, RunReport, in_words, lag_of
from penstock.pipeline.runner import Runner, failed_batch
from penstock.pipeline.step_history import changes
from penstock.pipeline.validation import check, resolve_routes
from penstock.pipeline_registry import Pipelines
from penstock.protocol import frames
from tests.pipeline.support import patiently
from tests.support.api import call
from tests.support.broker import BrokerProcess
from tests.support.cli import CliRunner
from tests.support.tokens import SECRET, token
from tests.support.wait import until


def output(frame: Any) -> Any:
    """A frame as the rows of the sink of BASE."""
    from penstock.pipeline.query_builder import SinkOutput

    sink = parse(BASE).sink
    assert sink is not None
    return SinkOutput("main", "big", frame, sink, "app")


BASE = """
name: big
sources:
  orders:
    {topic: orders, format: json, schema: "id BIGINT, amount DOUBLE, who STRUCT<name: STRING>"}
steps:
  - {name: big, sql: "SELECT id, amount, who.name AS name FROM orders WHERE amount > 100"}
sink: {topic: big-orders}
checkpoint: /tmp/none
"""


@pytest.mark.spark
def test_rows_out_of_a_shuffle_are_refused_by_their_plan_whoever_made_it(spark) -> None:
    from penstock.pipeline import query_builder
    from penstock.pipeline.session import activate

    activate(spark)
    pipeline = parse(BASE)
    rate = (
        spark.readStream.format("rate")
        .load()
        .selectExpr("timestamp", "value", "CAST(value AS STRING) AS payload")
    )
    late = rate.withWatermark("timestamp", "1 minute")
    table = spark.range(9).selectExpr("id AS value", "id AS JoinedAt")
    rate.createOrReplaceTempView("rate")
    table.createOrReplaceTempView("small")
    refused = {
        "join": late.alias("a").join(late.alias("b"), "value").selectExpr("a.payload"),
        "repartition": rate.repartition(3),
        "hint": spark.sql("SELECT /*+ REPARTITION(3) */ payload FROM rate"),
        "group by": spark.sql("SELECT payload, count(*) AS n FROM rate GROUP BY payload"),
        "grouped": rate.groupBy("payload").count(),
        "deduplicated": late.dropDuplicatesWithinWatermark(["value"]),
        "distinct": late.dropDuplicates(["value", "timestamp"]),
        "limit": rate.limit(5),
        "merged": rate.join(table.hint("merge"), "value"),
    }
    allowed = {
        "plain": rate.where("value % 2 = 0"),
        "sql": spark.sql("SELECT payload FROM rate"),
        "broadcast": spark.sql("SELECT payload, JoinedAt FROM rate JOIN small USING (value)"),
        "union": rate.union(rate),
        "coalesced": rate.coalesce(1),
        "identified": rate.repartition(3).withColumn("transactionId", rate.payload),
    }
    for name, frame in refused.items():
        with pytest.raises(ConfigError, match="in no fixed order"):
            query_builder.verify_output(pipeline, output(frame))
            pytest.fail(name)
    for frame in allowed.values():
        query_builder.verify_output(pipeline, output(frame))
    batch = parse(BASE.replace("checkpoint: /tmp/none", "trigger: batch"))
    with pytest.raises(ConfigError, match="in no fixed order"):
        rows = table.selectExpr("CAST(value AS STRING) AS payload").distinct()
        query_builder.verify_output(batch, output(rows))


@pytest.mark.spark
def test_a_good_file_tells_the_columns_its_sink_gets(spark) -> None:
    from penstock.pipeline.query_builder import build

    assert build(spark, parse(BASE)).columns == ["id", "amount", "name"]
    star = BASE.replace("SELECT id, amount, who.name AS name", "SELECT *")
    assert build(spark, parse(star)).columns == [
        *("id", "amount", "who", "_corrupt", "_reason", "_topic", "_offset", "_timestamp"),
    ]
    sql = "SELECT window.start, max(Amount) AS mostEver FROM Orders GROUP BY window(at, '1 minute')"
    text = BASE.replace("amount DOUBLE", "amount DOUBLE, at TIMESTAMP").replace(
        "{topic: orders,", "{topic: orders, watermark: {at: 1 minute},"
    )
    text = text.replace("SELECT id, amount, who.name AS name FROM orders WHERE amount > 100", sql)
    text = text.replace("{topic: big-orders}", "{topic: big-orders, orderBy: [mostever]}")
    assert build(spark, parse(text)).columns == ["start", "mostEver"]


@pytest.mark.spark
@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("amount > 100", "price > 100", "step big: .*`price` cannot be resolved"),
        ("FROM orders", "FROM order", "step big: "),
        ("SELECT id", "SELEC id", "step big: .*PARSE_SYNTAX_ERROR"),
        ("amount DOUBLE", "amount DUBBEL(", "PARSE_SYNTAX_ERROR"),
        ("{topic: big-orders}", "{topic: a, orderBy: [when]}", "sink.orderBy names 'when'; the"),
        ("{topic: orders,", "{topic: orders, watermark: {when: 1 minute},", "watermark: .*`when`"),
        ("WHERE amount", "GROUP BY ALL HAVING amount", "no fixed order"),
        (
            'WHERE amount > 100"}\nsink: {',
            'GROUP BY ALL"}\nsink: {mode: update, ',
            "in no fixed order",
        ),
    ],
)
def test_spark_judges_sql_before_a_run(spark, old: str, new: str, text: str) -> None:
    from penstock.pipeline.query_builder import build

    assert old in BASE
    with pytest.raises((PenstockError, ParseException), match=f"(?s){text}"):
        build(spark, parse(BASE.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            "sink: {topic: big-orders}",
            "sink: {topic: a, queue: b}",
            "the sink is one of topic, queue, parquet, route, table, postgres, format",
        ),
        ("sink: {topic: big-orders}", "sink: {topik: a}", "unknown field `topik`"),
        ("checkpoint: /tmp/none", "", "a stream needs a `checkpoint`"),
        (
            "checkpoint: /tmp/none",
            "checkpoint: x\ntrigger: often",
            "trigger is availableNow, batch or an interval",
        ),
        ("format: json, ", "", "`format: json` and `schema` belong together"),
        ("{topic: orders,", "{topic: orders, queue: q,", "source orders reads one of"),
        ("name: big, sql", "name: orders, sql", "two sources or steps are named orders"),
        (
            'sql: "SELECT',
            'python: "nowhere:f", sql: "SELECT',
            "step big has either `sql` or `python`",
        ),
        ("name: big\n", "name: [big\n", "not YAML"),
        ("name: big\n", "name: ' '\n", "a pipeline has a `name`"),
        (
            "{topic: orders,",
            "{topic: orders, options: {maxOfsets: 5},",
            "source orders: a topic source has no option",
        ),
        (
            "{topic: orders,",
            "{topic: orders, options: {minPartitions: x},",
            "'minPartitions' is a whole number from 1",
        ),
        (
            "{topic: orders,",
            "{topic: orders, options: {endingTimestamp: 5},",
            "a stream has no end: options that begin",
        ),
        (
            "{topic: orders,",
            "{topic: orders, watermark: {id: soon},",
            "watermark is one column and an interval",
        ),
        (
            "{topic: big-orders}",
            "{topic: a, options: {apId: x}}",
            "sink: a topic sink has no option 'apId'",
        ),
    ],
)
def test_what_is_wrong_is_said_before_spark_starts(old: str, new: str, text: str) -> None:
    assert old in BASE
    with pytest.raises(ConfigError) as error:
        check(parse(BASE.replace(old, new, 1)), ask_broker=False)
    assert text in str(error.value)


def test_a_python_step_must_be_there(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "shop_steps.py").write_text("def enrich(df):\n    return df\n")
    monkeypatch.chdir(tmp_path)
    file = BASE + "  \n"
    step = "steps:\n  - {name: rich, python: 'shop_steps:enrich'}\n"
    check(parse(file.replace("steps:\n", step)), ask_broker=False)
    with pytest.raises(ConfigError, match="shop_steps has no function 'enrichen'"):
        check(
            parse(file.replace("steps:\n", step.replace("enrich'", "enrichen'"))), ask_broker=False
        )
    with pytest.raises(ConfigError, match="cannot be imported"):
        check(
            parse(file.replace("steps:\n", step.replace("shop_steps", "shop_stepz"))),
            ask_broker=False,
        )


def test_a_missing_topic_is_found_before_spark_starts(server, tcp) -> None:
    file = BASE + f"broker: {tcp}\n"
    with pytest.raises(ConfigError, match="topic 'nowhere-at-all' does not exist on"):
        check(parse(file.replace("topic: orders,", "topic: nowhere-at-all,")))


def test_a_missing_queue_is_found_before_spark_starts(server) -> None:
    file = (
        f"name: q\nsource: {{queue: nowhere}}\nsink: {{topic: t}}\ncheckpoint: "
        f"/x\ndatabase: '{server.database_url}'\n"
    )
    with pytest.raises(
        ConfigError, match="queue 'nowhere' does not exist in the database; queues: "
    ):
        check(parse(file))


def test_a_token_is_taken_as_by_the_other_commands(tmp_path: Path, database_url: str) -> None:
    with BrokerProcess(
        tmp_path / "data", database_url=database_url, auth__enabled="true", auth__secret=SECRET
    ) as broker:
        host, port = broker.tcp
        file = tmp_path / "p.yaml"
        file.write_text(BASE + f"broker: {host}:{port}\nurl: {broker.url}\n")
        run = CliRunner().invoke
        assert "Authentication required" in run(app, ["pipeline", "validate", str(file)]).output
        output = run(app, ["pipeline", "validate", "--no-spark", str(file), "--token", token()])
        assert "topic 'orders' does not exist" in " ".join(output.output.split())


def test_the_commands_write_check_list_and_stop(server, tmp_path: Path) -> None:
    assert pipeline_commands.commands is not None
    run = CliRunner().invoke
    file = tmp_path / "p.yaml"
    assert run(app, ["pipeline", "init", str(file)]).exit_code == 0
    assert run(app, ["pipeline", "init", str(file)]).exit_code == 1
    checked = run(app, ["pipeline", "validate", "--offline", "--no-spark", str(file)])
    assert checked.exit_code == 0
    assert "checked without Spark (as requested), so not the SQL" in checked.output
    file.write_text(file.read_text().replace("topic: orders\n", "topik: orders\n"))
    assert run(app, ["pipeline", "validate", "--offline", "--no-spark", str(file)]).exit_code == 1

    name = f"p {uuid.uuid4().hex[:6]}"
    beat = Heartbeat(server.url, name)
    runner = Runner(parse(BASE))
    runner.report.state = "running"
    beat(runner.report)
    listed = json.loads(run(app, ["pipeline", "list", "--json", "--url", server.url]).output)
    assert [one["state"] for one in listed if one["name"] == name] == ["running"]
    assert run(app, ["pipeline", "stop", name, "--url", server.url]).exit_code == 0
    assert not beat.stop_wanted
    beat._last = 0.0
    beat(runner.report)
    assert beat.stop_wanted
    shown = run(app, ["pipeline", "list", name, "--json", "--url", server.url]).output
    assert json.loads(shown)["stopping"]
    assert run(app, ["pipeline", "list", "nobody", "--url", server.url]).exit_code == 1


async def test_a_silent_pipeline_is_lost_an_ended_one_is_not_and_both_survive_a_restart(
    tmp_path: Path,
) -> None:

    now = [1000.0]
    metrics = Metrics()
    pipelines = Pipelines(tmp_path, metrics, clock=lambda: now[0])
    times = {"lag_seconds": 90.0, "target_seconds": 60, "batch_ms": 250}
    counts = {"rows": 40, "lag": 7, "batch": 3, "rows_per_second": 160.0, "state_rows": 5}
    report = contract.PipelineReport("running", **times, **counts, state_bytes=900)
    assert not pipelines.put("a", report).stop
    gauges = {"lag_seconds": 90, "target_lag_seconds": 60, "batch_seconds": 0.25}
    for name, value in {**gauges, **counts, "state_bytes": 900}.items():
        assert metrics.values_of(f"penstock_pipeline_{name}") == {("a",): value}
    pipelines.put("b", contract.PipelineReport("failed", error="no such column"))
    now[0] += 60
    assert [(one.name, one.state) for one in pipelines.all()] == [
        ("a", "lost"),
        ("b", "failed"),
    ]
    pipelines.ask_to_stop("a")
    assert pipelines.put("a", contract.PipelineReport("running")).stop
    assert not pipelines.put("a", contract.PipelineReport("finished")).stop
    again = Pipelines(tmp_path, clock=lambda: now[0])
    await again.start()
    assert again.get("b").error == "no such column"
    again.forget("b")
    with pytest.raises(NotFound):
        again.get("b")


async def test_runs_and_minutes_of_a_pipeline_are_remembered(tmp_path: Path) -> None:

    now = [600.0]
    pipelines = Pipelines(tmp_path, clock=lambda: now[0])

    def report(at: float, state: str, started_at: float, rows: int, **more: Any) -> None:
        now[0] = at
        report = contract.PipelineReport(state, started_at=started_at, rows=rows, **more)
        pipelines.put("p", report)

    report(600, "starting", 600, 0)
    report(630, "running", 600, 100, lag=50)
    report(661, "running", 600, 150, lag=20)
    report(662, "failed", 600, 150, error="no column")
    report(670, "starting", 670, 0)
    report(800, "running", 670, 7, lag=3)
    pipelines.ask_to_stop("p")
    await pipelines.stop()
    again = Pipelines(tmp_path, clock=lambda: now[0])
    await again.start()
    known = again.get("p")
    assert [(run.state, run.started_at, run.rows) for run in known.runs] == [
        ("running", 670, 7),
        ("failed", 600, 150),
    ]
    assert known.runs[1].error == "no column"
    assert known.minutes == [
        contract.PipelineMinute(600, 100, 50),
        contract.PipelineMinute(660, 50, None),
        contract.PipelineMinute(780, 7, 3),
    ]
    for run in range(40):
        again.put("p", contract.PipelineReport("running", started_at=1000 + run))
        now[0] += 60
    known = again.get("p")
    assert (len(known.runs), len(known.minutes)) == (20, 15)


def test_a_failed_batch_is_named_by_what_it_reads(tmp_path: Path) -> None:
    def note(kind: str, batch: int, *sources: Any) -> None:
        (tmp_path / kind).mkdir(exist_ok=True)
        (tmp_path / kind / str(batch)).write_text(
            "\n".join(["v1", '{"batchWatermarkMs":0}', *map(json.dumps, sources)])
        )

    assert failed_batch(tmp_path) == ""
    note(
        "offsets",
        6,
        {"orders": {"incarnation": "a", "next": 40}},
        {"queue": "paid", "xid": "700", "cuts": []},
    )
    note("commits", 6)
    assert failed_batch(tmp_path) == ""
    note(
        "offsets",
        7,
        {"orders": {"incarnation": "a", "next": 60}},
        {"queue": "paid", "xid": "720", "cuts": []},
    )
    expected = "batch 7: topic orders: offsets 40 to 59; queue paid: transactions from 700 to 720"
    assert failed_batch(tmp_path) == expected


def progress(start: str, end: str, latest: str) -> list[dict[str, str]]:
    return [{"startOffset": start, "endOffset": end, "latestOffset": latest}]


def test_lag_is_unknown_in_a_batch_that_is_run_again() -> None:
    assert lag_of(progress("null", '{"t": {"next": 3}}', "null")) is None
    assert lag_of(progress("null", '{"t": {"next": 3}}', '{"t": {"next": 9}}')) == 6


def test_progress_names_topics_and_queues_with_their_offsets_and_lag() -> None:
    three, nine = '{"t": {"next": 3}}', '{"t": {"next": 9}}'
    assert in_words(progress(three, nine, nine)) == "topic t: offsets 3 to 8, up to date"
    assert in_words(progress(nine, nine, '{"t": {"next": 10}, "u": {"next": 2}}')) == (
        "topic t: up to offset 8, 1 record behind; topic u: nothing read yet, 2 records behind"
    )
    queue = '{"queue": "jobs", "xid": "812", "cuts": []'
    assert in_words(progress("null", queue + "}", queue + ', "waiting": 42, "more": false}')) == (
        "queue jobs: transactions up to 812, 42 messages behind"
    )
    stale = ', "waiting": 100000, "more": true, "behindSeconds": 1.25}'
    assert in_words(progress("null", queue + "}", queue + stale)) == (
        "queue jobs: transactions up to 812, at least 100,000 messages behind, "
        "read from a standby 1.2 s behind"
    )
    assert in_words(progress("7", '{"logOffset": 3}', "null")) == ""  # another source's


def test_the_cause_of_a_failure_is_told_without_sparks_stack() -> None:
    text = (
        "Job aborted.\nTraceback (most recent call last):\npenstock.errors.InvalidOffset: "
        "offset 3 aged out\n\tat x"
    )
    assert cause(RuntimeError(text)) == "offset 3 aged out"
    assert cause(RuntimeError("Traceback\nValueError: bad\n")) == "ValueError: bad"


@pytest.mark.spark
def test_a_file_runs_from_json_in_a_topic_to_a_queue_with_dead_letters(
    server, tcp, spark, tmp_path
) -> None:
    from penstock.pipeline.sources.queue import QueueReader
    from tests.pipeline.support import batch_rows
    from tests.pipeline.test_queue_source import options, rows_of

    tag = uuid.uuid4().hex[:8]
    payloads = [b'{"id": %d, "amount": %d}' % (i, i * 10) for i in range(20)]
    bad = [b"not json", b'{"id": "x", "amount": 5}', b"", b"\xff\xfe"]
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch(f"orders-{tag}", [*payloads[:10], *bad, *payloads[10:]]))
    file = parse(f"""
name: big-{tag}
sources:
  orders:
    topic: orders-{tag}
    format: json
    schema: "id BIGINT, amount DOUBLE"
    deadLetter: {{topic: bad-{tag}}}
steps:
  - name: big
    sql: SELECT id, amount, CAST(id % 2 AS STRING) AS partition FROM orders WHERE amount >= 100
sink: {{queue: big-{tag}}}
checkpoint: {tmp_path}/checkpoint
broker: {tcp}
url: {server.url}
""")
    check(file)
    reported: list[str] = []
    heartbeat = Heartbeat(server.url, file.name)
    report = Runner(
        file, "local[2]", [lambda report: reported.append(report.state), heartbeat]
    ).run(spark)
    assert (report.state, report.rows) == ("finished", 24)
    assert reported[0] == "starting"
    assert reported[-1] == "finished"
    reader = QueueReader(options(server.database_url, f"big-{tag}", streaming=False))
    rows = sorted(
        rows_of(reader, reader.partitions()), key=lambda row: (row["partition"], row["seq"])
    )
    ids = [json.loads(row["payload"])["id"] for row in rows]
    assert ids == [10, 12, 14, 16, 18, 11, 13, 15, 17, 19]
    dead = [json.loads(row["payload"]) for row in batch_rows(broker=tcp, topic=f"bad-{tag}")]
    assert [letter["offset"] for letter in dead] == [10, 11, 12, 13]
    assert dead[0]["payload"] == "not json"
    assert dead[0]["topic"] == f"orders-{tag}"
    shuffled = parse(f"""
name: sums-{tag}
source: {{topic: orders-{tag}}}
steps:
  - {{name: sums, sql: "SELECT topic, count(*) AS n FROM source GROUP BY topic"}}
sink: {{topic: sums-{tag}}}
trigger: batch
broker: {tcp}
""")
    with pytest.raises(ConfigError, match="in no fixed order"):
        Runner(shuffled, "local[2]").run(spark)
    failing = parse(
        f"name: f\nsource: {{topic: gone-{tag}}}\nsink: {{topic: t}}\ntrigger: batch\nbroker: "
        f"{tcp}\n"
    )
    with pytest.raises(PipelineFailed, match=f"gone-{tag}"):
        Runner(failing, "local[2]").run(spark)


@pytest.mark.spark
def test_only_the_same_batch_of_the_same_checkpoint_is_taken_for_written(
    server, tcp, spark, tmp_path
) -> None:
    """Batches are counted from 0 with every new checkpoint, in every run of a batch pipeline, and
    (where Spark does not say which it is) in every call of foreachBatch: other rows under an old
    number would be dropped as known."""
    from tests.pipeline.support import batch_rows

    tag = uuid.uuid4().hex[:8]

    def append(*numbers: int) -> None:
        with TopicLink(tcp, 20) as link:
            link.append(frames.produce_batch(f"in-{tag}", [b"%d" % number for number in numbers]))

    def payloads(topic: str) -> list[int]:
        return [int(row["payload"]) for row in batch_rows(broker=tcp, topic=f"{topic}-{tag}")]

    def run(sink: str, more: str) -> RunReport:
        text = f"""
name: same-{tag}
source: {{topic: in-{tag}}}
steps: [{{name: s, sql: "SELECT payload FROM source"}}]
sink: {{topic: {sink}-{tag}}}
broker: {tcp}
url: {server.url}
{more}
"""
        runner = Runner(parse(text), "local[2]")
        with ThreadPoolExecutor(1) as pool:  # a thread that has not met the session before
            return pool.submit(runner.run, spark).result()

    def each(number: int) -> None:
        frame = (
            spark.readStream.format("penstock")
            .options(broker=tcp, topic=f"in-{tag}")
            .load()
            .select("payload")
        )
        options = {"broker": tcp, "topic": f"each-{tag}", "appId": f"each-{tag}"}

        def write(batch: Any, _number: int) -> None:
            batch.write.format("penstock").mode("append").options(**options).save()

        stream = frame.writeStream.foreachBatch(write).option(
            "checkpointLocation", str(tmp_path / "each")
        )
        started = stream.trigger(availableNow=True)
        patiently(lambda: started.start().awaitTermination())
        assert payloads("each") == [*range(number)]

    append(0, 1)
    run("out", f"checkpoint: {tmp_path}/one")
    run("twice", "trigger: batch")
    each(2)
    append(2, 3, 4)
    each(5)
    run("out", f"checkpoint: {tmp_path}/two")
    assert payloads("out") == [0, 1, 0, 1, 2, 3, 4]
    assert run("twice", "trigger: batch").rows == 5
    assert payloads("twice") == [0, 1, 0, 1, 2, 3, 4]
    for _ in range(2):
        run("once", f"trigger: batch\nappId: once-{tag}")
    assert payloads("once") == [*range(5)]
    append(5)
    with pytest.raises(
        PipelineFailed,
        match=r"was written to .* before with other rows",
    ):
        run("once", f"trigger: batch\nappId: once-{tag}")


@pytest.mark.spark
def test_aggregates_are_written_when_they_change_or_when_their_window_is_over(
    server, tcp, spark, tmp_path
) -> None:
    from tests.pipeline.support import batch_rows

    tag = uuid.uuid4().hex[:8]

    def run(name: str, sql: str, sink: str, *seconds: int) -> list[Any]:
        with TopicLink(tcp, 20) as link:
            records = [
                b'{"id": %d, "at": "2026-01-01T00:00:%02dZ"}' % (at % 2, at) for at in seconds
            ]
            link.append(frames.produce_batch(f"in-{name}-{tag}", records))
        file = parse(f"""
name: {name}-{tag}
sources:
  orders:
    topic: in-{name}-{tag}
    format: json
    schema: "id INT, at TIMESTAMP"
    watermark: {{at: 5 seconds}}
steps: [{{name: s, sql: "{sql}"}}]
sink: {{topic: {name}-{tag}, {sink}}}
checkpoint: {tmp_path}/{name}
broker: {tcp}
url: {server.url}
""")
        check(file)
        Runner(file, "local[2]").run(spark)
        rows = batch_rows(broker=tcp, topic=f"{name}-{tag}")
        return [tuple(json.loads(row["payload"]).values()) for row in rows]

    sums = (
        "sums",
        "SELECT id, count(*) AS n FROM orders GROUP BY id",
        "mode: update, orderBy: [id]",
    )
    assert sorted(run(*sums, 1, 2, 3)) == [(0, 1), (1, 2)]
    assert run(*sums, 4)[2:] == [(0, 2)]  # only what changed
    sql = "SELECT window.start, count(*) AS n FROM orders GROUP BY window(at, '10 seconds')"
    over = run("over", sql, "orderBy: [start]", 1, 2, 14, 26)
    assert sorted(over) == [("2026-01-01T00:00:00.000Z", 2), ("2026-01-01T00:00:10.000Z", 1)]


@pytest.mark.spark
def test_a_step_that_cannot_be_built_is_named_with_its_line(
    server, tcp, spark, tmp_path, monkeypatch
) -> None:
    (tmp_path / "bad_steps.py").write_text(
        "def boom(df):\n    raise RuntimeError('no map')\n\ndef none(df): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch("bad-steps", [b"x"]))
    for step, text in (
        ("python: 'bad_steps:boom'", r"step s: RuntimeError: no map \(.*bad_steps.py, line 2\)"),
        ("python: 'bad_steps:none'", "step s: bad_steps:none gave NoneType, not a DataFrame"),
        ("sql: SELECT nofunction(payload) FROM source", r"step s: \[UNRESOLVED_ROUTINE\]"),
    ):
        file = (
            f"name: b\nsource: {{topic: bad-steps}}\nsteps: [{{name: s, {step}}}]\nsink: "
            f"{{topic: t}}\ntrigger: batch\n"
        )
        file += f"broker: {tcp}\n"
        with pytest.raises(ConfigError, match=text):
            Runner(parse(file), "local[2]").run(spark)


@pytest.mark.spark
def test_a_schema_may_change_between_runs_and_a_failed_batch_says_which_record_and_where(
    server, tcp, spark, tmp_path
) -> None:
    from tests.pipeline.support import batch_rows

    tag = uuid.uuid4().hex[:8]

    def run(
        schema: str, payload: bytes, select: str = "SELECT * FROM orders"
    ) -> list[dict[str, Any]]:
        with TopicLink(tcp, 20) as link:
            link.append(frames.produce_batch(f"orders-{tag}", [payload]))
        text = f"""
name: change-{tag}
sources:
  orders: {{topic: orders-{tag}, format: json, schema: "{schema}"}}
steps: [{{name: made, sql: "{select}"}}]
sink: {{topic: made-{tag}}}
checkpoint: {tmp_path}/checkpoint
broker: {tcp}
url: {server.url}
"""
        Runner(parse(text), "local[2]").run(spark)
        return [json.loads(row["payload"]) for row in batch_rows(broker=tcp, topic=f"made-{tag}")]

    run("id BIGINT", b'{"id": 1}')
    added = run("id BIGINT, amount DOUBLE", b'{"id": 2, "amount": 2.5}')
    assert [(row["id"], row.get("amount")) for row in added] == [(1, None), (2, 2.5)]
    retyped = run("id BOOLEAN", b'{"id": 3}')[-1]
    assert (retyped.get("id"), retyped["_corrupt"], retyped["_offset"]) == (None, '{"id": 3}', 2)

    failing = f"""
name: fail-{tag}
source: {{topic: orders-{tag}, options: {{startingOffsets: '{{"orders-{tag}": 1}}'}}}}
steps:
  - name: made
    sql: "SELECT IF(offset = 4, '{{oops', CAST(payload AS STRING)) AS payload FROM source"
sink: {{queue: made-{tag}}}
checkpoint: {tmp_path}/failing
broker: {tcp}
url: {server.url}
"""
    where = (
        rf"row 3 of this task is not JSON .*\{{oops.*batch 0: topic orders-{tag}: up to offset 4"
    )
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch(f"orders-{tag}", [b"4", b"5"]))
    with pytest.raises(PipelineFailed, match=where):
        Runner(parse(failing), "local[2]").run(spark)


def resolved(file: str) -> Any:
    return resolve_routes(parse(file)).outputs["main"]


def test_a_route_as_sink_is_the_topic_it_delivers_from(server) -> None:
    tag = uuid.uuid4().hex[:8]

    def make(name: str, source: str) -> None:
        body = f'{{"name": "{name}", {source} "destination": {{"type": "http", "url": "http://127.0.0.1:1/"}}}}'
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(
            urllib.request.Request(
                f"{server.url}/api/v1/routes", body.encode(), headers, method="POST"
            ),
            timeout=10,
        ).close()

    make(f"hook-{tag}", f'"source": {{"topic": "out-{tag}"}},')
    make(f"direct-{tag}", "")
    file = BASE.replace("topic: big-orders", f"route: hook-{tag}") + f"url: {server.url}\n"
    assert resolved(file).topic == f"out-{tag}"
    with pytest.raises(ConfigError, match="direct pushes only"):
        resolved(file.replace("hook-", "direct-"))
    with pytest.raises(ConfigError, match="route 'nobody' does not exist"):
        resolved(file.replace(f"hook-{tag}", "nobody"))


class Destination:
    """An HTTP server that takes lines of JSON: away at first, and with an opinion about one of
    them.
    """

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.refusals = 3
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
                ids = [json.loads(line)["id"] for line in lines]
                if outer.refusals:
                    outer.refusals -= 1
                    self.send_response(503)
                elif 13 in ids:
                    self.send_response(422)
                else:
                    outer.taken += ids
                    self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                del format, arguments

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/in"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> "Destination":
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.spark
def test_a_running_stream_ends_in_a_route_with_its_retries_and_dead_letters(
    server, tcp, spark, tmp_path
) -> None:
    tag = uuid.uuid4().hex[:8]

    routes = f"{server.url}/api/v1/routes"
    with Destination() as destination, TopicLink(tcp, 20) as link:
        route = {
            "name": f"out-{tag}",
            "source": {"topic": f"out-{tag}"},
            "destination": {"type": "http", "url": destination.url},
            "batch": {"records": 5, "linger": "10ms"},
            "queue": {"workers": 1, "retry_interval": "10ms", "max_retry_delay": "50ms"},
        }
        call(routes, "POST", route)

        def append(*numbers: int) -> None:
            link.append(
                frames.produce_batch(
                    f"in-{tag}", [b'{"id": %d, "ok": %d}' % (i, i % 2) for i in numbers]
                )
            )

        append(*range(10))
        file = parse(f"""
name: out-{tag}
sources:
  numbers: {{topic: in-{tag}, format: json, schema: "id BIGINT, ok INT"}}
steps:
  - {{name: odd, sql: "SELECT id FROM numbers WHERE ok = 1"}}
sink: {{route: out-{tag}}}
trigger: 100 milliseconds
checkpoint: {tmp_path}/checkpoint
broker: {tcp}
url: {server.url}
""")
        check(file)
        runner = Runner(file, "local[2]")
        letters: list[dict[str, Any]] = []

        def look() -> None:
            try:
                until(lambda: destination.taken == [1, 3, 5, 7, 9], 120, "the first records arrive")
                append(*range(10, 20))  # the stream is still running
                until(lambda: set(destination.taken) >= {11, 15, 17, 19}, 120, "the others arrive")
                letters.extend(
                    until(
                        lambda: call(f"{routes}/out-{tag}/deadletters")["letters"],
                        20,
                        "one is refused",
                    )
                )
            finally:
                runner.stop()

        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(look)
            runner.run(spark)
            looking.result()
        assert runner.report.state == "finished"
        assert sorted(destination.taken) == [1, 3, 5, 7, 9, 11, 15, 17, 19]
        assert destination.refusals == 0
        assert [json.loads(letter["record"]) for letter in letters] == [{"id": 13}]
        call(f"{routes}/out-{tag}?force=true", "DELETE")


STREAM = """
name: v-{tag}
sources:
  orders: {{topic: v-{tag}, format: json, schema: "id BIGINT, v INT, at TIMESTAMP"}}
steps:
  - {{name: made, sql: "{sql}"}}
sink: {{{sink}}}
checkpoint: {directory}/{number}
broker: {tcp}
url: {url}
"""


@pytest.fixture
def stream(server, tcp, tmp_path) -> Callable[..., str]:
    """Make a pipeline file that reads a topic with one record. `SINK` in a sink is a name."""
    tag = uuid.uuid4().hex[:8]
    with TopicLink(tcp, 20) as link:
        link.append(
            frames.produce_batch(f"v-{tag}", [b'{"id": 1, "v": 2, "at": "2026-01-01T00:00:00Z"}'])
        )

    def make(sql: str, sink: str = "topic: SINK") -> str:
        return STREAM.format(
            sql=sql,
            sink=sink.replace("SINK", f"o-{tag}"),
            tag=tag,
            directory=tmp_path,
            number=uuid.uuid4().hex[:8],
            tcp=tcp,
            url=server.url,
        )

    return make


TOPIC_SINK, QUEUE_SINK = "topic: SINK", "queue: SINK"


@pytest.mark.spark
@pytest.mark.parametrize(
    ("sql", "sink", "text"),
    [
        (
            "SELECT id FROM orders WHERE id > (SELECT max(id) FROM orders)",
            TOPIC_SINK,
            "Streaming query is not allowed",
        ),
        (
            "SELECT id FROM orders UNION SELECT v FROM orders",
            f"{TOPIC_SINK}, orderBy: [id]",
            "without watermark",
        ),
        (
            "SELECT id FROM orders ORDER BY id",
            TOPIC_SINK,
            "Sorting is not supported|in no fixed order",
        ),
        (
            "SELECT id, row_number() OVER (PARTITION BY v ORDER BY id) AS n FROM orders",
            TOPIC_SINK,
            "NON_TIME_WINDOW|no fixed",
        ),
        (
            "SELECT nofunction(id) AS n FROM orders",
            TOPIC_SINK,
            r"step made: \[UNRESOLVED_ROUTINE\]",
        ),
        (
            "SELECT id, rand() AS r, uuid() AS u FROM orders",
            TOPIC_SINK,
            r"and rand\(\), uuid\(\) would",
        ),
        (
            "SELECT id, current_timestamp() AS now FROM orders",
            TOPIC_SINK,
            r"and current_timestamp\(\) would",
        ),
        ("SELECT id FROM orders WHERE at > now()", QUEUE_SINK, r"and now\(\) would"),
        ("SELECT id, v AS id FROM orders", TOPIC_SINK, "two columns are named 'id'"),
        (
            "SELECT id AS payload FROM orders",
            QUEUE_SINK,
            "needs a column payload, binary or string",
        ),
        (
            "SELECT id AS payload FROM orders",
            TOPIC_SINK,
            "needs a column payload, binary or string",
        ),
        (
            "SELECT id AS partition, v FROM orders",
            QUEUE_SINK,
            "the column partition must be a string",
        ),
    ],
)
def test_validation_by_spark_says_what_a_run_says(spark, stream, sql, sink, text) -> None:
    given = stream(sql, sink)
    with pytest.raises(ConfigError, match=text):
        query_builder.build(spark, parse(given))
    with pytest.raises(PenstockError, match=text):
        Runner(parse(given), "local[2]").run(spark)


@pytest.mark.spark
def test_validation_by_spark_returns_the_columns_of_the_sink(spark, stream, tmp_path) -> None:
    given = stream("SELECT id FROM orders")
    late = given.replace("format: json", "watermark: {id: 1 minute}, format: json")
    with pytest.raises(
        ConfigError, match=r"source orders: watermark: .*EVENT_TIME_IS_NOT_ON_TIMESTAMP"
    ):
        query_builder.build(spark, parse(late))
    assert query_builder.build(spark, parse(given)).columns == ["id"]
    # Files of a batch are replaced as a whole.
    to_files = stream("SELECT rand() AS r, id FROM orders", f"parquet: {tmp_path}/files")
    assert query_builder.build(spark, parse(to_files)).columns == ["r", "id"]


@pytest.mark.spark
def test_the_command_validates_with_spark_and_says_when_it_is_not_there(
    spark, stream, tmp_path, monkeypatch
) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(stream("SELECT id FROM orders"))
    validate = partial(CliRunner().invoke, app, ["pipeline", "validate", str(file)])
    output = validate().output
    assert output.split("\n")[0].endswith("is fine; the sink gets id"), output
    assert "without Spark" not in output
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    assert "checked without Spark (Java 17 or newer was not found)" in validate().output
    monkeypatch.delenv("JAVA_HOME")
    file.write_text(stream("SELECT nofunction(id) AS n FROM orders"))
    assert "UNRESOLVED_ROUTINE" in validate().output


@pytest.mark.spark
def test_state_is_not_continued_by_steps_that_did_not_make_it(
    server, tcp, spark, tmp_path, monkeypatch, caplog
) -> None:
    from tests.pipeline.support import batch_rows

    tag = uuid.uuid4().hex[:8]
    module = tmp_path / f"state_steps_{tag}.py"
    module.write_text("def positive(df):\n    # a comment\n    return df.where('v > 0')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def run(sums: str, after: str, schema: str = "id INT, v INT") -> list[Any]:
        with TopicLink(tcp, 20) as link:
            link.append(
                frames.produce_batch(f"in-{tag}", [b'{"id": 1, "v": 5}', b'{"id": 1, "v": 6}'])
            )
        text = f"""
name: state-{tag}
sources:
  orders: {{topic: in-{tag}, format: json, schema: "{schema}"}}
steps:
  - {{name: good, python: "{module.stem}:positive"}}
  - {{name: sums, sql: "{sums}"}}
  - {{name: after, sql: "{after}"}}
sink: {{topic: out-{tag}, mode: update, orderBy: [id]}}
checkpoint: {tmp_path}/checkpoint
broker: {tcp}
url: {server.url}
"""
        Runner(parse(text), "local[2]").run(spark)
        return [json.loads(row["payload"]) for row in batch_rows(broker=tcp, topic=f"out-{tag}")]

    count, after = "SELECT id, count(*) AS n FROM good GROUP BY id", "SELECT id, n FROM sums"
    assert run(count, after) == [{"id": 1, "n": 2}]
    other = (
        r"holds state that other steps have made: step sums was .*count\(\*\).* and is .*sum\(v\)"
    )
    with pytest.raises(ConfigError, match=other):
        run("SELECT id, sum(v) AS n FROM good GROUP BY id", after)
    with pytest.raises(ConfigError, match="column id of source orders was INT and is BIGINT"):
        run(count, after, "id BIGINT, v INT")
    with pytest.raises(ConfigError, match="step sums was"):
        run("SELECT id, v AS n FROM good", after)
    module.write_text("def positive(df):\n    return df.where('v > 5')\n")
    importlib.reload(importlib.import_module(module.stem))
    linecache.checkcache()
    with pytest.raises(ConfigError, match="step good was"):
        run(count, after)
    module.write_text("def positive(df):\n    return df.where('v > 0')  # the same\n")
    importlib.reload(importlib.import_module(module.stem))
    linecache.checkcache()
    laid_out = "SELECT id,  count(*) AS n /* as before */ FROM good group by id"
    rows = run(laid_out, "SELECT id, n, n * 2 AS twice FROM sums", "id INT, v INT, more STRING")
    assert rows[1:] == [{"id": 1, "n": 12, "twice": 24}]  # six runs, two records each
    assert "its steps changed" in caplog.text
    kept = sorted(path.name for path in (tmp_path / "checkpoint/steps").glob("*.json"))
    assert kept == ["0.json", "1.json"]
    assert json.loads((tmp_path / "checkpoint/steps/0.json").read_text())["state"] == [
        "good",
        "orders",
        "sums",
    ]


JSONS: list[tuple[bytes | None, Any]] = [
    (b' {"id": 1, "d": 1.5, "p": 1.50} ', (1, 1.5, Decimal("1.50"))),
    (b'{"id": 2, "p": 1e2, "more": [1]}', (2, None, Decimal("100.00"))),
    (b'{"id": 3, "w": 1.0000000000000000010}', (3, None, None)),
    (b'{"id":1}{"id":2}', "something follows the JSON value"),
    (b'{"id":1} trailing garbage', "something follows the JSON value"),
    (b'{"id":1},{"id":2}', "something follows the JSON value"),
    (b'{"id":1}] x', "something follows the JSON value"),
    (b"{'id':1}", "the payload is not JSON"),
    (b'{"id":1,"d":NaN}', "the payload is not JSON"),
    (b'{"id":1', "the payload is not JSON"),
    (b'{"id":1,"id":2}', "the JSON has a key twice, or half of a surrogate pair in a string"),
    (
        b'{"id":1,"s":"\\ud800"}',
        "the JSON has a key twice, or half of a surrogate pair in a string",
    ),
    (b'[{"id":1},{"id":2}]', "the payload is not a JSON object"),
    (b"null", "the payload is not a JSON object"),
    (b'{"id":1,"d":1e999}', "field d: a number is too large for double"),
    (
        b'{"id":1,"many":[{"d":1e999}]}',
        "field many: a number is too large for array<struct<d:double>>",
    ),
    (b'{"id":1,"p":1.005}', "field p: a number has more digits than decimal(10,2)"),
    (
        b'{"id":1,"w":1.0000000000000000009}',
        "field w: a number has more digits than decimal(38,18)",
    ),
    (
        b'{"id":1,"m":{"k":0.125}}',
        "field m: a number has more digits than map<string,decimal(5,2)>",
    ),
    (b'{"id":1.5}', "field id: not bigint: 1.5"),
    (b'{"id":99999999999999999999}', "field id: not bigint: 99999999999999999999"),
    (b'{"id":"7"}', "field id: not bigint: 7"),
    (b'{"id":1,"day":"2026-01-05 garbage"}', "field day: not date: 2026-01-05 garbage"),
    (b'{"s":"\xff"}', "the payload is not valid UTF-8"),
    (b"", "the payload is empty"),
    (None, "the payload is empty"),
]


@pytest.mark.spark
def test_only_one_whole_json_object_whose_values_fit_is_a_record(spark) -> None:
    from penstock.pipeline.json_schema import dead_letters, typed

    rows = [("t", i, None, payload) for i, (payload, _) in enumerate(JSONS)]
    frame = spark.createDataFrame(
        rows, "topic STRING, offset BIGINT, timestamp TIMESTAMP, payload BINARY"
    )
    schema = "id BIGINT, d DOUBLE, p DECIMAL(10,2), w DECIMAL(38,18), s STRING, day DATE, "
    schema += "many ARRAY<STRUCT<d: DOUBLE>>, m MAP<STRING, DECIMAL(5,2)>"
    result = typed(frame, schema)
    assert result.columns[:2] == ["id", "d"]
    assert result.schema["p"].dataType.simpleString() == "decimal(10,2)"
    for row, (payload, expected) in zip(result.orderBy("_offset").collect(), JSONS, strict=True):
        if isinstance(expected, str):
            assert (row["_reason"], row["id"], row["s"]) == (expected, None, None), payload
            assert row["_corrupt"] is not None
        else:
            assert (row["id"], row["d"], row["p"]) == expected, payload
            assert (row["_corrupt"], row["_reason"]) == (None, None), payload
    letters = [json.loads(row[0]) for row in dead_letters(result, "orders").collect()]
    assert len(letters) == sum(isinstance(expected, str) for _, expected in JSONS)
    assert letters[0] == {
        "reason": "something follows the JSON value",
        "source": "orders",
        "topic": "t",
        "offset": 3,
        "payload": '{"id":1}{"id":2}',
    }


def test_a_jobs_arguments_are_looked_at_before_a_jvm_starts(tmp_path, monkeypatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a session was made")

    monkeypatch.setattr(sys.modules["penstock.pipeline.session"], "build", refuse)
    run = CliRunner().invoke
    for given, text in (
        (["archive", str(tmp_path)], "give --topic or --queue"),
        (["replay", "t", "--id", "x"], "goes to a topic or to a queue"),
        (["compact", "--topic", "t", "--to", str(tmp_path)], "compact takes a key"),
        (["compact", "--topic", "t", "--key", "$.id"], "to a topic, to a directory"),
        (["recover", str(tmp_path / "nowhere")], "nowhere"),
    ):
        output = run(app, ["pipeline", "run", *given])
        assert text in " ".join(output.output.split()), (given, output.output, output.exception)
        assert output.exit_code == 1


def test_a_full_disk_is_one_sentence() -> None:
    text = (
        "An error occurred\n: SparkException: [TASK_WRITE_FAILED] Task failed while writing "
        "rows to file:/data/x. SQL\n"
    )
    text += "\tat x.y(z.scala)\nCaused by: java.io.IOException: No space left on device\n"
    text += "\tat java.base/x"
    assert (
        cause(RuntimeError(text))
        == "the disk is full: no space is left for /data/x. Free some and run it again"
    )
    assert cause(
        RuntimeError("x\nCaused by: java.io.IOException: No space left on device")
    ).startswith(
        "the disk is full: no space is left for the checkpoint, the target or Spark's own files"
    )


@pytest.mark.spark
def test_steps_are_compared_by_what_they_say(spark) -> None:
    def made(sql: str, state: list[str], schema: str = "id INT", **more: Any) -> dict[str, Any]:
        return {
            "steps": {"sums": {"sql": sql}, **more},
            "sources": {"orders": {"schema": schema}},
            "state": state,
            "outputs": ["main"],
        }

    count, state = "SELECT id, count(*) AS n FROM orders GROUP BY id", ["orders", "sums"]
    assert (
        changes(
            made(count, state),
            made(count.replace(" FROM", "\n-- the same\nfrom"), state, "id INT, x INT"),
        )
        == []
    )
    plain = "SELECT id FROM orders"
    assert changes(made(count, state), made(plain, [])) == [
        f"step sums was {count!r} and is {plain!r}"
    ]
    assert changes(made(count, state), made(count, state, "id STRING")) == [
        "column id of source orders was INT and is STRING"
    ]
    after = {"sql": "SELECT DISTINCT n FROM sums"}
    assert changes(made(count, state), made(count, [*state, "u"], u=after)) == ["u is new"]
    assert changes(made(plain, []), made(plain, state)) == [
        "state depended on nothing and would depend on orders, sums"
    ]
