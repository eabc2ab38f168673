"""Tables as sinks and as sources beside a stream: partitions, new columns, upserts, deletes."""

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from penstock.errors import ConfigError, InvalidRequest
from penstock.pipeline.failure import PipelineFailed
from penstock.pipeline.pipeline_file import PipelineSink, parse
from penstock.pipeline.runner import Runner
from penstock.pipeline.sinks import table as table_sink
from penstock.pipeline.sinks.table import TableSink
from tests.pipeline.support import batch_rows

pytestmark = pytest.mark.spark


def repeat_last_batch(checkpoint: Path) -> None:
    """Make the next run repeat the newest batch: its end was not recorded."""
    commits = checkpoint / "commits"
    newest = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    (commits / str(newest)).unlink()
    (commits / f".{newest}.crc").unlink(missing_ok=True)


def rows_of(table: Path, *order: str) -> list[dict[str, Any]]:
    rows = deltalake.DeltaTable(str(table)).to_pyarrow_table()
    return rows.sort_by([(name, "ascending") for name in order]).to_pylist()


def test_a_table_is_partitioned_takes_new_columns_and_refuses_other_types(
    spark: Any, tmp_path: Path
) -> None:
    uri = tmp_path / "lake"
    sink = TableSink(PipelineSink(table=str(uri), partitionBy=["Country", "day"]), "app")
    first = "id BIGINT, Country STRING, day DATE"
    day = pa.scalar(19000, pa.date32()).as_py()
    sink(spark.createDataFrame([(1, "DE", day), (2, "F/R ä", None)], first), 0)
    sink(spark.createDataFrame([(1, "DE", day)], first), 0)
    sink(
        spark.createDataFrame(
            [("new", 3, None, day)], "Name STRING, id BIGINT, Country STRING, day DATE"
        ),
        1,
    )
    expected = [
        {"id": 1, "Country": "DE", "day": day, "Name": None},
        {"id": 2, "Country": "F/R ä", "day": None, "Name": None},
        {"id": 3, "Country": None, "day": day, "Name": "new"},
    ]
    assert rows_of(uri, "id") == expected
    table = deltalake.DeltaTable(str(uri))
    assert table.metadata().partition_columns == ["Country", "day"]
    with pytest.raises(InvalidRequest, match=r"column id .*long.* rows have id .*string"):
        sink(spark.createDataFrame([("x", "DE", day)], first.replace("BIGINT", "STRING")), 2)
    with pytest.raises(InvalidRequest, match="partitioned by Country, day, the sink by nothing"):
        TableSink(PipelineSink(table=str(uri)), "app")(
            spark.createDataFrame([(1,)], "id BIGINT"), 2
        )
    with pytest.raises(InvalidRequest, match="partitionBy: x is double"):
        other = TableSink(PipelineSink(table=str(tmp_path / "other"), partitionBy=["x"]), "app")
        other(spark.createDataFrame([(1.5,)], "x DOUBLE"), 0)
    assert rows_of(uri, "id") == expected


def test_small_files_of_a_table_are_merged(spark: Any, tmp_path: Path) -> None:
    sink = TableSink(PipelineSink(table=str(tmp_path / "lake")), "app")
    for number in range(21):
        sink(spark.createDataFrame([(number,)], "id INT").coalesce(1), number)
    table = deltalake.DeltaTable(str(tmp_path / "lake"))
    assert len(table.file_uris()) < 5
    assert [row["id"] for row in rows_of(tmp_path / "lake", "id")] == list(range(21))


def test_files_that_no_commit_names_are_removed_after_two_days(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_sink, "CLEANUP_INTERVAL", 2)
    lake = tmp_path / "lake"
    sink = TableSink(PipelineSink(table=str(lake)), "app")
    sink(spark.createDataFrame([(0,)], "id INT"), 0)
    written = next(lake.glob("*.parquet")).read_bytes()
    old, young = lake / "old.parquet", lake / "young.parquet"
    for stray, days in ((old, 3), (young, 1)):
        stray.write_bytes(written)
        os.utime(stray, (time.time() - days * 86400,) * 2)
    sink(spark.createDataFrame([(1,)], "id INT"), 1)
    assert (old.exists(), young.exists()) == (False, True)
    assert [row["id"] for row in rows_of(lake, "id")] == [0, 1]


