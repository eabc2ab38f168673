import contextlib
import os
import pwd
import resource
import signal
import socket
import stat
import subprocess
import sys

import httpx
import pytest

from tests.support.broker import ServeProcess
from tests.support.wait import until


def test_a_broker_starts_with_its_embedded_defaults_tells_where_it_listens_and_stops_cleanly(
    scratch,
):
    broker = ServeProcess(scratch / "data")
    with broker:
        health = httpx.get(f"{broker.url}/health")
        assert health.status_code == 200
        answer = health.json()
        assert (answer["status"], answer["database"]) == ("healthy", "connected")
        assert answer["listeners"]["HTTP"] == broker.url
        assert answer["uptime"] > 0
        until(lambda: "Try this in another terminal" in broker.log)
        assert "is ready.\n" in broker.log
        assert "  database   embedded PostgreSQL\n" in broker.log
        assert broker.stop() == 0
    assert "stopped in" in broker.log
    assert not (scratch / "data/.penstock/postgres/data/postmaster.pid").exists()
    assert (
        not stat.S_IMODE((scratch / "data/.penstock").stat().st_mode) & stat.S_IRWXO
    )  # payloads are in there
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o711


def test_a_broker_takes_more_connections_than_its_shell_lets_it_open_files(tmp_path, database_url):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    broker = ServeProcess(tmp_path, database_url=database_url)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        broker.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.ExitStack() as opened:
        opened.callback(broker.stop)
        for _ in range(300):
            opened.enter_context(socket.create_connection(broker.tcp))
        assert httpx.get(f"{broker.url}/health").status_code == 200
        assert "may open only" not in broker.log


def test_kill_9_leaves_a_database_that_the_next_start_takes_over_with_all_its_processes(scratch):
    broker = ServeProcess(scratch / "data", workers=2)
    with broker:
        broker.kill()
        broker.start()
        assert httpx.get(f"{broker.url}/health").status_code == 200
        assert "embedded PostgreSQL taken over" in broker.log


def test_a_second_broker_on_the_directory_is_refused_with_a_code_of_its_own(tmp_path, database_url):
    with ServeProcess(tmp_path, database_url=database_url) as first:
        second = ServeProcess(tmp_path, database_url=database_url).start(wait=False)
        assert second.process.wait(30) == 3
        until(lambda: f"is in use by process {first.process.pid}" in second.log)


def test_a_port_in_use_is_said_before_anything_is_started_with_what_sets_it(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        others = (
            "--tcp-port",
            "0",
            "--ws-port",
            "0",
            "--kafka-port",
            "0",
            "--data-dir",
            str(tmp_path),
        )
        done = run("serve", "--http-port", str(port), *others, before=["prlimit", "--nofile=300"])
    assert done.returncode == 5
    assert "this process may open only 300 files" in done.stderr
    assert f"HTTP cannot listen on 127.0.0.1:{port}: another program listens there" in done.stderr
    assert "--http-port, by PENSTOCK_HTTP_SERVER_PORT, or by http_server.port" in done.stderr
    assert not (tmp_path / ".penstock" / "postgres").exists()


def test_a_data_directory_that_cannot_be_written_is_said_with_the_user_and_the_remedy(tmp_path):
    refused = "/sys/penstock"  # where even root creates nothing
    done = run("serve", "--data-dir", refused)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "cannot write" in line]
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert f"the user {user} cannot write to the data directory {refused}" in line
    assert f"sudo install -d -o {user} {refused}" in line
    assert "--data-dir" in line
    assert "Traceback" not in done.stderr


def test_a_database_of_another_release_is_explained_in_the_first_sentence(scratch):
    with ServeProcess(scratch / "data"):
        pass
    version = scratch / "data/.penstock/postgres/data/PG_VERSION"
    current = version.read_text().strip()
    version.write_text("12\n")
    done = run("serve", "--data-dir", str(scratch / "data"), "--http-port", "0", "--no-topics")
    assert done.returncode == 4
    sentence, _, log = done.stderr.partition("PostgreSQL's output:")
    assert f"was created by PostgreSQL 12, and this release has PostgreSQL {current}" in sentence
    assert "'penstock backup'" in sentence
    assert "FATAL" in log
    assert "FATAL" not in sentence


def test_a_wrong_configuration_stops_the_start_with_every_mistake(tmp_path):
    file = tmp_path / "penstock.yaml"
    file.write_text("htp_server: {}\nlog_level: loud\n")
    done = run("serve", "-c", str(file))
    assert done.returncode == 2
    assert "did you mean http_server" in done.stderr
    assert "expected one of debug, info, warning, error" in done.stderr
    checked = run("config", "--check", str(file))
    assert checked.returncode == 2
    assert "log_level = 'loud'" in checked.stderr


def test_a_database_that_is_down_does_not_keep_the_broker_from_starting_and_the_banner_says_why(
    tmp_path,
):
    with ServeProcess(tmp_path, database_url="postgresql://nobody@127.0.0.1:1/none") as broker:
        health = httpx.get(f"{broker.url}/health")
        assert health.status_code == 503
        assert health.json()["database"] == "disconnected"
        assert httpx.get(f"{broker.url}/health/live").status_code == 200
        until(lambda: "pops get 503" in broker.log)
        assert "is ready, in part." in broker.log
        assert (
            "  database   NOT AVAILABLE: 127.0.0.1:1: connection refused (does PostgreSQL run there?)"
            in broker.log
        )
        assert broker.stop() == 0


def test_what_is_no_postgresql_url_is_refused_at_the_start(tmp_path):
    done = run("serve", "--data-dir", str(tmp_path), "--database-url", "mysql://x")
    assert done.returncode == 2
    assert (
        "database.url = ***: expected postgresql://user:password@host:5432/database, not mysql://"
        in done.stderr
    )


def test_a_second_signal_stops_at_once(tmp_path, database_url):
    with ServeProcess(tmp_path, database_url=database_url) as broker:
        address = ("127.0.0.1", int(broker.url.rpartition(":")[2]))
        with socket.create_connection(address) as slow:
            slow.sendall(
                b"POST /api/v1/push HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n"
            )
            assert slow.recv(100).startswith(
                b"HTTP/1.1 "
            )  # it is being served, and its body never comes
            os.kill(broker.process.pid, signal.SIGTERM)
            until(lambda: "stopping" in broker.log)
            os.kill(broker.process.pid, signal.SIGINT)
            assert broker.process.wait(30) == 130


def test_logs_are_json_lines_away_from_a_terminal_and_honour_the_level(tmp_path, database_url):
    with ServeProcess(tmp_path, database_url=database_url, log_level="error") as broker:
        broker.stop()
        assert '"level":"info"' not in broker.log
    with ServeProcess(tmp_path, database_url=database_url, log_format="text") as broker:
        broker.stop()
        assert " info    broker    ready in " in broker.log


def test_config_show_names_each_values_origin():
    done = run("config", env={**os.environ, "PENSTOCK_HTTP_SERVER_PORT": "7777"})
    assert "http_server.port\t7777\tenvironment PENSTOCK_HTTP_SERVER_PORT" in done.stdout
    assert "tcp_server.port\t12345\tdefault" in done.stdout


@pytest.mark.parametrize(
    "arguments", [("--help",), ("-h",), ("serve", "--help"), ("config", "--help"), ("--version",)]
)
def test_help_is_there(arguments):
    done = run(*arguments)
    assert done.returncode == 0
    assert done.stdout


def run(*arguments: str, env=None, before=()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-m", "penstock", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
        check=False,
    )
