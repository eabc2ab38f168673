"""A test run that is killed leaves nothing behind."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.database.embedded import EmbeddedPostgres
from tests.support import guard
from tests.support.buffers import crash, freeze, thaw
from tests.support.wait import until

RUN = """
import subprocess, threading
from tests.support import guard
def start():
    child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    guard.watch(child.pid)
    print(child.pid, child.stdout.readline(), flush=True)
starter = threading.Thread(target=start)  # a child belongs to the run, not to the thread that started it
starter.start()
starter.join()
input()
"""


def test_what_a_killed_run_had_started_is_killed_with_its_own_children() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", RUN]
    run = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert run.stdout is not None
    child, grandchild = (psutil.Process(int(word)) for word in run.stdout.readline().split())
    assert child.is_running()
    assert grandchild.is_running()
    run.kill()
    run.communicate()
    until(lambda: not (_alive(child) or _alive(grandchild)), 20, "both are gone")


def test_a_process_that_has_ended_does_not_save_the_others() -> None:
    ended, running = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    processes = [psutil.Process(ended.pid), psutil.Process(running.pid)]
    ended.kill()
    ended.wait()
    guard.kill_each(processes)
    assert running.wait(20) != 0


def test_a_server_whose_children_end_while_it_is_frozen_is_thawed(own_postgres) -> None:
    frozen = freeze(own_postgres)
    child = psutil.Process(frozen[-1])
    child.kill()
    until(
        lambda: not _alive(child), 20, "the child has ended, and its frozen parent has not reaped"
    )
    thaw(frozen[:1])
    psutil.wait_procs([child], timeout=20)
    thaw(frozen)
    until(lambda: own_postgres.pid() is not None, 20)


def test_a_server_that_does_not_run_is_not_taken_for_the_test_run(tmp_path) -> None:
    with pytest.raises(AssertionError, match="does not run"):
        crash(EmbeddedPostgres(tmp_path))


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
