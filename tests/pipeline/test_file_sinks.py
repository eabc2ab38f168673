"""Sinks of pipeline files beyond topics and queues, several of them, and steps on given rows."""

import json
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from penstock.cli import app
from penstock.cli.pipeline import Spark
from penstock.errors import ConfigError, InvalidRequest
from penstock.pipeline.lake.data_files import ROWS, FileWriter
from penstock.pipeline.pipeline_file import PipelineSink, parse
from penstock.pipeline.runner import Runner
from penstock.pipeline.sinks.table import TableSink
from penstock.pipeline.validation import check
from tests.support.cli import CliRunner

FILE = """
name: shop
sources:
  orders:
    topic: orders
    format: json
    schema: "id BIGINT, amount DOUBLE"
    deadLetter: {topic: bad}
    options: {directory: %s}
steps:
  - {name: big, sql: "SELECT id, amount FROM orders WHERE amount > 100"}
  - {name: named, sql: "SELECT id, concat('n', id) AS name FROM big"}
sinks:
  lines: {format: json, options: {path: %s/lines}}
  lake: {table: %s/lake, from: big}
  calls: {foreachBatch: "shop_sink:keep"}
checkpoint: %s/checkpoint
"""
FUNCTION = """
CALLS = []

def keep(batch, number):
    CALLS.append((number, sorted(row.name for row in batch.collect())))
"""


def shop(directory: Path) -> str:
    return FILE % ((directory,) * 4)


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "shop_sink.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(tmp_path)
    import shop_sink

    return shop_sink


def test_a_table_keeps_the_files_of_a_commit_whose_answer_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = pa.RecordBatch.from_pydict({"id": [1, 2]})
    table = deltalake.DeltaTable.create(str(tmp_path), batch.schema)
    stale = deltalake.DeltaTable(str(tmp_path))
    sink, real = (
        TableSink(PipelineSink(table=str(tmp_path)), "app"),
        deltalake.DeltaTable.create_write_transaction,
    )

    def lost(*given: Any, **more: Any) -> None:
        real(*given, **more)  # and the store's second try finds the first
        raise deltalake.exceptions.CommitFailedError("conflict")

    monkeypatch.setattr(deltalake.DeltaTable, "create_write_transaction", lost)
    files = [FileWriter(sink._storage, ROWS, batch.schema, run).write([batch]) for run in "ab"]
    assert sink._commit(table, "app", 0, "a", files[0])
    assert not sink._commit(stale, "app", 0, "b", files[1]), "another run has the batch"
    assert table.to_pyarrow_table().num_rows == 2


def test_a_table_with_partitions_is_refused_whose_columns_would_be_lost(tmp_path: Path) -> None:
    names = ["id", "day"]
    schema = pa.schema([(name, pa.string()) for name in names])
    deltalake.DeltaTable.create(str(tmp_path), schema, partition_by=["day"])
    with pytest.raises(InvalidRequest, match="is partitioned by day"):
        TableSink(PipelineSink(table=str(tmp_path)), "app")._table(schema)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("table:", "from: nowhere, table:", "sink lake: `from` names 'nowhere'; there are orders"),
        ("from: big", "queue: q", "the sink lake is one of topic, queue, parquet, route, table"),
        ("shop_sink:keep", "shop_sink", "sink calls: foreachBatch is module:function"),
        ("shop_sink:keep", "shop_sink:gone", "sink calls: shop_sink has no function 'gone'"),
        ("from: big", "from: big, mode: update", "sink lake.mode is append or upsert"),
        ("  lines:", "  steps:", "'steps' cannot be a sink's name"),
        ('keep"', 'keep", partitionBy: [id]', "sink calls.partitionBy is for table, parquet"),
    ],
)
def test_what_is_wrong_with_a_sink_is_said_with_its_name(
    old: str, new: str, text: str, tmp_path: Path, functions: Any
) -> None:
    check(parse(shop(tmp_path)), ask_broker=False)
    file = shop(tmp_path).replace("from: big", "").replace(", }", "}")
    file = file if "from: nowhere" in new else shop(tmp_path)
    with pytest.raises(ConfigError) as refused:
        check(parse(file.replace(old, new, 1)), ask_broker=False)
    assert text in str(refused.value)


