"""Archives as Delta tables: each record once, whatever is killed when, and readable by others."""

import errno
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from copy import copy
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from penstock.errors import Conflict, InvalidRequest, NotFound
from penstock.log.topic_files import TopicFiles
from penstock.net.topic_link import TopicLink
from penstock.pipeline.jobs import archive as archive_job
from penstock.pipeline.jobs import archive_watch
from penstock.pipeline.jobs.archive import Archiver, Origin, Payloads
from penstock.pipeline.jobs.archive_directory import DirectoryEntry, Lake, Manifest
from penstock.pipeline.jobs.archive_watch import ArchiveWatch
from penstock.pipeline.lake import commits, data_files, maintenance
from penstock.pipeline.lake import table as lake_table
from penstock.pipeline.lake.commits import new_run
from penstock.pipeline.lake.data_files import TOPIC as TOPIC_KIND
from penstock.pipeline.lake.data_files import FileWriter, read_range
from penstock.pipeline.lake.maintenance import compact, expire
from penstock.pipeline.lake.storage import Storage
from penstock.pipeline.lake.table import LakeTable, Snapshot, Superseded, folder
from penstock.pipeline.lake.typed_columns import TypedColumns
from penstock.pipeline.report import RunReport
from penstock.pipeline.sources.topic import DataLoss, TopicReader
from penstock.protocol import frames
from tests.pipeline import scale
from tests.pipeline.archiver import NEVER, TOPIC, LocalArchiver, archiver, merge_here
from tests.pipeline.conftest import Append
from tests.pipeline.support import Driver, batch_rows, patiently, rows_of, topic_options
from tests.support.wait import until

NOON = 1_794_830_400_000_000  # 2026-11-16 12:00 in microseconds


def batch(first: int, count: int, *, at: int = NOON) -> pa.RecordBatch:
    times = pa.array([at + i for i in range(count)], pa.timestamp("us", tz="UTC"))
    payloads = [b"%d" % i for i in range(first, first + count)]
    columns = [pa.array(range(first, first + count)), times, pa.array(payloads)]
    return pa.RecordBatch.from_arrays(columns, schema=TOPIC_KIND.columns)


def offsets(table: LakeTable) -> list[int]:
    rows = DeltaTable(table.storage.uri, storage_options=table.storage.options)
    return sorted(rows.to_pyarrow_table(columns=["offset"]).column("offset").to_pylist())


def opened(table: LakeTable) -> Snapshot:
    snapshot = table.open()
    assert snapshot is not None
    return snapshot


def made(root: Path | str, **options: Any) -> LakeTable:
    table = LakeTable(str(root), "topic", "orders", **options)
    table.create("one")
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


