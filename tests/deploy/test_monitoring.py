"""Dashboards and alerts: they name what a broker exposes, and alerts fire when they should."""

import importlib.machinery
import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import fresh_database
from tests.deploy.image import ROOT
from tests.deploy.test_files import tool
from tests.support.broker import BrokerProcess
from tests.support.certificates import certificate
from tests.support.wait import until

RULES = sorted((ROOT / "deploy/prometheus").glob("*.yml"))
BOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
PARTS = {"queues", "topics", "buffer", "export", "pipelines", "database"}
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
UNSEEN = {
    "penstock_kafka_rebalances_total": {"group"},
    "penstock_kafka_group_members": {"group"},
    "penstock_kafka_requests_total": {"api"},
    "penstock_kafka_requests_refused_total": {
        "reason"
    },  # labels of what a healthy broker has no value of
    "penstock_queue_removed_total": {"reason"},
    "penstock_topic_append_failures_total": {"error"},
}
METRIC = re.compile(r"\b((?:penstock|process)_\w+)(?:\{([^}]*)\})?")


@cache
def rules() -> list[dict[str, Any]]:
    result = [yaml.safe_load(path.read_text()) for path in RULES]
    return [rule for one in result for group in one["groups"] for rule in group["rules"]]


def shown() -> Iterator[tuple[str, str, str]]:
    """(where, expression, text with the labels of its result) of everything."""
    for rule in rules():
        texts = " ".join(re.findall(r"\$labels\.\w+", json.dumps(rule["annotations"])))
        yield rule["alert"], rule["expr"], texts.replace("$labels.", "")
    for path in BOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                labels = " ".join(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                yield f"{path.name}: {panel['title']}", target["expr"], labels


@pytest.fixture(scope="module")
def exposed(postgres, tmp_path_factory) -> dict[str, set[str]]:
    """Sample -> its labels, of a broker in which something of everything has happened."""
    directory = tmp_path_factory.mktemp("monitoring")
    cert, key = certificate(directory)
    with (
        BrokerProcess(
            directory / "data",
            database_url=fresh_database(postgres),
            http_server__ssl_cert_path=cert,
            http_server__ssl_key_path=key,
            topics__tier=f"file://{directory}/tier",
        ) as broker,
        httpx.Client(base_url=broker.url, timeout=30, verify=False) as client,
    ):

        def ask(method: str, path: str, body: Any = None) -> Any:
            answer = client.request(method, path, json=body)
            assert answer.status_code < 300, answer.text
            return answer.json() if answer.content else None

        ask("POST", "/api/v1/push", {"items": [{"queue": "q", "payload": 1}]})
        ask("POST", "/api/v1/push", {"items": [{"queue": "q", "payload": 1}], "bufferMs": 10})
        ask("GET", "/api/v1/pop/queue/q?consumerGroup=g&autoAck=true")
        consumer = {"id": "c", "name": "c", "queue": "q", "group": "g", "inFlightSeconds": 5}
        ask("POST", "/api/v1/consumers", {"consumers": [consumer]})
        ask("POST", "/topics/t/produce", {"payload": "x"})
        ask("POST", "/topics/pooled?placement=shared")
        ask("POST", "/topics/pooled/produce", {"payload": "x"})
        ask("POST", "/topics/t/groups/g/commit", {"offset": 0})
        route = {"type": "http", "url": "http://127.0.0.1:1/in"}
        ask("POST", "/api/v1/routes", {"name": "r", "destination": route})
        ask("POST", "/api/v1/routes/r/push", {"records": [1]})
        report = {"state": "running", "lag": 1, "rows_per_second": 1.0, "batch_ms": 5}
        ask("PUT", "/api/v1/pipelines/p", report)

        def samples() -> dict[str, set[str]]:
            collected: dict[str, set[str]] = {}
            for family in text_string_to_metric_families(client.get("/metrics").text):
                total = f"{family.name}_total" if family.type == "counter" else family.name
                collected.setdefault(total, UNSEEN.get(total, set()))
                for sample in family.samples:
                    collected[sample.name] = set(sample.labels)
            return collected

        def complete() -> dict[str, set[str]] | None:
            collected = samples()
            needed = ("penstock_export_queue_retry_failure_total", "penstock_buffer_flushed_total")
            return collected if all(collected.get(name) for name in needed) else None

        return until(complete, 60)


def test_every_name_and_label_is_one_that_a_broker_has(exposed):
    for where, expression, labels in shown():
        metrics = METRIC.findall(expression)
        assert metrics or "up{" in expression, where
        for name, matchers in metrics:
            assert name in exposed, f"{where}: there is no {name}"
            asked = set(re.findall(r"(\w+)\s*[!=]~?", matchers))
            assert asked <= exposed[name] | SCRAPED, f"{where}: {name} has no {asked}"
        known = SCRAPED.union(*(exposed[name] for name, _ in metrics))
        grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
        words = {word.strip() for group in grouped for word in group.split(",")}
        assert words <= known, f"{where}: no labels {words - known}"
        named = set(labels.split())
        assert named <= (words or known), f"{where}: the result has no labels {named}"


def test_variables_of_dashboards_have_values(exposed):
    for path in BOARDS:
        board = json.loads(path.read_text())
        assert board["uid"] == f"penstock-{path.stem}"
        assert board["schemaVersion"] >= 36
        source, *variables = board["templating"]["list"]
        assert (source["type"], source["query"]) == ("datasource", "prometheus")
        for variable in variables:
            metric, label = re.fullmatch(
                r"label_values\((\w+), (\w+)\)", variable["query"]
            ).groups()
            assert label in exposed[metric], variable["query"]
        used = set(re.findall(r"\$(\w+)", " ".join(map(str, _expressions(board)))))
        assert used <= {variable["name"] for variable in variables}
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
        places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]}
        assert len(places) == len(ids), "no panel lies on another"
        assert all(p["datasource"]["uid"] == "${datasource}" for p in board["panels"])


