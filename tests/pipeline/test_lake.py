"""Archives as Delta tables: each record once, whatever is killed when, and readable by others."""

import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from penstock.errors import InvalidRequest, NotFound
from penstock.log.topic_files import TopicFiles
from penstock.pipeline.jobs import archive as archive_job
from penstock.pipeline.jobs.archive_directory import Entry, Lake, Manifest
from penstock.pipeline.lake import maintenance
from penstock.pipeline.lake.data_files import TOPIC as TOPIC_KIND
from penstock.pipeline.lake.data_files import FileWriter, read_range
from penstock.pipeline.lake.maintenance import compact, expire
from penstock.pipeline.lake.storage import Storage
from penstock.pipeline.lake.table import SETTINGS, LakeTable, Superseded, folder, new_run
from penstock.pipeline.sources.topic import DataLoss
from tests.pipeline.archiver import TOPIC, LocalArchiver, archiver, merge_here
from tests.pipeline.conftest import Append

NOON = 1_794_830_400_000_000  # 2026-11-16 12:00 in microseconds


def batch(first: int, count: int, *, at: int = NOON) -> pa.RecordBatch:
    times = pa.array([at + i for i in range(count)], pa.timestamp("us", tz="UTC"))
    payloads = [b"%d" % i for i in range(first, first + count)]
    columns = [pa.array(range(first, first + count)), times, pa.array(payloads)]
    return pa.RecordBatch.from_arrays(columns, schema=TOPIC_KIND.columns)


def offsets(table: LakeTable) -> list[int]:
    rows = DeltaTable(table.storage.uri, storage_options=table.storage.options)
    return sorted(rows.to_pyarrow_table(columns=["offset"]).column("offset").to_pylist())


def made(root: Path | str, **options: Any) -> LakeTable:
    table = LakeTable(str(root), "topic", "orders", **options)
    table.create("one", TOPIC_KIND.columns, {})
    return table


def add(table: LakeTable, first: int, count: int, *, at: int = NOON) -> None:
    base, run = table.open(), new_run()
    assert base is not None
    writer = FileWriter(table.storage, TOPIC_KIND, base.columns(), run)
    table.append(base, run, writer.write([batch(first, count, at=at)]), first + count)


def test_of_two_runs_from_one_position_one_adds_its_rows_and_the_other_nothing(
    tmp_path: Path,
) -> None:
    table = made(tmp_path)
    add(table, 0, 10)
    bases = [table.open(), table.open()]
    runs = []
    for base in bases:
        assert base is not None
        run = new_run()
        files = FileWriter(table.storage, TOPIC_KIND, base.columns(), run).write([batch(10, 5)])
        runs.append((base, run, files))
    assert table.append(*runs[0], 15).position == 15
    with pytest.raises(Superseded, match="up to 15 meanwhile; this one has added nothing"):
        table.append(*runs[1], 15)
    assert offsets(table) == list(range(15))
    assert not (table.storage.local / runs[1][2][0].path).exists()


def test_a_run_whose_commit_was_answered_with_an_error_knows_its_own_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, commit = made(tmp_path), LakeTable._commit

    def lost(*given: Any) -> bool:
        assert commit(*given)
        return False  # as when the store's answer is lost and the second try finds the first

    monkeypatch.setattr(LakeTable, "_commit", lost)
    add(table, 0, 10)
    assert offsets(table) == list(range(10))


def test_two_compactions_or_one_beside_an_expiry_keep_every_row_once(tmp_path: Path) -> None:
    table = made(tmp_path)
    for i in range(8):
        add(table, 10 * i, 10)
    base = table.open()
    assert base is not None
    old, first, second = base.files(), new_run(), new_run()
    new = [
        merge_here(FileWriter(table.storage, TOPIC_KIND, base.columns(), run), [old])
        for run in (first, second)
    ]
    assert table.replace(base, first, old, new[0]) is not None
    assert table.replace(base, second, old, new[1]) is None
    assert expire(table, base, 0, date(2030, 1, 1)) == 0
    assert offsets(table) == list(range(80))
    assert not (table.storage.local / new[1][0].path).exists()
    assert (table.storage.local / old[0].path).exists(), "readers of older versions need it"


