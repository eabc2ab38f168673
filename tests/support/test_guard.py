"""A test run that is killed leaves nothing behind."""

import subprocess
import sys
from pathlib import Path

import psutil

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


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
