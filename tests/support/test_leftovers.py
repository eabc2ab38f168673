"""A run fails when it leaves something behind, and says what and which test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import leftovers
from tests.support.wait import until

ROOT = Path(__file__).parents[2]
LEAVES = """
import subprocess

def test_leaves_a_process():
    subprocess.Popen(["sleep", "600"])

def test_leaves_nothing():
    subprocess.run(["true"], check=True)
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


def test_a_run_that_leaves_nothing_passes_though_another_run_leaves_a_process(tmp_path):
    other = {**os.environ, leftovers.RUN: str(tmp_path / "another"), "PYTEST_CURRENT_TEST": "x"}
    with subprocess.Popen(["sleep", "600"], env=other) as running:
        try:
            run = run_pytest(tmp_path, "def test_leaves_nothing(): pass")
        finally:
            running.kill()
    assert run.returncode == 0, run.stdout
    assert "left behind" not in run.stdout


def run_pytest(directory: Path, text: str, *options: str) -> "subprocess.CompletedProcess[str]":
    (directory / "test_inner.py").write_text(text)
    (directory / "conftest.py").write_text(CONFTEST)
    dropped = (leftovers.RUN, "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(directory)],
        cwd=directory,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