def _expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_there_is_a_dashboard_and_rules_for_every_part_and_what_to_do():
    assert {path.stem for path in BOARDS} == PARTS | {"overview"}
    assert {path.stem for path in RULES} == PARTS | {"broker"}
    page = (ROOT / "docs/how-to/alerts.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^#|\Z)", page, re.M | re.S))
    assert sorted(sections) == sorted(rule["alert"] for rule in rules())
    for rule in rules():
        about, text = rule["annotations"], sections[rule["alert"]]
        look, do, worked = re.findall(r"^- \*\*(?:Look|Do|It worked when)\*\*: (.*)$", text, re.M)
        assert about["description"] == f"{look} {do}"
        assert worked
        assert about["runbook"] == f"docs/how-to/alerts.md#{rule['alert'].lower()}"
        assert f"Fires on `{rule['expr']}`" in text
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_every_command_of_a_runbook_is_one():
    reference = (ROOT / "docs/reference/cli.md").read_text()
    commands = dict(re.findall(r"^#+ (penstock [a-z -]+)\n(.*?)(?=^#|\Z)", reference, re.M | re.S))
    page = (ROOT / "docs/how-to/alerts.md").read_text()
    for line in set(re.findall(r"\b(penstock [a-z][^`)]+)[`)]", page)):
        names = [name for name in commands if f"{line} ".startswith(f"{name} ")]
        assert names, line
        command = max(names, key=len)
        assert not any(name.startswith(f"{command} ") for name in commands), line
        for option in re.findall(r"--\w+", line):
            assert option in commands[command], line


@cache
def _of(name: str) -> list[dict[str, Any]]:
    path = ROOT / "deploy/prometheus" / f"{name}.yml"
    return [r for g in yaml.safe_load(path.read_text())["groups"] for r in g["rules"]]


def test_the_files_are_those_that_the_description_makes():
    script = str(ROOT / "tools/dashboards")
    loader = importlib.machinery.SourceFileLoader("dashboards", script)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("dashboards", loader))
    loader.exec_module(module)
    made = {f"{name}.json": module.dashboard(name, one) for name, one in module.BOARDS.items()}
    assert made == {path.name: path.read_text() for path in BOARDS}, "run tools/dashboards"


