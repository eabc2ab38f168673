"""`penstock serve` with the flags of metrics-governor, run as a person runs it."""

import subprocess
import sys
from pathlib import Path

import httpx

from penstock.testing import ThrowawayBroker


def test_serve_takes_the_flags_of_metrics_governor(tmp_path: Path, monkeypatch, database_url: str):
    words = ["-queue-max-size", "77", "--queue-circuit-breaker-threshold=3", "-queue-always-queue"]
    start = subprocess.Popen

    def with_flags(command: list[str], **options):
        return start([*command, *words], **options)

    monkeypatch.setattr(subprocess, "Popen", with_flags)
    with ThrowawayBroker(database_url=database_url) as broker:
        route = {"name": "r", "destination": {"type": "http", "url": "http://127.0.0.1:1/"}}
        httpx.post(f"{broker.url}/api/v1/routes", json=route).raise_for_status()
        text = httpx.get(f"{broker.url}/metrics").text
    assert 'penstock_export_queue_max_size{route="r"} 77.0' in text


def test_serve_refuses_to_send_past_the_queue_and_says_why(tmp_path: Path, database_url: str):
    command = [sys.executable, "-m", "penstock", "serve", "--data-dir", str(tmp_path / "data")]
    command += ["--database-url", database_url, "--http-port", "0"]
    run = subprocess.run(
        [*command, "-queue-always-queue=false"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert run.returncode != 0
    assert "always_queue: false is not supported: without the queue, a batch" in run.stderr
    run = subprocess.run(
        [*command, "-queue-max-sise", "1"], capture_output=True, text=True, check=False, timeout=100
    )
    assert run.returncode == 2
    assert "did you mean -queue-max-size?" in run.stderr