def test_a_first_run_that_finds_the_table_made_and_filled_meanwhile_adds_nothing(
    tmp_path: Path, write_topic: Append, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics, root, create = tmp_path / "topics", tmp_path / "lake", LakeTable.create
    write_topic(TOPIC, [b"x"] * 10, directory=topics)

    def late(*given: Any) -> Any:
        monkeypatch.setattr(LakeTable, "create", create)
        assert archiver(root, topics).run(None).rows == 10
        return create(*given)

    monkeypatch.setattr(LakeTable, "create", late)
    with pytest.raises(Superseded, match="up to 10 meanwhile; this one has added nothing"):
        archiver(root, topics).run(None)
    assert offsets(LakeTable(str(root), "topic", TOPIC)) == list(range(10))


def test_a_run_whose_commit_was_answered_with_an_error_knows_its_own_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, commit = made(tmp_path), LakeTable._commit

    def lost(*given: Any, **how: Any) -> bool:
        assert commit(*given, **how)
        return False  # as when the store's answer is lost and the second try finds the first

    monkeypatch.setattr(LakeTable, "_commit", lost)
    add(table, 0, 10)
    assert offsets(table) == list(range(10))


def test_a_run_that_fails_leaves_no_files_and_commits_none_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk must not become fuller with every run; a vacuum may be too early."""
    table = made(tmp_path)
    add(table, 0, 10)
    kept = sorted(table.storage.local.glob("date=*/*"))

    def full(*_: Any, **how: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner, name in ((LakeTable, "_commit"), (data_files._Day, "flush"), (Storage, "sync")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(OSError, match="No space"):
                add(table, 10, 10)
        assert sorted(table.storage.local.glob("date=*/*")) == kept
    base = table.require()
    files = FileWriter(table.storage, TOPIC_KIND, base.columns(), "run").write([batch(10, 5)])
    table.storage.delete([files[0].path])
    with pytest.raises(Conflict, match="was deleted before it was committed"):
        table.append(base, "run", files, 15)
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


def test_what_a_commit_goes_through_does_not_grow_with_the_commits_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of the log and removed files, when versions of two hours ago need not be readable."""
    monkeypatch.setattr(commits, "CLEANUP_INTERVAL", 10)
    long_ago = time.time() - 7200
    monkeypatch.setattr(lake_table, "time", SimpleNamespace(time=lambda: long_ago))
    table = made(tmp_path)
    kept = table.keep_versions(opened(table), 1)
    assert kept.properties["delta.logRetentionDuration"] == "interval 1 hours"
    assert table.keep_versions(kept, 1) is kept
    log = table.storage.local / "_delta_log"
    sizes = []
    for first in range(0, 160, 2):
        add(table, first, 2)
        compact(table, 1 << 20, merge_here)
        entries = list(log.iterdir())
        for path in entries:
            os.utime(path, (long_ago, long_ago))
        checkpoints = sorted(path for path in entries if ".checkpoint." in path.name)
        removed = pq.read_table(checkpoints[-1])["remove"].drop_null() if checkpoints else []
        sizes.append((len(entries), len(removed)))
    assert max(number for number, _ in sizes) < 40
    assert max(removed for _, removed in sizes) == 0
    assert offsets(table) == list(range(160))
    assert opened(table).position == 160


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


def test_rows_that_are_there_twice_are_removed_as_the_docs_say(tmp_path: Path) -> None:
    table = made(tmp_path)
    for first, at in ((0, NOON), (10, NOON), (20, NOON + 86_400_000_000)):
        add(table, first, 10, at=at)
    base = table.require()
    again = FileWriter(table.storage, TOPIC_KIND, base.columns(), "again").write([batch(0, 10)])
    actions = [file.add_action(TOPIC_KIND) for file in again]
    assert commits.commit(base.delta, "again", actions, [])
    assert len(offsets(table)) == 40
    page = (Path(__file__).parents[2] / "docs/how-to/archive.md").read_text()
    recipe = page.partition("## Remove rows")[2].partition("```python")[2].partition("```")[0]
    exec(recipe.replace("/data/lake/topics/orders", table.storage.uri), {})
    add(table, 30, 10)
    assert offsets(table) == list(range(40))
    assert table.require().position == 40


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


def test_commits_stay_fast_however_many_there_were(tmp_path: Path, soak: bool) -> None:
    """By the commits since the last checkpoint, which a commit reads, not by the clock."""
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
    snapshot = table.create("one")
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


@pytest.mark.timeout(600)
@pytest.mark.chaos
def test_a_run_killed_at_every_step_of_its_commits_adds_each_record_once(
    tmp_path: Path, write_topic: Append, killer: Killer
) -> None:
    """Each step on a copy of one table, whose run appends, makes a checkpoint and compacts."""
    topics, before = tmp_path / "topics", tmp_path / "before"
    for _ in range(3):
        write_topic(TOPIC, [b"x"] * 20, directory=topics)
        assert killer.run(before, topics, NEVER) == "done"
    write_topic(TOPIC, [b"x"] * 20, directory=topics)
    outcomes = []
    while "done" not in outcomes:
        root = tmp_path / f"lake-{len(outcomes)}"
        shutil.copytree(before, root)
        outcomes.append(killer.run(root, topics, len(outcomes)))
        table = LakeTable(str(root), "topic", TOPIC)
        end = table.require().position
        assert (end, offsets(table)) in ((60, list(range(60))), (80, list(range(80)))), outcomes
        assert killer.run(root, topics, NEVER) == "done"
        assert offsets(table) == list(range(80)), outcomes
        assert table.require().position == 80
    assert set(outcomes[:-1]) == {"killed"}
    assert len(table.require().files()) == 1, "the run has compacted"
    first, last = (LakeTable(str(one), "topic", TOPIC).require() for one in (before, root))
    checkpoints = (root / "topics" / TOPIC / "_delta_log").glob("*.checkpoint.parquet")
    assert max(checkpoints).name > f"{first.version:020}", "and made a checkpoint"
    assert last.version >= first.version + 2


@pytest.mark.timeout(600)
@pytest.mark.chaos
def test_runs_that_are_killed_one_after_the_other_add_each_record_once(
    tmp_path: Path, write_topic: Append, killer: Killer
) -> None:
    topics, root = tmp_path / "topics", tmp_path / "lake"
    step, produced = 0, 0
    while True:
        write_topic(TOPIC, [b"%d" % i for i in range(produced, produced + 50)], directory=topics)
        produced += 50
        outcome = killer.run(root, topics, step)
        assert outcome in ("killed", "done"), f"step {step}"
        table = LakeTable(str(root), "topic", TOPIC)
        snapshot = table.open()
        if snapshot is not None:
            end = snapshot.position or 0
            assert offsets(table) == list(range(end)), f"step {step}"
        if outcome == "done":
            break
        step += 1
    assert step > 30
    assert offsets(table) == list(range(produced))
    assert sorted(
        int(value)
        for value in DeltaTable(table.storage.uri).to_pyarrow_table()["payload"].to_pylist()
    ) == list(range(produced))


@pytest.mark.timeout(1800)
def test_two_archivers_a_compaction_and_readers_at_once(
    tmp_path: Path, write_topic: Append, monkeypatch: pytest.MonkeyPatch, soak: bool
) -> None:
    topics, root = tmp_path / "topics", tmp_path / "lake"
    monkeypatch.setattr(archive_job, "RECORDS_PER_STEP", 25)
    monkeypatch.setattr(maintenance, "MERGED_FILES", 4)
    monkeypatch.setattr(commits, "CHECKPOINT_INTERVAL", 3)  # so that there are many beside commits
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
    deadline = datetime.now(UTC) + timedelta(seconds=1200 if soak else 120)
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
    entry = DirectoryEntry(name, until, (root / name).stat().st_size, 0, until - 1)
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
    with pytest.raises(InvalidRequest, match="--convert` once"):
        archiver(root, topics).run(None)
    for step in range(random.randrange(4), 16, 4):
        killer.run(root, topics, step)
    job = archiver(root, topics)
    job.convert()
    job.run(None)
    assert offsets(job.table) == list(range(60))
    assert before in {path.stat().st_ino for path in job.table.storage.local.glob("date=*/*")}
    assert lake.names() == []
    assert not list(root.glob("topic=orders/*/*.parquet"))
    assert polars.scan_delta(job.table.storage.uri).select("timestamp").collect().height == 60


def test_an_archive_of_an_earlier_release_in_a_bucket_is_converted(
    tmp_path: Path, write_topic: Append, bucket: str
) -> None:
    topics, root = tmp_path / "topics", tmp_path / "lake"
    write_topic(TOPIC, [b"%d" % i for i in range(60)], directory=topics)
    old(root, topics, 40)
    files = Storage(bucket).files()
    before = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    place = f"{os.environ['AWS_ENDPOINT_URL']}/{bucket.removeprefix('s3://')}"
    for path in before:
        httpx.put(f"{place}/{path}", content=(root / path).read_bytes()).raise_for_status()
    with pytest.raises(InvalidRequest, match="--convert` once"):
        archiver(bucket, topics).run(None)
    job = archiver(bucket, topics)
    assert (job.convert(), job.run(None).rows, job.convert()) == (1, 20, 0)
    assert offsets(job.table) == list(range(60))
    for path in before:
        with pytest.raises(FileNotFoundError):
            files.open_input_file(str(path))


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


def age_out(topics: Path, segments: int) -> int:
    """Delete the oldest segments as retention does; the first offset left."""
    directory = topics / TOPIC
    bases = sorted({path.stem.partition("-")[2] for path in directory.glob("data-*.log")})
    for base in bases[:segments]:
        for path in directory.glob(f"*-{base}.*"):
            path.unlink()
    return int(bases[segments])


def grow(write_topic: Append, topics: Path, numbers: range) -> None:
    payloads = [b"%0100d" % i for i in numbers]
    write_topic(
        TOPIC,
        *(payloads[i : i + 10] for i in range(0, len(payloads), 10)),
        directory=topics,
        segment_bytes=1000,
    )


def test_what_the_log_no_longer_has_is_read_from_the_table(
    tmp_path: Path, write_topic: Append
) -> None:
    topics, root = tmp_path / "topics", tmp_path / "lake"
    grow(write_topic, topics, range(60))
    where = {"directory": topics, "topic": TOPIC, "archive": root, "maxRecordsPerPartition": 7}
    driver = Driver(tmp_path / "offsets", **where)
    assert [len(rows) for rows in driver.run(maxOffsetsPerTrigger=20)] == [20, 20, 20]
    grow(write_topic, topics, range(60, 100))
    archiver(root, topics).run(None)
    grow(write_topic, topics, range(100, 120))
    first = age_out(topics, 8)
    assert 60 < first < 100
    everything = [(i, b"%0100d" % i) for i in range(120)]
    rows = batch_rows(**where)
    assert [(row["offset"], row["payload"]) for row in rows] == everything
    # a stream begins in the table and goes on in the log, and so does one that was behind
    new = Driver(tmp_path / "new", **where).run(maxOffsetsPerTrigger=50)
    assert [(row["offset"], row["payload"]) for part in new for row in part] == everything
    (late,) = driver.run()
    assert [row["offset"] for row in late] == list(range(60, 120))
    at = next(row["timestamp"] for row in rows if row["offset"] == 60)
    since = batch_rows(**where, startingTimestamp=int(at.timestamp() * 1000) + 1)
    assert 0 < len(since) < 120
    assert since == [row for row in rows if row["offset"] >= since[0]["offset"]]
    assert [row["offset"] for row in batch_rows(**{**where, "archive": tmp_path / "none"})] == list(
        range(first, 120)
    )


def test_a_task_reads_on_in_the_table_when_retention_overtakes_it(
    tmp_path: Path, write_topic: Append
) -> None:
    topics, root = tmp_path / "topics", tmp_path / "lake"
    grow(write_topic, topics, range(100))
    archiver(root, topics).run(None)
    source = topic_options(directory=topics, topic=TOPIC, archive=root).topics
    incarnation = source.state(TOPIC).incarnation
    pieces = source.read(TOPIC, incarnation, 0, 100)
    offsets = next(pieces).offsets.tolist()
    age_out(topics, 8)
    for piece in pieces:
        offsets += piece.offsets.tolist()
    assert offsets == list(range(100))


def test_a_gap_between_table_and_log_is_an_error(tmp_path: Path, write_topic: Append) -> None:
    topics, root = tmp_path / "topics", tmp_path / "lake"
    grow(write_topic, topics, range(30))
    archiver(root, topics).run(None)
    grow(write_topic, topics, range(30, 120))
    age_out(topics, 8)
    with pytest.raises(Conflict, match="ends at offset 30 and the topic begins at"):
        batch_rows(directory=topics, topic=TOPIC, archive=root)
    with pytest.raises(DataLoss, match=r"offsets 30 to .* aged out before they were archived"):
        archiver(root, topics).run(None)


@pytest.mark.spark
def test_table_and_log_are_one_frame_and_one_stream(
    tmp_path: Path, write_topic: Append, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock import pipeline

    topics, root = tmp_path / "topics", tmp_path / "lake"
    grow(write_topic, topics, range(80))
    job = archiver(root, topics)
    job.run(None)
    grow(write_topic, topics, range(80, 120))
    age_out(topics, 4)
    monkeypatch.setenv("PENSTOCK_ARCHIVE", str(root))
    frame = pipeline.table(spark, TOPIC, directory=str(topics))
    assert frame.columns == ["offset", "timestamp", "payload", "date"]
    everything = [(i, b"%0100d" % i) for i in range(120)]

    def rows() -> list[tuple[int, bytes]]:
        return sorted((row.offset, bytes(row.payload)) for row in frame.collect())

    assert rows() == everything
    # the archive moves on under the frame, is compacted, and the log loses what is archived
    job.run(None)
    monkeypatch.setattr(maintenance, "MERGED_FILES", 2)
    assert job.maintain(None).merged == 2
    age_out(topics, 4)
    assert rows() == everything
    assert pipeline.table(spark, TOPIC, directory=str(topics)).count() == 120, "nothing is left"
    log = spark.read.format("penstock").options(topic=TOPIC, directory=str(topics)).load()
    assert log.where("offset >= 500").collect() == []
    plan = frame.where("offset < 50")._jdf.queryExecution().toString()
    assert "PushedFilters: [IsNotNull(offset), LessThan(offset,50)]" in plan

    options = {"topic": TOPIC, "directory": str(topics), "archive": str(root)}
    stream = spark.readStream.format("penstock").options(**options, maxOffsetsPerTrigger=70).load()
    sink = stream.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    target = str(tmp_path / "copy")
    patiently(lambda: sink.trigger(availableNow=True).start(target).awaitTermination())
    copied = spark.read.parquet(target).collect()
    assert sorted((row.offset, bytes(row.payload)) for row in copied) == everything


@pytest.mark.spark
def test_fields_of_payloads_are_taken_from_what_spark_says_of_them(spark: Any, caplog: Any) -> None:
    payloads = [
        b'{"a": 1, "1d": true, "b": [{"x": "y"}], "d`,<": 1.5, "empty": null, "both": 1}',
        b'{"A": 2, "both": "text", "far": {"in": {"side": 1}}}',
        *(b"[1]", b"7", b"oops", b""),
    ]
    frame = spark.createDataFrame([(one,) for one in payloads], "payload BINARY")
    fields = TypedColumns(TOPIC_KIND).inferred(frame).fields
    assert fields.simpleString() == ("struct<1d:boolean,A:bigint,b:string,both:string,far:string>")
    assert "'d`,<' of the payloads is not made a column" in caplog.text
    nothing = TypedColumns(TOPIC_KIND).inferred(frame.where("length(payload) < 5"))
    assert not nothing.fields.names


def test_a_field_may_be_a_time() -> None:
    from pyspark.sql.types import StructField, StructType, TimestampType

    typed = TypedColumns(TOPIC_KIND, StructType([StructField("at", TimestampType())]))
    assert typed.arrow()[0].type == pa.timestamp("us", tz="UTC")


@pytest.mark.spark
def test_payloads_become_columns_that_evolve_and_misfits_go_to_the_dead_letters_once(
    server: Any, tcp: str, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import polars

    from penstock import pipeline

    topic, root = f"typed-{uuid.uuid4().hex[:8]}", str(tmp_path)
    job = Archiver(
        root,
        Origin(topic=topic, broker=tcp, url=server.url),
        payloads=Payloads(schema="infer", dead_letter=f"{topic}-dead"),
    )
    first = [b'{"id": 1, "offset": 9, "who": {"name": "a"}}', b'{"id": 2, "total": 1.5}']
    second = [b'{"id": "x"}', b"[1]", b'{"id": 3, "paid": true}']
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch(topic, first))
        assert job.run(spark).misfits == 0
        link.append(frames.produce_batch(topic, second))

        def killed(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:  # killed after the commit, before the dead letters
            patch.setattr(LakeTable, "mark", killed)
            with pytest.raises(KeyboardInterrupt):
                job.run(spark)
        link.append(frames.produce_batch(topic, [b'{"id": 4, "paid": 1}']))
    assert job.run(spark).misfits == 1
    rows = polars.read_delta(job.table.storage.uri).sort("offset")
    assert rows["id"].to_list() == [1, 2, None, None, 3, None]
    assert rows["offset_"].to_list()[:2] == [9, None]
    assert rows["who"][0] == '{"name":"a"}'
    assert rows["paid"].to_list() == [None, None, None, None, True, None]
    assert rows["payload"].to_list()[2:4] == second[:2]
    assert rows["_reason"].to_list() == [
        *(None, None, "field id: not bigint: x", "the payload is not a JSON object", None),
        "field paid: not boolean: 1",
    ]
    letters = [json.loads(row["payload"]) for row in batch_rows(broker=tcp, topic=f"{topic}-dead")]
    assert [(one["offset"], one["payload"]) for one in letters] == [
        *((2, '{"id": "x"}'), (3, "[1]"), (5, '{"id": 4, "paid": 1}'))
    ]
    assert letters[1]["reason"] == "the payload is not a JSON object"
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch(topic, [b'{"id": 5, "total": 2, "new": 1}']))
    table = pipeline.table(spark, topic, root, broker=tcp)
    newest = table.where("id >= 3").orderBy("offset").select("offset", "id", "total").collect()
    assert [tuple(row) for row in newest] == [(4, 3, None), (6, 5, 2.0)]
    with pytest.raises(Conflict, match="column id of the table is bigint and cannot become string"):
        Archiver(root, job.origin, payloads=Payloads(schema="id STRING")).run(spark)


def test_a_watched_table_follows_its_topic_and_says_how_far_behind_it_is(
    tmp_path: Path, write_topic: Append, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics, root = tmp_path / "topics", tmp_path / "lake"
    monkeypatch.setattr(archive_watch, "HEARTBEAT_SECONDS", 0.02)
    write_topic(TOPIC, [b"x"] * 10, directory=topics)
    reports: list[RunReport] = []
    job, free, holds = archiver(root, topics), threading.Event(), threading.Event()
    free.set()
    run = job.run

    def holding(*given: Any) -> Any:
        if not free.is_set():
            holds.set()
        assert free.wait(60)
        return run(*given)

    monkeypatch.setattr(job, "run", holding)
    watch = ArchiveWatch(job, 0.1, [lambda report: reports.append(copy(report))])
    thread = threading.Thread(target=watch.run, args=(None,))
    thread.start()
    until(lambda: reports and (reports[-1].rows, reports[-1].lag) == (10, 0), 60)
    free.clear()
    assert holds.wait(60)  # a run that is under way would archive what is written now
    write_topic(TOPIC, [b"x"] * 5, directory=topics)
    until(lambda: reports[-1].lag == 5 and (reports[-1].lag_seconds or 0) > 0.1, 60)
    free.set()
    until(lambda: (reports[-1].rows, reports[-1].lag, reports[-1].lag_seconds) == (15, 0, 0.0))
    watch.stop()
    thread.join(60)
    assert reports[-1].state == "finished"
    assert {report.target_seconds for report in reports} == {0.1}
    assert offsets(job.table) == list(range(15))


def test_a_table_in_an_object_store_has_each_record_once_too(
    tmp_path: Path, write_topic: Append, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = tmp_path / "topics"
    small = {"directory": topics, "segment_bytes": 100}
    write_topic(TOPIC, *([b"%d" % i] for i in range(50)), **small)
    monkeypatch.setattr(archive_job, "RECORDS_PER_STEP", 20)
    monkeypatch.setattr(maintenance, "MERGED_FILES", 3)
    job = archiver(bucket, topics)
    base = job.table.open()
    assert base is None
    assert job.run(None).rows == 50
    stale, files = job.table.require(), []
    write_topic(TOPIC, [b"%d" % i for i in range(50, 60)], **small)
    assert job.run(None).rows == 10
    writer = FileWriter(job.table.storage, TOPIC_KIND, stale.columns(), "late")
    files = writer.write([batch(50, 10)])
    with pytest.raises(Superseded):
        job.table.append(stale, "late", files, 60)
    with pytest.raises(FileNotFoundError):
        job.table.storage.files().open_input_file(files[0].path)
    assert job.maintain(None).merged >= 3
    assert offsets(job.table) == list(range(60))
    reader = TopicReader(topic_options(directory=topics, topic=TOPIC, archive=bucket))
    age_out(topics, 1)
    tasks = reader.partitions()
    sent = pickle.dumps(reader)
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ENDPOINT_URL")  # a task's machine knows nothing of the store
        rows = rows_of(pickle.loads(sent), tasks)
    assert [row["offset"] for row in rows] == list(range(60))
    assert offsets(LakeTable(bucket, "topic", TOPIC)) == list(range(60))
    with pytest.raises(InvalidRequest, match="one of s3://"):
        Storage("ftp://lake")


@pytest.mark.spark
@pytest.mark.timeout(3600)
def test_fifty_million_records_are_archived_in_one_run_and_bounded_memory(
    tmp_path: Path, postgres: Any, soak: bool
) -> None:
    """`python -m tests.pipeline.scale archive` prints the figures."""
    if not soak:
        pytest.skip("needs gigabytes: make soak")
    peaks = scale.archive(tmp_path, postgres, 50_000_000)["peaks"]
    assert max(peaks[scale.DRIVER]) < 400
    assert max(peaks[scale.JVM]) < 2000, "its heap is 1 GiB"
