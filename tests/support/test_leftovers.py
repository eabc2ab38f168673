"""A run fails when it leaves something behind, and says what and which test."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config import cluster_link
from tests.support import leftovers
from tests.support.test_flaky import FEW_PLUGINS
from tests.support.wait import until

ROOT = Path(__file__).parents[2]
LEAVES = """
import subprocess

def test_leaves_a_process():
    subprocess.Popen(["sleep", "600"])

def test_leaves_nothing():
    subprocess.run(["true"], check=True)
"""
LEAVES_A_BROKER = """
from tests.support.broker import BrokerProcess

def test_leaves_a_broker(tmp_path):
    BrokerProcess(tmp_path, database_url="postgresql://nobody@127.0.0.1:1/none").start()
"""
CONFTEST = """
from tests.support import leftovers
leftovers.GRACE_SECONDS = 1.0
from tests.conftest import RUN, pytest_sessionfinish, pytest_terminal_summary
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_process_that_is_left_fails_the_run_and_is_named_with_its_test(tmp_path, workers):
    run = run_pytest(tmp_path, LEAVES, *workers)
    assert run.returncode == 1, run.stdout
    assert "2 passed" in run.stdout
    (left,) = [line for line in run.stdout.splitlines() if line.startswith("process ")]
    assert left.endswith("::test_leaves_a_process: sleep 600")
    until(lambda: not Path(f"/proc/{left.split()[1]}").exists(), 20, "it is killed all the same")


def test_a_broker_that_is_left_is_named_with_its_test_though_it_was_forked(tmp_path):
    run = run_pytest(tmp_path, LEAVES_A_BROKER)
    assert run.returncode == 1, run.stdout
    (left,) = [line for line in run.stdout.splitlines() if line.startswith("process ")]
    assert "::test_leaves_a_broker: " in left
    until(lambda: not Path(f"/proc/{left.split()[1]}").exists(), 20, "it is killed all the same")


def test_a_run_that_leaves_nothing_passes_though_another_run_leaves_a_process(tmp_path):
    other = {**os.environ, leftovers.RUN: str(tmp_path / "another"), "PYTEST_CURRENT_TEST": "x"}
    with subprocess.Popen(["sleep", "600"], env=other) as running:
        try:
            run = run_pytest(tmp_path, "def test_leaves_nothing(): pass")
        finally:
            running.kill()
    assert run.returncode == 0, run.stdout
    assert "left behind" not in run.stdout


def test_a_run_that_is_killed_leaves_no_process_and_no_directory(tmp_path):
    text = """
import os, subprocess
from pathlib import Path

def test_is_killed():
    process = subprocess.Popen(["sleep", "600"])
    Path(__file__).with_name("started").write_text(f"{process.pid} {os.environ['TMPDIR']}")
    process.wait()
"""
    options = inner_pytest(tmp_path, text)
    started = tmp_path / "started"
    with subprocess.Popen(**options, stdout=subprocess.DEVNULL) as run:
        until(lambda: started.exists() and started.read_text(), 100, "the test runs")
        run.kill()
    process, _, directory = started.read_text().partition(" ")
    until(lambda: not Path(f"/proc/{process}").exists(), 60, "its process is gone")
    until(lambda: not Path(directory).parent.exists(), 60, "its directory is gone")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """What stands for /tmp and the like."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setenv(leftovers.RUN, "")  # so that it is put back
    monkeypatch.setattr(leftovers, "PLACES", (place,))
    monkeypatch.setattr(leftovers, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(leftovers, "_others_run_pytest", lambda directory: False)
    monkeypatch.setattr(cluster_link, "OUTSIDE", tmp_path / "outside")
    return place


def test_a_file_that_is_left_is_named_unless_others_use_it(place):
    (place / "penstock-before").touch()
    run = leftovers.Run()
    (place / "penstock-left").touch()
    (place / "somebody-else").touch()
    used = place / "penstock-used"
    used.mkdir()
    with subprocess.Popen(["sleep", "600"], cwd=used, env={}) as other:
        try:
            assert run.leftovers() == [f"file {place}/penstock-left"]
        finally:
            other.kill()


def test_files_are_not_reported_while_somebody_else_runs_tests(place, monkeypatch):
    run = leftovers.Run()
    (place / "penstock-left").touch()
    monkeypatch.setattr(leftovers, "_others_run_pytest", lambda directory: True)
    assert run.leftovers() == []


def test_a_database_outside_is_named_with_its_data_directory(place):
    run = leftovers.Run()
    for name, link in {"ours": run.directory / "data/link", "other": "/somewhere/link"}.items():
        cluster = cluster_link.OUTSIDE / f"postgres-{name}"
        cluster.mkdir(parents=True)
        (cluster / "owner").write_text(f"7 {link}\n")
    assert run.leftovers() == [
        f"database {cluster_link.OUTSIDE}/postgres-ours of {run.directory}/data/link"
    ]


def run_pytest(directory: Path, text: str, *options: str) -> "subprocess.CompletedProcess[str]":
    inner = inner_pytest(directory, text, *options)
    return subprocess.run(**inner, capture_output=True, text=True, check=False, timeout=200)


def inner_pytest(directory: Path, text: str, *options: str) -> dict[str, Any]:
    """The command, environment and directory of a test run of its own."""
    (directory / "test_inner.py").write_text(text)
    (directory / "conftest.py").write_text(CONFTEST)
    dropped = (leftovers.RUN, "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return {
        "args": [*command, str(directory)],
        "cwd": directory,
        "env": {**env, **FEW_PLUGINS, "PYTHONPATH": str(ROOT)},
    }
