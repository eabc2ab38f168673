"""A broker on a disk that is really full: everybody who should hears of it, and it ends when there
is room.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.conftest import fresh_database
from tests.support.broker import ServeProcess
from tests.support.disk import small_disk
from tests.support.wait import until


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "8m") as path:
        yield path


def test_a_disk_without_space_for_the_database_is_said_first(scratch: Path) -> None:
    with small_disk(scratch / "disk", "8m") as small:
        words = ["serve", "--data-dir", str(small / "data"), "--http-port", "0", "--no-topics"]
        command = [sys.executable, "-m", "penstock", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 4, done.stderr
    sentence, _, log = done.stderr.partition("PostgreSQL's output:")
    assert "is full, so the embedded PostgreSQL cannot start: free some space" in sentence
    assert "No space left on device" in log


def produce(broker: ServeProcess, data: bytes) -> "subprocess.CompletedProcess[bytes]":
    host, port = broker.tcp
    command = [sys.executable, "-m", "penstock", "topic", "produce", "t"]
    command += ["--broker", f"{host}:{port}", "--timeout", "2"]
    return subprocess.run(command, input=data, capture_output=True, timeout=60, check=False)


def append(broker: ServeProcess, payload: str) -> httpx.Response:
    return httpx.post(f"{broker.url}/topics/t/produce", json={"payload": payload})


def test_a_full_disk_is_seen_everywhere_and_ends_by_itself(disk: Path, postgres: str) -> None:
    settings = {"topics__free_space_reserve": 1 << 20, "topics__retention_interval": 0.2}
    with ServeProcess(disk / "data", database_url=fresh_database(postgres), **settings) as broker:
        assert append(broker, "first").json()["offset"] == 0
        healthy = httpx.get(f"{broker.url}/health").json()
        assert (healthy["status"], healthy["disk"]) == ("healthy", "ok")
        filler = disk / "filler"
        filler.write_bytes(bytes(os.statvfs(disk).f_bavail * 4096 - (1 << 20)))

        failed = produce(broker, b"x" * 100_000 + b"\n")
        assert failed.returncode == 1
        assert b"waits for the broker" in failed.stderr
        assert b"no records were stored in t, of 1 that were read" in failed.stderr
        assert b"kept in reserve" in failed.stderr.splitlines()[-1]
        assert append(broker, "x" * 100_000).status_code == 507
        health = httpx.get(f"{broker.url}/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert health.json()["disk"].startswith("full: the disk has")
        assert "penstock_topic_disk_full 1" in httpx.get(f"{broker.url}/metrics/prometheus").text

        filler.unlink()
        until(lambda: "are accepted again" in broker.log)
        assert httpx.get(f"{broker.url}/health").json()["status"] == "healthy"
        assert "penstock_topic_disk_full 0" in httpx.get(f"{broker.url}/metrics/prometheus").text
        assert append(broker, "second").json()["offset"] == 1
        assert broker.log.count("are refused until there is room") == 1


def test_an_exporter_is_asked_to_come_again_when_there_is_room(disk: Path, postgres: str) -> None:
    with ServeProcess(disk / "data", database_url=fresh_database(postgres)) as broker:
        destination = {"type": "otlp", "url": "http://127.0.0.1:1"}
        route = {"name": "traces", "source": {"otlp": "all"}, "destination": destination}
        route["queue"] = {"free_space_reserve": "1Mi"}
        httpx.post(f"{broker.url}/api/v1/routes", json=route, timeout=60).raise_for_status()

        def export() -> httpx.Response:
            spans = {"resourceSpans": [{"schemaUrl": "x" * 10_000}]}
            return httpx.post(f"{broker.url}/v1/traces", json=spans, timeout=60)

        assert export().status_code == 200
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(65_536)):
                pass
        until(lambda: export().status_code != 200)
        refused = export()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        filler.unlink()
        until(lambda: export().status_code == 200)