def test_small_files_are_merged_old_days_go_and_unused_files_are_removed(tmp_path: Path) -> None:
    table = made(tmp_path)
    day = 86_400_000_000
    add(table, 0, 10, at=NOON - 40 * day)
    for i in range(1, 9):
        add(table, 10 * i, 10)
    assert compact(table, 1 << 20, merge_here) == 8
    snapshot = table.open()
    assert snapshot is not None
    assert snapshot.position == 90
    assert sorted((file.rows, file.first, file.last) for file in snapshot.files()) == [
        (10, 0, 9),
        (80, 10, 89),
    ]
    assert compact(table, 1 << 20, merge_here) == 0
    assert expire(table, snapshot, 30, date(2026, 11, 16)) == 1
    assert offsets(table) == list(range(10, 90))
    orphan = table.storage.local / "date=2026-11-16" / "orphan.parquet"
    orphan.write_bytes(b"half a file")
    assert table.vacuum(1) == 0, "a run may still be writing it"
    for path in table.storage.local.glob("date=*/*"):
        os.utime(path, (0, 0))
    assert table.vacuum(0) >= 1
    assert not orphan.exists()
    assert offsets(table) == list(range(10, 90))


def test_a_task_writes_a_file_per_day_and_bounds_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, day = made(tmp_path), 86_400_000_000
    monkeypatch.setattr("penstock.pipeline.lake.data_files.BUFFERED_BYTES", 200)
    monkeypatch.setattr("penstock.pipeline.lake.data_files.OPEN_FILES", 2)
    parts = [batch(10 * i, 10, at=NOON + (i % 3) * day) for i in range(6)]
    mixed = pa.Table.from_batches(parts).combine_chunks().to_batches()
    files = FileWriter(table.storage, TOPIC_KIND, TOPIC_KIND.columns, "r").write([*mixed, *parts])
    assert sum(file.rows for file in files) == 120
    assert {file.date for file in files} == {"2026-11-16", "2026-11-17", "2026-11-18"}
    assert all(file.since is not None and file.since <= file.until for file in files)
    large = FileWriter(table.storage, TOPIC_KIND, TOPIC_KIND.columns, "r", file_bytes=1)
    monkeypatch.setattr("penstock.pipeline.lake.data_files.ROW_GROUP_BYTES", 1)
    assert len(large.write(parts)) == 6


def test_a_range_is_read_in_order_whatever_files_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = made(tmp_path)
    for first, count in ((0, 30), (45, 15), (60, 40), (30, 15)):
        add(table, first, count)
    snapshot = table.open()
    assert snapshot is not None
    monkeypatch.setattr("penstock.pipeline.lake.data_files.READ_BYTES", 800)
    for start, stop in ((0, 100), (10, 65), (29, 31), (99, 100), (100, 120)):
        rows = [
            value
            for part in read_range(
                *(table.storage, snapshot.files(), TOPIC_KIND, TOPIC_KIND.columns),
                range(start, stop),
            )
            for value in part.column("offset").to_pylist()
        ]
        assert rows == list(range(start, min(stop, 100)))


def test_other_engines_read_the_table_and_skip_by_its_statistics(tmp_path: Path) -> None:
    import duckdb
    import polars

    table = made(tmp_path)
    for i in range(4):
        add(table, 100 * i, 100, at=NOON + i * 3_600_000_000)
    uri = table.storage.uri
    lazy = polars.scan_delta(uri)
    assert lazy.select(polars.len(), polars.col("offset").sum()).collect().row(0) == (400, 79800)
    rows = DeltaTable(uri).to_pyarrow_dataset()
    late = datetime(2026, 11, 16, 14, 30, tzinfo=UTC)
    query = "SELECT count(*), min(t.offset) FROM rows t WHERE t.timestamp > ?"
    with duckdb.connect() as connection:
        connection.register("rows", rows)
        assert connection.execute(query, [late]).fetchall() == [(100, 300)]
    assert len(DeltaTable(uri).file_uris(file_pruning_predicate="date = '2026-11-16'")) == 4
    assert [file.since for file in table.require().files() if file.first == 300] == [
        NOON + 3 * 3_600_000_000
    ]
    batches = DeltaTable(uri).scan(columns=["offset"], predicate="offset >= 350")
    assert sorted(v for b in batches for v in pa.record_batch(b).column(0).to_pylist()) == list(
        range(350, 400)
    )


