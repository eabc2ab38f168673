"""What is said when the configured PostgreSQL cannot be used, and the refusal of poolers."""

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest

from penstock.config import schema
from penstock.database import Database
from penstock.database.embedded import EmbeddedPostgres
from penstock.database.failure import explain
from penstock.errors import ConfigError
from penstock.metrics import Metrics
from penstock.queues.schema import SCHEMA
from tests.support import guard
from tests.support.ports import free_port
from tests.support.wait import until


def problem(url: str) -> str:
    """What a broker says of the database at its start."""

    async def ask() -> str:
        database = Database(
            schema.DatabaseSettings(url=url, acquire_timeout=5), Path("unused"), Metrics(), SCHEMA
        )
        await database.start()
        try:
            return database.problem
        finally:
            await database.stop()

    return asyncio.run(ask())


def test_the_host_and_the_reason_are_named(database_url):
    assert (
        problem("postgresql://me@127.0.0.1:1/app")
        == "127.0.0.1:1: connection refused (does PostgreSQL run there?)"
    )
    assert problem("postgresql://me@127.0.0.256/app").startswith("127.0.0.256: no such host")
    assert "no server listens at that socket" in problem("postgresql:///app?host=/nowhere")
    assert problem(database_url) == ""
    other = database_url.replace("/t", "/no_such_database_", 1)
    assert "does not exist (create it, or name another one in the URL)" in problem(other)
    stranger = database_url.replace("postgres@", "stranger@")
    assert "(check the user and the password of the URL)" in problem(stranger)
    wrong = asyncpg.InvalidPasswordError('password authentication failed for user "me"')
    assert explain(wrong) == f"{wrong} (check the user and the password of the URL)"


async def test_what_answers_and_is_no_postgresql_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        async def ask() -> str:
            async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.read(8)
                writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                writer.close()

            async with await asyncio.start_server(hang_up, sock=other):
                return await asyncio.to_thread(problem, f"postgresql://me@127.0.0.1:{port}/app")

        assert f"127.0.0.1:{port}: " in await ask()


@pytest.mark.skipif(
    shutil.which("pgbouncer") is None, reason="needs pgbouncer: tools/test-programs installs it"
)
@pytest.mark.parametrize("mode", ["transaction", "session"])
@pytest.mark.parametrize(
    "ignored", ["", "extra_float_digits, search_path, timezone, jit, statement_timeout"]
)
def test_a_pooler_is_refused_with_the_reason(postgres, scratch, mode, ignored):
    refusal = pytest.raises(
        ConfigError, match=r"127.0.0.1:\d+: a connection pooler .* name PostgreSQL itself"
    )
    with pgbouncer(postgres, scratch, mode, ignored) as url, refusal:
        problem(url)


@contextmanager
def pgbouncer(server: EmbeddedPostgres, directory: Path, mode: str, ignored: str) -> Iterator[str]:
    port = free_port()
    owner = server.data.stat()
    (directory / "users").write_text('"postgres" ""\n')
    (directory / "pgbouncer.ini").write_text(
        f"""[databases]
postgres = host={server.socket_directory} port=5432 user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {directory}/users
pool_mode = {mode}
ignore_startup_parameters = {ignored}
"""
    )
    command = ["pgbouncer", "-q", str(directory / "pgbouncer.ini")]
    as_owner = (
        {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
        if os.geteuid() == 0
        else {}
    )
    process = subprocess.Popen(
        command, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **as_owner
    )
    guard.watch(process.pid)
    url = f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable"

    async def answers() -> bool:
        try:
            connection = await asyncpg.connect(url, timeout=5)
        except OSError:
            return False
        await connection.close()
        return True

    try:
        until(lambda: asyncio.run(answers()), 20, "pgbouncer answers")
        yield url
    finally:
        process.kill()
        process.wait()
