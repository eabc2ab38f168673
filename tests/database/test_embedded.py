import os
import signal
import subprocess
import sys

from penstock.database.embedded import EmbeddedPostgres
from tests.support.wait import until


def test_a_server_is_created_stopped_and_started_again(scratch):
    server = EmbeddedPostgres(scratch / "postgres")
    assert server.start() == "created"
    first = server.pid()
    assert first
    assert server.start() == "taken over"
    assert server.pid() == first
    server.stop()
    assert server.pid() is None
    assert server.start() == "started"
    EmbeddedPostgres(scratch / "postgres").stop()  # by somebody who did not start it
    assert server.pid() is None


def test_a_server_survives_kill_9_of_its_owner_and_is_taken_over(scratch):
    code = (
        "import sys, time; from pathlib import Path; from penstock.database.embedded import EmbeddedPostgres;"
        "server = EmbeddedPostgres(Path(sys.argv[1])); server.start(); print(server.pid(), flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(scratch / "pg")], stdout=subprocess.PIPE, text=True)
    process = int(owner.stdout.readline())
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    server = EmbeddedPostgres(scratch / "pg")
    assert server.start() == "taken over"
    assert server.pid() == process
    server.stop()


def test_a_long_path_gets_a_socket_elsewhere(scratch):
    server = EmbeddedPostgres(scratch / ("deep" * 25) / "postgres")
    assert server.start() == "created"
    assert not str(server.socket_directory).startswith(str(scratch))
    server.stop()


def test_a_server_killed_with_its_pid_file_left_behind_starts_again(scratch):
    server = EmbeddedPostgres(scratch / "postgres")
    server.start()
    os.kill(server.pid(), signal.SIGKILL)
    until(lambda: server.pid() is None)
    assert server.start() == "started"
    server.stop()