def test_new_columns_are_added_once_and_are_null_in_the_rows_before(tmp_path: Path) -> None:
    table = made(tmp_path)
    add(table, 0, 10)
    bases = [table.open(), table.open()]
    for base in bases:
        assert base is not None
        grown = table.add_columns(base, [pa.field("amount", pa.float64())])
        assert grown.columns().names == ["offset", "timestamp", "payload", "amount"]
    add(table, 10, 10)
    rows = DeltaTable(table.storage.uri).to_pyarrow_table()
    assert (rows.num_rows, rows.column("amount").null_count) == (20, 20)


def test_commits_stay_fast_however_many_there_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soak: bool
) -> None:
    """By the commits since the last checkpoint, which a commit reads, not by the clock."""
    monkeypatch.setitem(SETTINGS, "delta.checkpointInterval", "10")
    table = made(tmp_path)
    for i in range(2000 if soak else 35):
        add(table, i, 1)
    log = sorted(path.name for path in (table.storage.local / "_delta_log").iterdir())
    newest = max(int(name.split(".")[0]) for name in log if ".checkpoint." in name)
    assert table.require().version - newest <= 10
    assert table.require().position == len(offsets(table))


def test_names_become_directories_that_other_engines_take(tmp_path: Path) -> None:
    import polars

    assert folder("orders") == "orders"
    assert len({folder(name) for name in ("a b", "a~20b", "a%20b", "a~b", "ä", "a=b")}) == 6
    table = LakeTable(str(tmp_path), "queue", "a=b c~%ä")
    snapshot = table.create("one", TOPIC_KIND.columns, {})
    assert snapshot.properties["penstock.name"] == "a=b c~%ä"
    assert polars.scan_delta(table.storage.uri).collect().height == 0
    with pytest.raises(InvalidRequest, match="must not contain '%'"):
        Storage(str(tmp_path / "a%20b"))
    with pytest.raises(NotFound, match=r"penstock pipeline run archive .* --topic other"):
        LakeTable(str(tmp_path), "topic", "other").require()


