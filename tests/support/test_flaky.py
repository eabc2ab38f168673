"""`tools/flaky` and the random order of tests."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

from tests.support import leftovers

ROOT = Path(__file__).parents[2]
FEW_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
SOMETIMES = """
from pathlib import Path

def test_fails_every_second_time():
    count = Path(__file__).with_name("count")
    count.write_text(count.read_text() + "x" if count.exists() else "x")
    assert len(count.read_text()) % 2, "an even time"

def test_passes():
    pass
"""
ORDER = """
import pytest
from tests.support.order import shuffle

def pytest_collection_modifyitems(items):
    shuffle(items)

@pytest.fixture(scope="module")
def server(request):
    print("started for", request.module.__name__)
"""
MANY = "import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_one(server, n): pass\n"


def run(directory: Path, *command: str, **env: str) -> "subprocess.CompletedProcess[str]":
    dropped = (leftovers.RUN, "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST", "TEST_ORDER")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return subprocess.run(
        command,
        cwd=directory,
        env={**kept, **FEW_PLUGINS, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_a_test_that_fails_sometimes_is_named_with_how_often_it_did(tmp_path):
    (tmp_path / "test_inner.py").write_text(SOMETIMES)
    options = ["--runs", "2", "--workers", "1", "--busy", "1"]
    done = run(tmp_path, sys.executable, str(ROOT / "tools/flaky"), "test_inner.py", *options)
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| test_inner.py::")]
    name, alone, busy, runs, error = (word.strip() for word in row.strip("|").split("|"))
    assert name == "test_inner.py::test_fails_every_second_time"
    assert (alone, busy, runs) == ("0", "1", "2")
    assert "an even time" in error


def test_tests_that_do_not_run_at_all_are_a_failure(tmp_path):
    (tmp_path / "test_inner.py").write_text("import nothing_of_this_name")
    options = ["--runs", "1", "--workers", "1", "--busy", "0"]
    done = run(tmp_path, sys.executable, str(ROOT / "tools/flaky"), "test_inner.py", *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "nothing_of_this_name" in done.stdout


def test_a_random_order_can_be_repeated_and_keeps_modules_together(tmp_path):
    (tmp_path / "conftest.py").write_text(ORDER)
    for place in ("a/test_one.py", "a/test_two.py", "b/test_three.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(MANY)

    def order(seed: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
        done = run(tmp_path, *command, "--import-mode=importlib", TEST_ORDER=seed)
        assert "27 passed" in done.stdout, done.stdout
        return [line.split()[0] for line in done.stdout.splitlines() if " PASSED" in line]

    first, again, other = order("7"), order("7"), order("8")
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)
    modules = [name.partition("::")[0] for name in first]
    changes = sum(one != other for one, other in itertools.pairwise(modules))
    assert changes == 2