def test_an_upsert_keeps_the_last_row_of_each_key_and_deletes(spark: Any, tmp_path: Path) -> None:
    uri, columns = tmp_path / "state", "customerId STRING, v INT, _offset BIGINT, _gone BOOLEAN"
    given = PipelineSink(
        table=str(uri), mode="upsert", key=["customerId"], orderBy=["_offset"], delete="_gone"
    )
    sink = TableSink(given, "app")
    first = [("a", 1, 0, False), ("b", 1, 1, None), ("a", 2, 2, False), ("c", 9, 3, True)]
    sink(spark.createDataFrame(first, columns), 0)
    assert rows_of(uri, "customerId") == [{"customerId": "a", "v": 2}, {"customerId": "b", "v": 1}]
    second = [("a", None, 4, True), ("b", 7, 6, False), ("b", 5, 5, True), ("d", 4, 7, False)]
    for _ in range(2):  # the second time it is there
        sink(spark.createDataFrame(second, columns), 1)
    state = [{"customerId": "b", "v": 7}, {"customerId": "d", "v": 4}]
    assert rows_of(uri, "customerId") == state
    unordered = TableSink(PipelineSink(table=str(uri), mode="upsert", key=["customerId"]), "app")
    with pytest.raises(InvalidRequest, match="two rows of one batch have the same customerId"):
        unordered(spark.createDataFrame(second, columns), 2)
    with pytest.raises(InvalidRequest, match="a row has no customerId"):
        unordered(spark.createDataFrame([(None, 1, 1, False)], columns), 2)
    assert rows_of(uri, "customerId") == state


SHARED = """
name: shop-{tag}
sources:
  orders:
    topic: orders
    format: json
    schema: "country STRING, amount BIGINT"
    options: {{directory: {directory}}}
steps:
  - {{name: seen, python: "seen_{tag}:count"}}
  - {{name: sums, sql: "SELECT country, sum(amount) AS total FROM seen GROUP BY country"}}
  - {{name: large, sql: "SELECT * FROM sums WHERE total > 10"}}
sinks:
  all: {{table: {directory}/all, from: sums, mode: upsert, key: [country]}}
  large: {{table: {directory}/large, mode: upsert, key: [country]}}
  calls: {{foreachBatch: "seen_{tag}:fail_once", mode: update}}
checkpoint: {directory}/checkpoint
"""
SEEN = """
from pyspark.sql import functions as f
from pyspark.sql.types import LongType

COUNTER = None
FAILED = []

def count(df):
    global COUNTER
    COUNTER = COUNTER or df.sparkSession.sparkContext.accumulator(0)
    counter = COUNTER

    def one(value):
        counter.add(1)
        return value

    return df.withColumn("amount", f.udf(one, LongType())("amount"))

def fail_once(batch, number):
    if number == 1 and not FAILED:
        FAILED.append(number)
        raise RuntimeError("the third sink is away")
"""


