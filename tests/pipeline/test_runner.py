"""How a pipeline runs: every query counts, and it is seen from its start to its end."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from copy import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import yaml

from penstock.cli import app
from penstock.cli import pipeline as pipeline_commands
from penstock.errors import ConfigError
from penstock.net.topic_link import TopicLink
from penstock.pipeline import runner as runner_module
from penstock.pipeline.failure import PipelineFailed
from penstock.pipeline.pipeline_file import parse
from penstock.pipeline.query_builder import build
from penstock.pipeline.report import RunReport
from penstock.pipeline.runner import Runner
from penstock.protocol import frames
from tests.pipeline.conftest import ServedTopics
from tests.support import guard
from tests.support.cli import CliRunner
from tests.support.wait import until

ROOT = Path(__file__).parents[2]


def produce(tcp: str, topic: str, *payloads: bytes) -> None:
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch(topic, list(payloads)))


def two_sinks(server: Any, tcp: str, directory: Path, trigger: str, second: str) -> Any:
    tag = uuid.uuid4().hex[:8]
    produce(tcp, f"in-{tag}", *[b'{"id": %d}' % i for i in range(20)], b"oops")
    dead = f"dead-{tag}"
    return parse(f"""
name: two-{tag}
sources:
  orders:
    topic: in-{tag}
    format: json
    schema: "id BIGINT"
    deadLetter: {{topic: {dead}}}
steps:
  - {{name: good, sql: SELECT id FROM orders}}
  - {{name: bad, sql: "SELECT IF(id = 7, raise_error('seven'), id) AS id FROM orders"}}
sinks:
  first: {{topic: first-{tag}, from: good}}
  second: {{{second.format(tag=tag)}}}
trigger: {trigger}
checkpoint: {directory}/checkpoint
broker: {tcp}
url: {server.url}
""")


@pytest.mark.spark
def test_a_query_that_fails_ends_the_pipeline_with_its_name(spark, server, tcp, tmp_path) -> None:
    second = "topic: second-{tag}, from: bad"
    file = two_sinks(server, tcp, tmp_path, "100 milliseconds", second)
    reports: list[RunReport] = []
    runner = Runner(file, "local[2]", [lambda report: reports.append(copy(report))])
    watchdog = threading.Timer(200, runner.stop)
    watchdog.start()
    try:
        with pytest.raises(PipelineFailed, match=r"^sink second: .*seven.* \(batch 0: topic in-"):
            runner.run(spark)
    finally:
        watchdog.cancel()
    assert reports[-1].state == "failed"
    assert str(reports[-1].error).startswith("sink second: ")
    assert not [query for query in spark.streams.active if query.name.startswith(file.name)]


@pytest.mark.spark
def test_dead_letters_that_cannot_be_written_end_the_command_with_their_name(
    spark, server, tcp, tmp_path, monkeypatch
) -> None:
    """The command's exit code, its output and the broker say which query failed."""
    monkeypatch.setattr(pipeline_commands, "stop_by_signal", lambda *_: None)
    file = two_sinks(server, tcp, tmp_path, "availableNow", "topic: second-{tag}, from: good")
    Runner(file, "local[2]").run(spark)
    # the dead letters' query begins again under its old identity, over more records
    for directory in ("offsets", "commits"):
        shutil.rmtree(tmp_path / "checkpoint" / "dead-orders" / directory)
    produce(tcp, str(file.views["orders"].topic), b"oops again")
    file.trigger = "100 milliseconds"
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(msgspec.to_builtins(file)))
    watchdog = threading.Timer(200, stop_pipeline, (server.url, file.name))
    watchdog.start()
    try:
        ran = CliRunner().invoke(app, ["pipeline", "run", str(path), "--master", "local[2]"])
    finally:
        watchdog.cancel()
    assert ran.exit_code == 1
    assert "dead letters of orders: batch 0 of" in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.output
    states = [json.loads(line)["state"] for line in ran.stdout.splitlines()]
    assert (states[0], states[-1]) == ("starting", "failed")
    listed = CliRunner().invoke(app, ["pipeline", "list", file.name, "--json", "--url", server.url])
    report = json.loads(listed.stdout)
    assert report["state"] == "failed"
    assert report["error"].startswith("dead letters of orders: batch 0 of")
    assert not [query for query in spark.streams.active if query.name.startswith(file.name)]


@pytest.mark.spark
@pytest.mark.parametrize("trigger", ["availableNow", "batch"])
def test_options_of_a_sink_that_shares_its_step_are_checked_before_the_first_batch(
    spark, server, tcp, tmp_path, trigger: str
) -> None:
    second = "postgres: orders, options: {{databas: x}}, from: good"
    file = two_sinks(server, tcp, tmp_path, trigger, second)
    with pytest.raises(ConfigError, match="a postgres sink has no option 'databas'"):
        build(spark, file)


@pytest.mark.spark
def test_a_sink_of_a_batch_that_fails_is_named(spark, server, tcp, tmp_path) -> None:
    file = two_sinks(server, tcp, tmp_path, "batch", "topic: second-{tag}, from: good")
    file.sinks["first"].view = "bad"
    with pytest.raises(PipelineFailed, match=r"^sink first: .*seven"):
        Runner(file, "local[2]").run(spark)


def stop_pipeline(url: str, name: str) -> None:
    CliRunner().invoke(app, ["pipeline", "stop", name, "--url", url])


