"""The PostgreSQL sink: a batch is there once and as a whole, whatever is killed in between."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidRequest
from penstock.pipeline.pipeline_file import PipelineSink, parse
from penstock.pipeline.runner import Runner
from penstock.pipeline.sinks.postgres import CopyTask, PostgresSession, PostgresSink
from tests.support.form import pick
from tests.support.topics import append
from tests.support.wait import until

pytestmark = pytest.mark.spark
ROOT = Path(__file__).parents[2]


@pytest.fixture
def database(database_url: str) -> Iterator[PostgresSession]:
    with closing(PostgresSession(database_url)) as session:
        yield session


def run(session: PostgresSession, *statements: str) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for statement in statements:
        rows = session.run(statement)
    session.commit()
    return rows


def stages(session: PostgresSession) -> list[tuple[Any, ...]]:
    return run(session, "SELECT relname::text FROM pg_class WHERE relname LIKE 'penstock_stage%'")


def sink(url: str, table: str = "sums", **more: Any) -> PostgresSink:
    return PostgresSink(PipelineSink(postgres=table, options={"database": url}, **more), "app")


def test_a_batch_is_inserted_once_in_the_types_of_the_table(
    spark: Any, database: PostgresSession, database_url: str
) -> None:
    run(
        database,
        'CREATE TABLE sums (id int, "Total" numeric(12, 2), at timestamptz, tags jsonb, n int DEFAULT 7)',
    )
    rows = spark.sql(
        "SELECT id, CAST(id * 1.5 AS DECIMAL(12, 2)) AS Total, TIMESTAMP '2026-01-31 12:00:00' AS at, "
        "array('a', 'b') AS tags FROM range(1000)"
    )
    for _ in range(2):  # the second time it is there
        sink(database_url)(rows, 0)
    sink(database_url)(rows.where("id < 10"), 1)
    count, total, tags, n = run(
        database, 'SELECT count(*), sum("Total")::text, min(tags::text), sum(n) FROM sums'
    )[0]
    assert (count, total, tags, n) == (1010, "749317.50", '["a", "b"]', 7070)
    assert run(database, "SELECT batch, rows FROM penstock_batches") == [(1, 10)]
    assert stages(database) == []
    with pytest.raises(InvalidRequest, match="no column 'other'; it has id, Total, at, tags, n"):
        sink(database_url)(spark.sql("SELECT 1 AS other"), 2)
    with pytest.raises(InvalidRequest, match=r"table 'nowhere' does not exist.*columns id"):
        sink(database_url, "nowhere")(spark.sql("SELECT 1 AS id"), 2)


def test_an_upsert_replaces_and_deletes_by_its_key(
    spark: Any, database: PostgresSession, database_url: str
) -> None:
    run(database, "CREATE SCHEMA shop", "CREATE TABLE shop.state (id text PRIMARY KEY, v int)")
    given = {"mode": "upsert", "key": ["id"], "orderBy": ["_at"], "delete": "_gone"}
    columns = "id STRING, v INT, _at INT, _gone BOOLEAN"
    first = [("a", 1, 1, False), ("a", 2, 2, False), ("b", 1, 1, None)]
    sink(database_url, "shop.state", **given)(spark.createDataFrame(first, columns), 0)
    second = [("a", 3, 1, False), ("b", None, 1, True), ("c", 1, 2, True), ("d", 4, 1, False)]
    sink(database_url, "shop.state", **given)(spark.createDataFrame(second, columns), 1)
    assert run(database, "SELECT * FROM shop.state ORDER BY id") == [("a", 3), ("d", 4)]
    plain = sink(database_url, "shop.state", mode="upsert", key=["id"])
    with pytest.raises(InvalidRequest, match="two rows of one batch have the same id"):
        plain(spark.createDataFrame([("x", 1), ("x", 2)], "id STRING, v INT"), 2)
    with pytest.raises(InvalidRequest, match="a row has no id"):
        plain(spark.createDataFrame([(None, 1)], "id STRING, v INT"), 2)
    assert run(database, "SELECT count(*) FROM shop.state") == [(2,)]


def test_rows_of_a_task_that_spark_ran_twice_count_once(
    spark: Any, database: PostgresSession, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor that is lost after its copy: the attempt is in the staging table and unknown."""
    run(database, "CREATE TABLE sums (id int)")
    real = CopyTask.__call__

    def twice(self: CopyTask, batches: Any) -> Any:
        rows = list(batches)
        list(real(self, iter(rows)))
        return real(self, iter(rows))

    monkeypatch.setattr(CopyTask, "__call__", twice)
    sink(database_url)(spark.range(100), 0)
    assert run(database, "SELECT count(*), count(DISTINCT id) FROM sums") == [(100, 100)]


DRIVER = """
import sys
from pathlib import Path
from penstock.pipeline.pipeline_file import parse
from penstock.pipeline.runner import Runner
Runner(parse(Path(sys.argv[1]).read_text()), "local[2]").run()
"""
FILE = """
name: kills
source: {{topic: orders, options: {{directory: {directory}/topics, maxOffsetsPerTrigger: 37}}}}
steps:
  - {{name: made, sql: "SELECT CAST(CAST(payload AS STRING) AS INT) AS id FROM orders"}}
sink: {{postgres: sums, options: {{database: "{url}"}}}}
checkpoint: {directory}/checkpoint
"""


def test_kills_of_driver_and_database_sessions_lose_and_double_nothing(
    spark: Any, database: PostgresSession, database_url: str, tmp_path: Path
) -> None:
    records, kills = 1_000, pick(short=1, usual=1, soak=20)
    run(database, "CREATE TABLE sums (id int)")
    append(tmp_path / "topics", "orders", [[b"%d" % i for i in range(records)]])
    file = tmp_path / "p.yaml"
    file.write_text(FILE.format(directory=tmp_path, url=database_url))
    chance = random.Random(7)

    def written() -> int:
        return int(run(database, "SELECT count(*) FROM sums")[0][0])

    for _ in range(kills):
        before = written()
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(file)],
            cwd=ROOT,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
        )
        try:
            until(lambda: written() > before or driver.poll() is not None, 120, "rows")  # noqa: B023
            run(
                database,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> "
                "pg_backend_pid() AND datname = current_database() AND query LIKE '%penstock_stage%'",
            )
            time.sleep(chance.random())  # the moment of the kill is chance
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    Runner(parse(file.read_text())).run(spark)
    assert run(database, "SELECT count(*), count(DISTINCT id) FROM sums") == [(records, records)]
    assert stages(database) == []
    assert json.dumps(run(database, "SELECT count(*) FROM penstock_batches")) == "[[1]]"