def test_sinks_that_share_an_aggregate_compute_it_once_and_write_each_batch_once(
    spark: Any, tmp_path: Path, write_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = uuid.uuid4().hex[:8]
    (tmp_path / f"seen_{tag}.py").write_text(SEEN)
    monkeypatch.syspath_prepend(tmp_path)
    seen: Any = __import__(f"seen_{tag}")
    file = parse(SHARED.format(tag=tag, directory=tmp_path))

    def orders(*rows: tuple[str, int]) -> None:
        write_topic("orders", [json.dumps({"country": c, "amount": a}).encode() for c, a in rows])

    orders(("DE", 7), ("FR", 11), ("DE", 8))
    report = Runner(file).run(spark)
    assert seen.COUNTER.value == 3, "each record was computed once, for three sinks"
    graph = {node.name: node.inputs for node in report.graph if node.kind != "source"}
    assert graph == {
        "seen": ["orders"],
        "sums": ["seen"],
        "large": ["large"],
        "all": ["sums"],
        "calls": ["large"],
    }
    assert [batch.rows for batch in report.batches] == [3]
    assert report.state_rows == 2
    orders(("FR", 1), ("IT", 20))
    with pytest.raises(PipelineFailed, match=r"sink calls: .*the third sink is away"):
        Runner(file).run(spark)
    Runner(file).run(spark)  # the batch comes again to all three
    sums = {"DE": 15, "FR": 12, "IT": 20}
    assert {row["country"]: row["total"] for row in rows_of(tmp_path / "all", "country")} == sums
    assert {row["country"]: row["total"] for row in rows_of(tmp_path / "large", "country")} == sums
    versions = deltalake.DeltaTable(str(tmp_path / "all")).version()
    assert versions == 2, "a creation and two merges: the batch that came again added nothing"


ENRICHED = """
name: enrich
sources:
  orders:
    topic: orders
    format: json
    schema: "id INT, customer STRING"
    options: {{directory: {directory}, maxOffsetsPerTrigger: 1}}
  customers: {{{customers}, refresh: {refresh}}}
steps:
  - name: named
    sql: "SELECT o.id, c.name FROM orders o LEFT JOIN customers c ON c.customer = o.customer"
sink: {{table: {directory}/out}}
checkpoint: {directory}/checkpoint-{refresh}
"""


@pytest.mark.parametrize("kind", ["table", "parquet"])
def test_a_stream_is_joined_with_a_table_that_is_read_again(
    spark: Any, tmp_path: Path, write_topic: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "lake" / "customers"  # not where the topics are

    def customer(number: int) -> None:
        rows = spark.createDataFrame([("a", f"name {number}")], "customer STRING, name STRING")
        if kind == "parquet":
            rows.write.mode("overwrite").parquet(str(where))
        else:
            upsert = PipelineSink(table=str(where), mode="upsert", key=["customer"])
            TableSink(upsert, "names")(rows, number)

    customer(0)
    write_topic("orders", [b'{"id": %d, "customer": "a"}' % i for i in range(3)])
    real = TableSink.__call__

    def changing(self: TableSink, batch: Any, number: int) -> None:
        real(self, batch, number)
        if self._app == "enrich":
            customer(number + 1)

    monkeypatch.setattr(TableSink, "__call__", changing)
    given = {"directory": tmp_path, "customers": f"{kind}: {where}"}
    Runner(parse(ENRICHED.format(**given, refresh=1))).run(spark)
    assert [row["name"] for row in rows_of(tmp_path / "out", "id")] == [
        "name 0",
        "name 1",
        "name 2",
    ]


def test_a_table_that_is_read_again_does_not_go_before_state(
    spark: Any, tmp_path: Path, write_topic: Any
) -> None:
    from penstock.pipeline.query_builder import build

    write_topic("orders", [b"{}"])
    TableSink(PipelineSink(table=str(tmp_path / "c")), "c")(
        spark.createDataFrame([("a", "x")], "customer STRING, name STRING"), 0
    )
    text = ENRICHED.format(directory=tmp_path, customers=f"table: {tmp_path}/c", refresh=1)
    text = text.replace("SELECT o.id, c.name", "SELECT c.name, count(*) AS n")
    text = text.replace("= o.customer", "= o.customer GROUP BY c.name")
    text = text.replace("/out}", "/out, mode: upsert, key: [name]}")
    with pytest.raises(ConfigError, match=r"customers is read again.*`refresh: 0`"):
        build(spark, parse(text))
    assert build(spark, parse(text.replace("refresh: 1", "refresh: 0"))).columns == ["name", "n"]


CDC = """
name: customers-{tag}
sources:
  changes:
    topic: customers-{tag}
    format: json
    schema: "name STRING, country STRING"
    columns: [key]
    deadLetter: {{topic: bad-{tag}}}
    options: {{maxOffsetsPerTrigger: 3}}
steps:
  - name: customers
    sql: SELECT CAST(_key AS STRING) AS id, name, country, _offset, _tombstone FROM changes
sinks:
  lake: {{table: {directory}/customers, mode: upsert, key: [id], orderBy: [_offset], delete: _tombstone}}
  copy: {{topic: copy-{tag}, from: keyed}}
checkpoint: {directory}/checkpoint
broker: {tcp}
url: {url}
"""


def test_a_compacted_topic_becomes_the_table_of_its_current_state(
    spark: Any, server: Any, tcp: str, tmp_path: Path
) -> None:
    from penstock.client import SyncClient

    tag = uuid.uuid4().hex[:8]
    text = CDC.format(tag=tag, directory=tmp_path, tcp=tcp, url=server.url)
    keyed = "SELECT _key AS key, IF(_tombstone, NULL, name) AS payload, CAST(1 AS INT) AS partition"
    text = text.replace("sinks:\n", f"  - {{name: keyed, sql: '{keyed} FROM changes'}}\nsinks:\n")
    text = text.replace("  lake: {", "  lake: {from: customers, ")

    def change(client: Any, key: str, **fields: Any) -> None:
        payload = json.dumps(fields).encode() if fields else None
        client.topic(f"customers-{tag}").produce(payload, key=key.encode())

    with SyncClient(topics=tcp) as client:
        for name in ("customers", "copy"):
            client.topic(f"{name}-{tag}").create(format="kafka", partitions=2)
        change(client, "a", name="Ada", country="UK")
        change(client, "b", name="Bob", country="US")
        change(client, "a", name="Ada L.", country="UK")
        change(client, "b")
        Runner(parse(text)).run(spark)
        state = [{"id": "a", "name": "Ada L.", "country": "UK"}]
        assert rows_of(tmp_path / "customers", "id") == state
        change(client, "c", name="Cy", country="DE")
        change(client, "a", name="Ada", country="DE")
        Runner(parse(text)).run(spark)
    columns = ["partition", "key", "payload"]
    copies = [
        (row["key"], row["payload"] or None)
        for row in batch_rows(columns, broker=tcp, topic=f"copy-{tag}")
        if row["partition"] == 1
    ]
    assert rows_of(tmp_path / "customers", "id") == [
        {"id": "a", "name": "Ada", "country": "DE"},
        {"id": "c", "name": "Cy", "country": "DE"},
    ]
    first = [(b"a", b"Ada"), (b"b", b"Bob"), (b"a", b"Ada L."), (b"b", None)]
    expected = [*first, (b"c", b"Cy"), (b"a", b"Ada")]
    assert sorted(copies, key=str) == sorted(expected, key=str)