@pytest.mark.spark
def test_a_query_that_ends_first_does_not_make_the_pipeline_report_without_a_pause(
    spark, server, tcp, tmp_path, monkeypatch
) -> None:
    module = ModuleType("slow_sink")
    ended = threading.Event()

    def hold(batch: Any, _number: int) -> None:
        name = next(query.name for query in spark.streams.active if ":second" in query.name)
        first = name.replace(":second", ":first")
        until(lambda: first not in [query.name for query in spark.streams.active], 120)
        counted.append(len(reports))
        ended.wait(2.0)
        counted.append(len(reports))
        batch.count()

    counted: list[int] = []
    module.hold = hold  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slow_sink", module)
    second = "foreachBatch: slow_sink:hold, from: orders"
    reports: list[RunReport] = []
    file = two_sinks(server, tcp, tmp_path, "availableNow", second)
    Runner(file, "local[2]", [reports.append]).run(spark)
    before, after = counted[:2]
    assert after - before < 2.0 / runner_module.POLL_SECONDS + 10


def test_a_pipeline_reports_while_its_jvm_starts(server, tcp, tmp_path, monkeypatch) -> None:
    """Or the broker would show it as lost."""
    monkeypatch.setattr(runner_module, "HEARTBEAT_SECONDS", 0.02)
    file = two_sinks(server, tcp, tmp_path, "availableNow", "topic: t")
    reports: list[str] = []

    def slow(*_: Any) -> Any:
        until(lambda: len(reports) > 5, 60, "reports")
        raise RuntimeError("no JVM today")

    monkeypatch.setattr(runner_module, "build_session", slow)
    with pytest.raises(PipelineFailed, match="no JVM today"):
        Runner(file, "local[2]", [lambda report: reports.append(report.state)]).run()
    assert reports[:6] == ["starting"] * 6


@pytest.mark.spark
@pytest.mark.parametrize("trigger", ["batch", "availableNow"])
def test_a_pipeline_that_is_stopped_while_its_jvm_starts_begins_nothing(
    spark, server, tcp, tmp_path, monkeypatch, trigger: str
) -> None:
    file = two_sinks(server, tcp, tmp_path, trigger, "topic: second-{tag}, from: good")
    runner = Runner(file, "local[2]")

    def signalled(*_: Any) -> Any:
        runner.stop()
        return spark

    monkeypatch.setattr(runner_module, "build_session", signalled)
    report = runner.run()
    assert (report.state, report.rows, report.error) == ("finished", 0, None)
    with TopicLink(tcp, 20) as link:
        assert file.sinks["first"].topic not in link.names()


WATCH = """
import sys
from penstock.cli.pipeline import ShowReports, stop_by_signal
from penstock.pipeline.jobs import archive_watch
from penstock.pipeline.jobs.archive import Origin
from penstock.pipeline.jobs.archive_watch import ArchiveWatch
from tests.pipeline.archiver import LocalArchiver

archive_watch.HEARTBEAT_SECONDS = 0.1
root, broker = sys.argv[1:]
archiver = LocalArchiver(root, Origin(topic="orders", broker=broker))
watch = ArchiveWatch(archiver, 1.0, [ShowReports()])
stop_by_signal(watch.stop, "run")
print("ended", watch.run(None).state)
"""


def test_a_watched_archive_ends_on_sigterm_while_its_broker_is_gone(tmp_path: Path) -> None:
    with ServedTopics(tmp_path / "broker") as broker:
        broker.append("orders", [b"x"] * 10)
        command = [sys.executable, "-c", WATCH, str(tmp_path / "lake"), broker.address]
        with (tmp_path / "log").open("w") as log:
            run = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        guard.watch(run.pid)
        said = (tmp_path / "log").read_text

        def reports() -> list[dict[str, Any]]:
            return [json.loads(line) for line in said().splitlines() if line.startswith("{")]

        until(lambda: any(report["rows"] == 10 for report in reports()), 60, "a run")
    until(lambda: reports()[-1]["state"] == "running", 60, "a run that waits for the broker")
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == 0, said()
    assert "ended finished" in said()


@pytest.mark.spark
@pytest.mark.parametrize(
    ("total", "warned"),
    [
        ("sum(amount)", "sum(orders.amount)"),
        ("avg(amount) + 1", "avg(orders.amount)"),
        ("round(sum(amount), 2)", ""),
        ("sum(CAST(amount AS DECIMAL(18, 2)))", ""),
        ("max(amount)", ""),
    ],
)
def test_validation_warns_of_sums_of_floats_that_are_written_exactly_once(
    spark, total: str, warned: str, caplog
) -> None:
    file = parse(f"""
name: sums
sources:
  orders: {{topic: orders, format: json, schema: "k STRING, amount DOUBLE"}}
steps:
  - {{name: sums, sql: "SELECT k, {total} AS total FROM orders GROUP BY k"}}
sink: {{topic: sums, mode: update, orderBy: [k]}}
trigger: availableNow
checkpoint: ./checkpoints/sums
broker: 127.0.0.1:1
url: http://127.0.0.1:1
""")
    build(spark, file)
    texts = [record.getMessage() for record in caplog.records if "DECIMAL" in record.getMessage()]
    assert len(texts) == bool(warned)
    assert not warned or texts[0].startswith(warned)