GROUP = '{queue="q",group="g"}'
TOPIC = '{topic="t",group="g"}'
ROUTE = '{route="r"}'
# alert -> series that make it fire within two hours, as promtool writes them; 0x120: 0 all the time
FIRES = {
    "PenstockDown": {'up{job="penstock",instance="a"}': "0x120"},
    "PenstockRestarting": {"penstock_uptime_seconds": "9 1 " * 59 + "9 1"},
    "PenstockFilesUsedUp": {
        'process_open_fds{job="penstock"}': "95x120",
        'process_max_fds{job="penstock"}': "100x120",
    },
    "PenstockServerErrors": {'penstock_http_requests_total{status="500"}': "0+600x120"},
    "PenstockCertificateExpires": {"penstock_tls_certificate_expires_seconds": "90000x120"},
    "QueueMessagesWait": {f"penstock_queue_group_lag_seconds{GROUP}": "1000x120"},
    "QueueLagGrows": {f"penstock_queue_group_waiting{GROUP}": "20000+100x120"},
    "QueueWithoutConsumers": {
        f"penstock_queue_group_waiting{GROUP}": "1x120",
        f"penstock_queue_group_members{GROUP}": "0x120",
    },
    "QueueDeadLetters": {'penstock_queue_dead_letters{queue="q"}': "0x110 5x10"},
    "QueueHandlerHangs": {f"penstock_consumer_in_flight_seconds{GROUP}": "1000x120"},
    "QueueKeepsEverything": {
        'penstock_queue_stored{queue="q"}': "2000000+1000x120",
        'penstock_queue_waiting{queue="q"}': "5x120",
    },
    "QueueDropsMessages": {f"penstock_queue_group_dropped_total{GROUP}": "0x115 1x5"},
    "TopicDiskFull": {"penstock_topic_disk_full": "1x120"},
    "TopicGroupBehind": {f"penstock_topic_group_lag_seconds{TOPIC}": "1000x120"},
    "TopicDamaged": {"penstock_topic_segments_broken_total": "0x110 1x10"},
    "TopicAppendsFail": {'penstock_topic_append_failures_total{error="EIO"}': "0+1x120"},
    "TopicTierFenced": {"penstock_topic_tier_fenced": "1x120"},
    "TopicTierFailing": {"penstock_topic_tier_failing": "1x120"},
    "TopicGroupRebalances": {'penstock_kafka_rebalances_total{group="g"}': "0+2x120"},
    "TopicKafkaRefused": {
        'penstock_kafka_requests_refused_total{reason="authentication"}': "0+60x120"
    },
    "TopicTierBehind": {"penstock_topic_tier_lag_seconds": "4000x120"},
    "TopicSharedMoverBehind": {"penstock_shared_mover_lag_seconds": "4000x120"},
    "TopicSharedAppendsSlow": {
        'penstock_shared_flush_seconds_bucket{le="0.5"}': "0x120",
        'penstock_shared_flush_seconds_bucket{le="2.5"}': "0+10x120",
        'penstock_shared_flush_seconds_bucket{le="+Inf"}': "0+10x120",
    },
    "TopicSharedObjectsRemain": {"penstock_shared_removal_objects": "20000x120"},
    "TopicScrubOverdue": {"penstock_topic_scrub_finished_seconds": "-3000000x120"},
    "BufferFillsUp": {
        'penstock_buffer_pending{kind="failover"}': "9x120",
        "penstock_database_up": "1x120",
    },
    "BufferOld": {'penstock_buffer_oldest_age_seconds{kind="failover"}': "4000x120"},
    "BufferEventsFailed": {"penstock_buffer_failed": "1x120"},
    "BufferRejectsPushes": {"penstock_buffer_rejected_total": "0x118 1x2"},
    "BufferMaintenanceForgotten": {'penstock_buffer_maintenance{mode="push"}': "1x120"},
    "DatabaseDown": {"penstock_database_up": "0x120"},
    "DatabaseSlow": {"penstock_database_answer_seconds": "2x120"},
    "DatabaseOldTransaction": {"penstock_database_oldest_transaction_seconds": "700x120"},
    "DatabaseConnectionsNearlyUsedUp": {
        "penstock_database_connections": "95x120",
        "penstock_database_max_connections": "100x120",
    },
    "DatabaseDeadRows": {"penstock_database_dead_rows": "6000000x120"},
    "DatabaseWarnings": {"penstock_database_warnings": "1x120"},
    "ExportDroppingRecords": {
        'penstock_export_queue_dropped_records_total{route="r",reason="newest"}': "0x118 1x2"
    },
    "ExportQueueFillsUp": {f"penstock_export_queue_time_to_full_seconds{ROUTE}": "60x120"},
    "ExportQueueNearlyFull": {f"penstock_export_queue_utilization_ratio{ROUTE}": "0.9x120"},
    "ExportDestinationDown": {
        'penstock_export_circuit_breaker_state{route="r",state="open"}': "1x120"
    },
    "ExportRoutePaused": {f"penstock_export_route_paused{ROUTE}": "1x120"},
    "ExportTooOld": {f"penstock_export_queue_oldest_age_seconds{ROUTE}": "1000x120"},
    "ExportDeadLetters": {f"penstock_export_queue_dead_lettered_records_total{ROUTE}": "0x118 1x2"},
    "ExportStorageFailing": {f"penstock_export_storage_failing{ROUTE}": "1x120"},
    "ExportDamage": {f"penstock_export_fastqueue_quarantined_total{ROUTE}": "0x118 1x2"},
    "PipelineFailed": {'penstock_pipeline_state{pipeline="p",state="failed"}': "1x120"},
    "PipelineLost": {'penstock_pipeline_state{pipeline="p",state="lost"}': "1x120"},
    "PipelineFallsBehind": {'penstock_pipeline_lag{pipeline="p"}': "200000+60x120"},
}
QUIET = {  # where 0 all the time is not how it looks when all is well
    "up": "1x120",
    "penstock_database_up": "1x120",
    "penstock_database_max_connections": "100x120",
    "penstock_queue_group_members": "1x120",
    "penstock_export_queue_time_to_full_seconds": "-1x120",
    "penstock_uptime_seconds": "0+60x120",
    "penstock_tls_certificate_expires_seconds": "9000000x120",
}


