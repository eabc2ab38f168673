import os
import signal
import subprocess
import sys

import pytest

from penstock.errors import Locked
from penstock.io.lock import DirectoryLock


def test_a_second_owner_is_refused_with_the_firsts_process_id(tmp_path):
    with DirectoryLock(tmp_path), pytest.raises(Locked, match=f"process {os.getpid()}"):
        DirectoryLock(tmp_path).acquire()
    with DirectoryLock(tmp_path):
        pass


def test_a_lock_dies_with_its_process(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from penstock.io.lock import DirectoryLock;"
        "DirectoryLock(Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout.readline() == "held\n"
    with pytest.raises(Locked):
        DirectoryLock(tmp_path).acquire()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    with DirectoryLock(tmp_path):
        pass