class Killer:
    """Runs the job in children that die at a step."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.pipeline.archiver"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, root: Path, topics: Path, step: int) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{root} {topics} {step}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    one = Killer()
    yield one
    one.close()


def test_a_run_killed_at_any_step_adds_each_record_once(
    tmp_path: Path, write_topic: Append, killer: Killer, soak: bool
) -> None:
    topics, root = tmp_path / "topics", tmp_path / "lake"
    seed = random.randrange(3)
    stride = 1 if soak else 9
    step, produced, killed = seed, 0, 0
    while True:
        write_topic(TOPIC, [b"%d" % i for i in range(produced, produced + 50)], directory=topics)
        produced += 50
        outcome = killer.run(root, topics, step)
        assert outcome in ("killed", "done"), f"seed {seed}, step {step}"
        table = LakeTable(str(root), "topic", TOPIC)
        snapshot = table.open()
        if snapshot is not None:
            end = snapshot.position or 0
            assert offsets(table) == list(range(end)), f"seed {seed}, step {step}"
        if outcome == "done":
            break
        killed += 1
        step += stride
    assert killed > 5
    assert offsets(table) == list(range(produced))
    assert sorted(
        int(value)
        for value in DeltaTable(table.storage.uri).to_pyarrow_table()["payload"].to_pylist()
    ) == list(range(produced))


def test_two_archivers_a_compaction_and_readers_at_once(
    tmp_path: Path, write_topic: Append, monkeypatch: pytest.MonkeyPatch, soak: bool
) -> None:
    topics, root = tmp_path / "topics", tmp_path / "lake"
    monkeypatch.setattr(archive_job, "RECORDS_PER_STEP", 25)
    monkeypatch.setattr(maintenance, "MERGED_FILES", 4)
    rounds = 60 if soak else 6
    produced, ended = 100 * rounds, threading.Event()
    outcomes: Counter[str] = Counter()
    failures: list[Exception] = []

    def working(work: Any) -> threading.Thread:
        def loop() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001
                failures.append(error)
                ended.set()

        thread = threading.Thread(target=loop)
        thread.start()
        return thread

    def archiving() -> None:
        while not ended.is_set():
            try:
                outcomes["rows"] += archiver(root, topics).run(None).rows
            except Superseded:
                outcomes["superseded"] += 1

    def compacting() -> None:
        while not ended.is_set():
            outcomes["merged"] += archiver(root, topics).maintain(None).merged

    def reading() -> None:
        table = LakeTable(str(root), "topic", TOPIC)
        while not ended.is_set():
            snapshot = table.open()
            if snapshot is None or snapshot.position is None:
                continue
            rows = snapshot.delta.to_pyarrow_table(columns=["offset"]).column("offset")
            assert sorted(rows.to_pylist()) == list(range(snapshot.position))
            outcomes["read"] += 1

    write_topic(TOPIC, [b"x"] * 100, directory=topics)
    threads = [working(work) for work in (archiving, archiving, compacting, reading)]
    for _ in range(rounds - 1):
        write_topic(TOPIC, [b"x"] * 100, directory=topics)
    table = LakeTable(str(root), "topic", TOPIC)
    deadline = datetime.now(UTC) + timedelta(seconds=120)
    while not ended.is_set() and datetime.now(UTC) < deadline:
        snapshot = table.open()
        if snapshot is not None and snapshot.position == produced and outcomes["merged"]:
            ended.set()
        ended.wait(0.02)
    ended.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert offsets(table) == list(range(produced))
    assert outcomes["merged"]
    assert outcomes["read"]


def old(root: Path, topics: Path, until: int) -> Lake:
    """An archive as earlier releases wrote them, with Spark's times of 96 bits."""
    from pyarrow import parquet

    lake, name = Lake(str(root)), "topic=orders/date=2026-11-16/run-0.parquet"
    (root / name).parent.mkdir(parents=True)
    rows = pa.Table.from_batches([batch(0, until)])
    parquet.write_table(rows, root / name, use_deprecated_int96_timestamps=True)
    position = {"incarnation": TopicFiles(topics / TOPIC).incarnation, "next": until}
    entry = Entry(name, until, (root / name).stat().st_size, 0, until - 1)
    lake.replace(Manifest("topic", "orders", position, [entry]))
    return lake


def test_an_archive_of_an_earlier_release_is_converted_without_reading_a_record(
    tmp_path: Path, write_topic: Append, killer: Killer
) -> None:
    import polars

    topics, root = tmp_path / "topics", tmp_path / "lake"
    write_topic(TOPIC, [b"%d" % i for i in range(60)], directory=topics)
    lake = old(root, topics, 40)
    before = next(root.glob("topic=orders/*/*.parquet")).stat().st_ino
    with pytest.raises(InvalidRequest, match="Run this once with --convert"):
        archiver(root, topics).run(None)
    steps = 0
    while killer.run(root, topics, steps) == "killed" and steps < 12:
        steps += 2
    job = archiver(root, topics)
    job.convert()
    job.run(None)
    assert offsets(job.table) == list(range(60))
    assert before in {path.stat().st_ino for path in job.table.storage.local.glob("date=*/*")}
    assert lake.names() == []
    assert not list(root.glob("topic=orders/*/*.parquet"))
    assert polars.scan_delta(job.table.storage.uri).select("timestamp").collect().height == 60


def test_a_topic_made_again_and_offsets_that_aged_out_are_refused(
    tmp_path: Path, write_topic: Append
) -> None:
    topics, root = tmp_path / "topics", tmp_path / "lake"
    write_topic(TOPIC, [b"x"] * 10, directory=topics)
    job: LocalArchiver = archiver(root, topics)
    assert (job.run(None).rows, job.run(None).rows) == (10, 0)
    (topics / TOPIC).rename(tmp_path / "old")
    write_topic(TOPIC, [b"x"] * 10, directory=topics)
    with pytest.raises(DataLoss, match="deleted and created again since it was archived"):
        job.run(None)