def test_each_alert_has_series_that_make_it_fire():
    assert FIRES.keys() == {rule["alert"] for rule in rules()}


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_promtool_accepts_the_rules_and_each_alert_fires_when_it_should(path, tmp_path: Path):
    promtool = tool("promtool")
    tests = []
    for alert in (rule["alert"] for rule in _of(path.stem)):
        well = {name: QUIET.get(name.partition("{")[0], "0x120") for name in FIRES[alert]}
        for series, expected in ((FIRES[alert], [{"value": 1, "labels": "{}"}]), (well, [])):
            firing = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
            values = [{"series": name, "values": text} for name, text in series.items()]
            test = {"expr": firing, "eval_time": "2h", "exp_samples": expected}
            tests.append({"interval": "1m", "input_series": values, "promql_expr_test": [test]})
    file = tmp_path / "rules_test.yml"
    made = {"rule_files": [str(path)], "evaluation_interval": "5m", "tests": tests}
    file.write_text(yaml.safe_dump(made))
    for words in (["check", "rules", str(path)], ["test", "rules", str(file)]):
        done = subprocess.run(
            [promtool, *words], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_parses_every_expression_of_the_dashboards(tmp_path: Path):
    variables = {"__rate_interval": "5m", "__interval": "1m", "__range": "1h"}
    rules = []
    for path in BOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                expression = re.sub(
                    r"\$\{?(\w+)\}?", lambda name: variables.get(name[1], ".*"), target["expr"]
                )
                rules.append({"record": f"shown:{len(rules)}", "expr": expression})
    assert len(rules) > 50
    file = tmp_path / "dashboards.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": rules}]}))
    done = subprocess.run(
        [tool("promtool"), "check", "rules", file], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
