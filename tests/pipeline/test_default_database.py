"""A broker with its embedded database, and those on its machine who are told no URL."""

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from penstock.errors import InvalidRequest
from penstock.pipeline.jobs.rollup import RollupOptions, rollup
from penstock.pipeline.options import QueueSourceOptions, ReachOptions
from penstock.pipeline.source_columns import QUEUE_COLUMNS
from penstock.pipeline.sources.postgres import Postgres
from penstock.pipeline.sources.queue import QueuePlan, QueueReader
from tests.support.broker import ServeProcess

ENV = {
    name: value
    for name, value in os.environ.items()
    if name not in ("DATABASE_URL", "PENSTOCK_DATABASE_URL")
}


@pytest.fixture
def directory(scratch: Path) -> Iterator[Path]:
    """Where `penstock serve` runs as it comes: its data is in ./penstock-data."""
    with ServeProcess(scratch / "penstock-data", env={"DATABASE_URL": ""}) as broker:
        items = [{"queue": "orders", "payload": {"n": n}} for n in range(20)]
        assert httpx.post(f"{broker.url}/api/v1/push", json={"items": items}).status_code == 201
        yield scratch


def penstock(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=ENV, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.spark
async def test_jobs_and_the_queue_source_find_the_embedded_database_by_themselves(
    directory: Path, spark: Any, monkeypatch: pytest.MonkeyPatch, soak: bool
) -> None:
    done = penstock("database", "url", cwd=directory)
    assert done.returncode == 0, done.stderr
    assert await _count(done.stdout.strip()) == 20  # for psql and whoever takes a URL

    monkeypatch.chdir(directory)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    reader = QueueReader(
        QueuePlan(QueueSourceOptions(queue="orders"), QUEUE_COLUMNS.names, streaming=False)
    )
    assert (
        len(
            [
                row
                for task in reader.partitions()
                for batch in reader.read(task)
                for row in batch.to_pylist()
            ]
        )
        == 20
    )
    done_now = rollup(
        spark,
        RollupOptions(since=datetime.now(UTC) - timedelta(minutes=5), until=datetime.now(UTC)),
    )
    assert done_now.queues == 1
    if soak:  # a JVM of its own
        job = ("pipeline", "run", "archive", "lake", "--queue", "orders", "--master", "local[2]")
        done = penstock(*job, cwd=directory)
        assert done.returncode == 0, done.stdout + done.stderr
        assert list((directory / "lake").rglob("*.parquet"))


def test_who_cannot_find_the_database_is_told_the_ways_to_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    with pytest.raises(
        InvalidRequest,
        match=r"no embedded database runs in .*'database', or set DATABASE_URL: `pen",
    ):
        Postgres(ReachOptions())
    refused = penstock("database", "url", cwd=tmp_path)
    assert refused.returncode == 1
    assert (
        f"no embedded database runs in {tmp_path}/penstock-data: start its broker" in refused.stderr
    )
    (tmp_path / "penstock.yaml").write_text(
        "database: {url: 'postgresql://me:secret@db:5433/app', db_schema: shop}\n"
    )
    assert (
        penstock("database", "url", cwd=tmp_path).stdout == "postgresql://me:secret@db:5433/app\n"
    )
    assert (Postgres(ReachOptions()).url, Postgres(ReachOptions()).schema) == (
        "postgresql://me:secret@db:5433/app",
        "shop",
    )


async def _count(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval("SELECT count(*) FROM penstock.messages"))
    finally:
        await connection.close()
