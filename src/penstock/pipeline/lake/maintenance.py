"""Maintain an archive's table: merge small files, drop old days, delete unused files.

Frequent runs leave many small files. Files of one day are merged once there are `MERGED_FILES` of
about one size (within a factor of `MERGED_FILES`). So a record is rewritten once per size level,
not with every merge. Spark tasks merge the files in bounded memory, and the driver commits. If
another commit came first, this one is abandoned, and the next run finds the same files again.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import chain
from typing import Any

import pyarrow as pa

from penstock.errors import Damaged
from penstock.pipeline.lake.commits import KEPT_HOURS, new_run
from penstock.pipeline.lake.data_files import (
    FILES_DDL,
    DataFile,
    FileWriter,
    as_batch,
    by_tasks,
    read_file,
)
from penstock.pipeline.lake.table import LakeTable, Snapshot

MERGED_FILES = 8
SMALLEST_BYTES = 64 << 10  # smaller files count as one size


@dataclass
class Upkeep:
    file_bytes: int
    keep_days: int | None = None
    vacuum_hours: int = KEPT_HOURS  # how long a query may read one snapshot


@dataclass
class Maintained:
    merged: int = 0  # small files that were rewritten into larger ones
    expired: int = 0  # files of days that are too old
    vacuumed: int = 0  # files that no version has any more

    def add(self, other: "Maintained") -> None:
        self.merged += other.merged
        self.expired += other.expired
        self.vacuumed += other.vacuumed


# Merges each group of files, and returns the new files.
Merger = Callable[[FileWriter, list[list[DataFile]]], list[DataFile]]


def maintain(table: LakeTable, upkeep: Upkeep, merger: Merger) -> Maintained:
    """Expire, compact and vacuum the table, if it exists."""
    done = Maintained()
    snapshot = table.open()
    if snapshot is None:
        return done
    snapshot = table.keep_versions(snapshot, upkeep.vacuum_hours)
    if upkeep.keep_days is not None:
        done.expired = expire(table, snapshot, upkeep.keep_days, datetime.now(UTC).date())
    done.merged = compact(table, upkeep.file_bytes, merger)
    done.vacuumed = table.vacuum(upkeep.vacuum_hours)
    return done


def expire(table: LakeTable, snapshot: Snapshot, keep_days: int, today: date) -> int:
    """Drop the days that are more than `keep_days` before today. Return their files' number."""
    oldest = str(today - timedelta(days=keep_days))
    old = [file for file in snapshot.files() if file.date < oldest]
    if not old or table.replace(snapshot, new_run(), old, []) is None:
        return 0
    return len(old)


def small_files(files: list[DataFile], file_bytes: int) -> list[list[DataFile]]:
    """Return groups of files to merge: of one day and of about one size."""
    groups: dict[tuple[str, int], list[DataFile]] = defaultdict(list)
    for file in files:
        if file.bytes < file_bytes // 4:
            level = int(math.log(max(1.0, file.bytes / SMALLEST_BYTES), MERGED_FILES))
            groups[file.date, level].append(file)
    return [
        sorted(group, key=lambda one: one.first)
        for group in groups.values()
        if len(group) >= MERGED_FILES
    ]


def compact(table: LakeTable, file_bytes: int, merger: Merger) -> int:
    """Merge small files and return their number. They stay on disk until `vacuum`."""
    snapshot = table.open()
    if snapshot is None or not (groups := small_files(snapshot.files(), file_bytes)):
        return 0
    run = new_run()
    writer = FileWriter(table.storage, table.kind, snapshot.columns(), run, file_bytes)
    new = merger(writer, groups)
    old = list(chain.from_iterable(groups))
    before, after = (sum(one.rows for one in files) for files in (old, new))
    if before != after:
        table.storage.delete([one.path for one in new])
        raise Damaged(
            f"{table.storage.uri}: {len(old)} files should have {before} rows and have {after}; "
            "the table is unchanged"
        )
    return len(old) if table.replace(snapshot, run, old, new) is not None else 0


def merged_by_tasks(spark: Any, writer: FileWriter, groups: list[list[DataFile]]) -> list[DataFile]:
    """Merge each group in a Spark task (a `Merger`)."""

    def merge_group(files: list[DataFile]) -> Iterator[pa.RecordBatch]:
        yield as_batch(merge(writer, files))

    rows = by_tasks(spark, groups, merge_group, FILES_DDL).collect()
    return [DataFile(*row) for row in rows]


def merge(writer: FileWriter, files: list[DataFile]) -> list[DataFile]:
    """Write the rows of all the files to new files of the writer's size."""
    return writer.write(
        chain.from_iterable(read_file(writer.storage, one.path, writer.schema) for one in files)
    )
