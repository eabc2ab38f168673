"""Start many brokers fast, for tests: `python -m penstock.server.forks DIRECTORY`.

The process imports the program once and runs one embedded PostgreSQL. It reads JSON orders from
standard input, one per line. For a `StartBroker`, it forks a broker and prints its process id. For
a process id, it prints the exit code of that broker (null while it runs). Each broker has its own
database, copied from a template with the schema.

Standard input ends when the tests end or are killed. The process then kills its brokers, stops
PostgreSQL and deletes DIRECTORY.
"""

import asyncio
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg
import msgspec

from penstock.config.load import parse_settings
from penstock.config.schema import DatabaseSettings
from penstock.database.embedded import EmbeddedPostgres
from penstock.database.migrate import migrate
from penstock.queues.schema import SCHEMA

TEMPLATE = "penstock_template"
# Gives each copy of the template its own number in message ids.
NEW_IDENTITY = "UPDATE penstock.installation SET id = (id + $1) % 4294967296"
# No test survives a crash of this server, so nothing is flushed.
UNSAFE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
# A broker imports these when it first needs them.
LATER = ("penstock.server.process", "penstock.wire.kafka.server")


class StartBroker(msgspec.Struct):
    number: int  # of its database, which is created if it is missing
    output: str  # the file that its output is appended to
    flags: dict[str, Any]  # configuration keys with their values
    settings: list[str]  # the same as text, in the form of `penstock serve --set`
    env: dict[str, str]


class Forks:
    """The forked brokers on one PostgreSQL."""

    def __init__(self, postgres: EmbeddedPostgres) -> None:
        self._postgres = postgres
        self._running: set[int] = set()  # process ids that were not reaped

    async def create_template(self) -> None:
        await self._execute(f"CREATE DATABASE {TEMPLATE}")
        connection = await self._connect(TEMPLATE)
        await migrate(connection, DatabaseSettings().db_schema, SCHEMA)
        await connection.close()

    def start(self, order: StartBroker) -> int:
        """Start a broker in a child process and return its process id."""
        process = os.fork()
        if process:
            self._running.add(process)
            return process
        code = 1
        try:
            os.setsid()
            _redirect(order.output)
            os.environ |= order.env
            code = self._serve(order)
        except BaseException:  # noqa: BLE001 a child must not return into its parent's code
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _serve(self, order: StartBroker) -> int:
        from penstock.server import process

        database = f"penstock_{order.number}"
        asyncio.run(self._create_database(database, order.number))
        url = self._url_of(database)
        flags = order.flags | {"database.url": url} | parse_settings(order.settings)
        return process.main(json.dumps([None, flags], default=str))

    async def _create_database(self, name: str, number: int) -> None:
        try:
            await self._execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        except asyncpg.DuplicateDatabaseError:
            return  # the broker starts again
        connection = await self._connect(name)
        await connection.execute(NEW_IDENTITY, number)
        await connection.close()

    async def _execute(self, statement: str) -> None:
        connection = await self._connect("postgres")
        await connection.execute(statement)
        await connection.close()

    async def _connect(self, database: str) -> Any:
        return await asyncpg.connect(self._url_of(database))

    def _url_of(self, database: str) -> str:
        return self._postgres.url.replace("/postgres?", f"/{database}?")

    def poll(self, process: int) -> int | None:
        """Return the exit code of a broker, only once, or None while it runs."""
        ended, status = os.waitpid(process, os.WNOHANG)
        if not ended:
            return None
        self._running.discard(process)
        return os.waitstatus_to_exitcode(status)

    def kill_all(self) -> None:
        for process in self._running:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _redirect(output: str) -> None:
    """Detach from the parent's pipes: write output to a file."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for descriptor, replacement in ((0, nothing), (1, file), (2, file)):
        os.dup2(replacement, descriptor)


def main(directory: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C ends the tests, and then our input ends
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    postgres = EmbeddedPostgres(directory / "postgres", UNSAFE, home=directory)
    forks = Forks(postgres)
    try:
        with ThreadPoolExecutor(1) as thread:
            starting = thread.submit(postgres.start)
            for module in LATER:
                importlib.import_module(module)
            starting.result()
        asyncio.run(forks.create_template())
        gc.freeze()  # otherwise a child's collector copies every page
        for line in sys.stdin:
            order = msgspec.json.decode(line, type=StartBroker | int)
            answer = forks.poll(order) if isinstance(order, int) else forks.start(order)
            sys.stdout.write(f"{json.dumps(answer)}\n")
            sys.stdout.flush()
    finally:
        forks.kill_all()
        postgres.remove()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
