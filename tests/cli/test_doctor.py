"""`penstock doctor` against a broker that is set up badly in every way, and against a good one."""

import json
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import httpx
import pytest

from penstock.cli import app, doctor
from penstock.database import embedded
from tests.cli.conftest import Shell
from tests.conftest import fresh_database, running_postgres
from tests.support.broker import BrokerProcess
from tests.support.cli import CliRunner

pytestmark = pytest.mark.xdist_group("cli")


def diagnosis(broker: BrokerProcess, *words: str, code: int = 1) -> dict[str, str]:
    """What was found, with the command that fixes it."""
    env = {"PENSTOCK_DATA_DIRECTORY": str(broker.data_dir), "PENSTOCK_URL": broker.url}
    if broker.database_url:
        env["DATABASE_URL"] = broker.database_url
    shell = Shell(broker)
    shell.env |= env
    report: dict[str, Any] = json.loads(shell.run("doctor", "--json", *words, code=code).stdout)
    assert report["skipped"] == []
    return {one["what"]: one["fix"] for one in report["findings"]}


def fix_of(found: dict[str, str], *words: str) -> str:
    (command,) = [fix for what, fix in found.items() if all(word in what for word in words)]
    return command


@pytest.fixture(scope="module")
def ill(tmp_path_factory) -> Iterator[BrokerProcess]:
    settings: dict[str, Any] = {
        "http_server__host": "0.0.0.0",
        "http_server__max_connections": 50_000_000,
        "topics__fsync": "never",
        "exporter__queue__fsync": "interval",
        "buffer__max_bytes": "1Mi",
        "database__browse_pool_size": 5000,
    }
    careless = dict.fromkeys(("fsync", "synchronous_commit", "full_page_writes"), "off")
    with mock.patch.dict(embedded.SETTINGS, careless | {"autovacuum": "off"}):
        server = running_postgres()
        postgres = server.__enter__()
    try:
        url = fresh_database(postgres)
        directory = tmp_path_factory.mktemp("ill")
        with BrokerProcess(directory, database_url=url, **settings) as broker:
            broker.database_url = url
            with httpx.Client(base_url=broker.url) as http:
                http.post("/topics/t").raise_for_status()
                items = {"items": [{"queue": "orders", "payload": 1}]}
                http.post("/api/v1/push", json=items).raise_for_status()
                worker = {"id": "w", "name": "w", "queue": "orders", "group": "g", "inFlight": 0}
                worker |= {"concurrency": 8, "handled": 0, "failed": 0}
                http.post("/api/v1/consumers", json={"consumers": [worker]}).raise_for_status()
            yield broker
    finally:
        server.__exit__(None, None, None)


def test_everything_that_will_hurt_is_found_with_what_fixes_it(ill):
    found = diagnosis(ill)
    assert "auth.enabled=true" in fix_of(found, "is admin: no tokens", "http_server (0.0.0.0)")
    for name in ("fsync", "synchronous_commit", "full_page_writes", "autovacuum"):
        assert f"ALTER SYSTEM SET {name} = on" in fix_of(found, f"PostgreSQL has {name} off")
    assert fix_of(found, "topics.fsync is never") == "penstock serve --set topics.fsync=group"
    assert "exporter.queue.fsync=always" in fix_of(found, "exporter.queue.fsync is interval")
    assert "max_connections = " in fix_of(found, "connections", "PostgreSQL allows")
    assert fix_of(found, "queue orders keeps completed messages forever").startswith(
        "penstock queue configure orders retentionEnabled=true"
    )
    assert "topics.retention_age" in fix_of(found, "topics keep their records forever")
    assert "buffer.max_bytes=" in fix_of(found, "room for 1.0 MiB; 4 h without PostgreSQL")
    assert fix_of(found, "8 consumers of orders@g share one partition") == (
        "penstock queue configure orders ordering=none"
    )
    assert "LimitNOFILE=" in fix_of(found, "files, and http_server.max_connections is 50000000")
    assert fix_of(found, "no backup has been made") == "penstock backup PLACE"
    assert len(found) == 14


def test_clocks_and_versions_that_differ_are_found(ill, monkeypatch):
    now = time.time
    monkeypatch.setattr(doctor.time, "time", lambda: now() + 300)
    monkeypatch.setattr(doctor, "__version__", "0.1.9")
    found = diagnosis(ill)
    assert "set-ntp" in fix_of(found, "clocks", "this machine differ by 5 min")
    assert "set-ntp" in fix_of(found, "clocks", "PostgreSQL differ by 5 min")
    assert "pip install" in fix_of(found, "the brokers have", "0.1.9")


def test_the_commands_fix_what_was_found(broker, tmp_path):
    shell = Shell(broker)
    shell.env |= {
        "PENSTOCK_DATA_DIRECTORY": str(broker.data_dir),
        "DATABASE_URL": broker.database_url,
    }
    shell.run("backup", str(tmp_path / "copy"))
    report = json.loads(shell.run("doctor", "--json", "--fail-on", "error").stdout)
    found = {one["what"]: one["fix"] for one in report["findings"]}
    assert "no backup has been made" not in found
    for what, fix in found.items():
        if fix.startswith("penstock queue configure"):
            shell.run(*fix.split()[1:])
        else:  # tests share this broker: its topics are theirs
            assert "topics keep their records" in what
    report = json.loads(shell.run("doctor", "--json", "--fail-on", "error").stdout)
    assert [one for one in report["findings"] if "queue" in one["fix"]] == []


def test_a_broker_on_another_machine_is_checked_as_far_as_its_api_shows_it(broker, monkeypatch):
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "elsewhere")
    done = Shell(broker).run("doctor", "--json", "--fail-on", "error")
    assert "PostgreSQL and backups: the broker is on" in json.loads(done.stdout)["skipped"][0]


def test_without_a_broker_it_says_so():
    done = CliRunner().invoke(app, ["doctor", "--url", "http://127.0.0.1:1"])
    assert (done.exit_code, "no broker answers" in done.stderr) == (1, True)