@pytest.mark.spark
def test_a_file_writes_to_any_format_a_table_and_a_function_each_row_once(
    spark: Any, tmp_path: Path, write_topic: Any, functions: Any
) -> None:
    from deltalake import DeltaTable

    def run(first: int, last: int) -> None:
        rows = [{"id": i, "amount": 60.0 * i} for i in range(first, last)]
        write_topic("orders", [json.dumps(row).encode() for row in rows])
        file = shop(tmp_path).replace("    deadLetter: {topic: bad}\n", "")
        Runner(parse(file)).run(spark)

    run(0, 4)
    # A batch whose commit Spark did not hear of is run again, and adds nothing to the table.
    commits = tmp_path / "checkpoint" / "shared-big-append" / "commits"
    (commits / "0").unlink()
    (commits / ".0.crc").unlink(missing_ok=True)
    run(4, 6)
    assert (commits / "1").exists()
    lines = [
        json.loads(line)
        for file in (tmp_path / "lines").glob("*.json")
        for line in file.read_text().splitlines()
    ]
    assert sorted(line["name"] for line in lines) == ["n2", "n3", "n4", "n5"]
    assert functions.CALLS == [(0, ["n2", "n3"]), (0, ["n2", "n3"]), (1, ["n4", "n5"])]
    table = DeltaTable(str(tmp_path / "lake"))
    rows = table.to_pyarrow_table().sort_by("id").to_pylist()
    assert rows == [{"id": i, "amount": 60.0 * i} for i in (2, 3, 4, 5)]


@pytest.mark.spark
def test_steps_run_on_given_rows_and_are_previewed(
    spark: Any, tmp_path: Path, write_topic: Any, functions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spark, "session", lambda *_: lambda: spark)
    file, given, expect = (tmp_path / name for name in ("shop.yaml", "in.json", "out.json"))
    file.write_text(shop(tmp_path))
    records = [
        {"id": 1, "amount": 500},
        {"id": 2, "amount": 5},
        {"id": 3, "amount": 101.5},
        "{oops",
    ]
    given.write_text(json.dumps(records))

    def penstock(*words: str) -> Any:
        return CliRunner().invoke(app, ["pipeline", *map(str, words)])

    printed = penstock("test", file, "--input", given)
    assert printed.exit_code == 0, printed.output
    named = [{"id": 1, "name": "n1"}, {"id": 3, "name": "n3"}]
    assert [json.loads(line) for line in printed.stdout.splitlines()] == named
    big = [{"id": 3, "amount": 101.5}, {"amount": 500.0, "id": 1}]  # in any order
    expect.write_text(json.dumps({"named": named, "big": big}))
    fine = penstock("test", file, "--input", given, "--expect", expect)
    assert (fine.exit_code, fine.stdout) == (0, f"{file}: named, big as expected\n")
    expect.write_text(json.dumps([{"id": 1, "name": "n1"}, {"id": 2, "name": "n2"}]))
    differs = penstock("test", file, "--input", given, "--expect", expect)
    assert differs.exit_code == 1
    assert 'named: missing    {"id": 2, "name": "n2"}' in differs.stderr
    assert 'named: unexpected {"id": 3, "name": "n3"}' in differs.stderr
    expect.write_text('{"nothing": []}')
    wrong = penstock("test", file, "--input", given, "--expect", expect)
    assert wrong.exit_code == 1
    output = " ".join(wrong.stderr.split())
    assert "unknown view 'nothing'; the views are orders, big, named, dead:orders" in output

    write_topic("orders", [json.dumps(row).encode() for row in records[:3]])
    shown = penstock("preview", file, "--rows", 1, "--json")
    assert shown.exit_code == 0, shown.output
    first = json.loads(shown.stdout)
    assert list(first) == ["orders", "big", "named"]
    assert first["named"] == [{"id": 1, "name": "n1"}]
    assert first["orders"][0]["_offset"] == 0
    assert not (tmp_path / "checkpoint").exists()
