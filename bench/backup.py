"""`penstock backup` and `penstock restore`, in MB/s, against what people use for parts of it.

- Queues: against `pg_basebackup` of the same cluster, and back against a copy of its directory. Both
  sides count the bytes of the database, so the figures are times per GB. A dump reads rows and a
  base backup copies pages: it is quicker, but goes back only as a whole cluster of the same version.
- Topics: against `cp -r` of their directory, there and back. Ours also computes checksums, and
  verifies every record on the way back.

    make bench B=backup           PENSTOCK_BENCH_BACKUP_MB=1000 for more than 300 MB of each
"""

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import asyncpg

from bench.harness import Contest
from penstock import SyncClient
from penstock.cli import app
from penstock.cli import backup as _commands  # noqa: F401 - they register themselves
from penstock.database import embedded
from penstock.database.embedded import EmbeddedPostgres
from penstock.net.topic_link import TopicLink
from penstock.protocol import frames
from tests.conftest import fresh_database
from tests.support import guard
from tests.support.broker import ServeProcess
from tests.support.cli import CliRunner

MEGABYTES = int(os.environ.get("PENSTOCK_BENCH_BACKUP_MB", "300"))
TRUST = "local all all trust\nlocal replication all trust\n"
ROUNDS = 3
# Messages as a push stores them. The broker is not measured here, so it need not push them.
FILL = """INSERT INTO penstock.messages (partition_id, seq, created_at, queue_id, transaction_id, payload)
          SELECT p.id, n, now(), p.queue_id, gen_random_uuid()::text,
                 convert_to('{"order":' || n || ',"note":"' || repeat(md5(n::text), 15) || '"}', 'UTF8')
            FROM generate_series($1::int, $2::int) n, (SELECT * FROM penstock.partitions LIMIT 1) p"""
STEP = 20_000  # messages
RECORD = 500  # bytes


def contests() -> Iterator[Contest]:
    with ExitStack() as stack:
        bench = Copies(stack)
        for name, ours, theirs, against in (
            ("queues, backup", bench.queues, bench.base_backup, "pg_basebackup"),
            ("queues, restore", bench.queues_back, bench.base_backup_back, "cp of a base backup"),
            ("topics, backup", bench.topics, bench.copy, "cp -r"),
            ("topics, restore", bench.topics_back, bench.copy, "cp -r"),
        ):
            yield Contest(
                f"backup: {name}", "MB/s", ours, theirs, against, rounds=ROUNDS, warm_up=0
            )


class Copies:
    """A broker with queues and one with topics, and a copy of each made in every way."""

    def __init__(self, stack: ExitStack) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
        self.directory.chmod(0o755)
        stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.postgres = EmbeddedPostgres(self.directory / "pg", access=TRUST)
        self.postgres.start()
        guard.watch_postgres(self.postgres.directory)
        stack.callback(self.postgres.stop, "immediate")
        self.queue_url = fresh_database(self.postgres, empty=True)
        self.topic_url = fresh_database(self.postgres, empty=True)
        self.queue_data, self.topic_data = self.directory / "queues", self.directory / "topics"
        with (
            ServeProcess(self.queue_data, database_url=self.queue_url) as broker,
            SyncClient(broker.url) as client,
        ):
            client.push("bench", {})
        self.queue_bytes = asyncio.run(self._fill())
        with ServeProcess(self.topic_data, database_url=self.topic_url) as broker:
            self.topic_bytes = self._append(broker)
        self.number = 0

    async def _fill(self) -> int:
        connection = await asyncpg.connect(self.queue_url)
        size, begin = 0, 2
        while size < MEGABYTES * 1_000_000:
            await connection.execute(FILL, begin, begin + STEP - 1)
            begin += STEP
            size = await connection.fetchval("SELECT pg_database_size(current_database())")
        await connection.execute("CHECKPOINT")
        await connection.close()
        return size

    def _append(self, broker: ServeProcess) -> int:
        host, port = broker.tcp
        batch = frames.produce_batch("log", [os.urandom(RECORD) for _ in range(1000)])
        with TopicLink(f"{host}:{port}", 30) as link:
            link.create("log")
            for _ in range(MEGABYTES * 1_000_000 // (RECORD * 1000)):
                link.append(batch)
        return MEGABYTES * 1_000_000

    def fresh(self) -> Path:
        self.number += 1
        return self.directory / f"copy-{self.number}"

    def queues(self) -> float:
        return self._timed(self.queue_bytes, self._backup, self.queue_data, self.queue_url)

    def topics(self) -> float:
        return self._timed(self.topic_bytes, self._backup, self.topic_data, self.topic_url)

    def queues_back(self) -> float:
        copy = self._backup(self.queue_data, self.queue_url)
        url = fresh_database(self.postgres, empty=True)
        return self._timed(self.queue_bytes, self._restore, copy, url)

    def topics_back(self) -> float:
        copy = self._backup(self.topic_data, self.topic_url)
        url = fresh_database(self.postgres, empty=True)
        return self._timed(self.topic_bytes, self._restore, copy, url)

    def base_backup(self) -> float:
        return self._timed(self.queue_bytes, self._base_backup)

    def base_backup_back(self) -> float:
        return self._timed(self.queue_bytes, self._copy, self._base_backup())

    def copy(self) -> float:
        return self._timed(self.topic_bytes, self._copy, self.topic_data)

    def _timed(self, size: int, work: object, *arguments: object) -> float:
        """MB/s with everything on disk at the end."""
        assert callable(work)
        began = time.perf_counter()
        made = work(*arguments)
        subprocess.run(["sync", "-f", str(made)], check=True)
        took = time.perf_counter() - began
        shutil.rmtree(made, ignore_errors=True)
        return size / 1e6 / took

    def _backup(self, data: Path, url: str) -> Path:
        place = self.fresh()
        self._command("backup", place, data, url)
        return place

    def _restore(self, copy: Path, url: str) -> Path:
        data = self.fresh()
        self._command("restore", copy, data, url)
        shutil.rmtree(copy)
        return data

    def _command(self, word: str, place: Path, data: Path, url: str) -> None:
        """In this process: the start of an interpreter is no part of a copy."""
        env = {"PENSTOCK_DATABASE_URL": url, "PENSTOCK_DATA_DIRECTORY": str(data)}
        done = CliRunner(env=env).invoke(app, [word, str(place)])
        if done.exit_code:
            raise RuntimeError(done.output)

    def _base_backup(self) -> Path:
        place = self.fresh()
        words = ["-d", self.postgres.url, "-D", str(place), "-X", "stream", "-c", "fast"]
        subprocess.run(
            [embedded.BINARIES / "pg_basebackup", *words], check=True, capture_output=True
        )
        return place

    def _copy(self, source: Path) -> Path:
        place = self.fresh()
        subprocess.run(["cp", "-r", source, place], check=True)
        return place
