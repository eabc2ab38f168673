"""archive: copy a topic or queue to a Delta table by day, each record once. Each partition of a
topic has a table of its own.

A run archives what arrived since the last one, up to a fixed end, in steps of at most
`RECORDS_PER_STEP`. Spark's tasks write the files of a step, and the driver commits them, all or
none (`penstock.pipeline.lake.table`). So the driver holds names of files and no rows. Tasks write
with pyarrow instead of Spark's writer: it reaches disks and object stores without jars, and returns
the statistics of the files. The archived offset of a topic is reported to the broker: `topic
describe` shows it, and retention respects it.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pyspark.sql import functions as f

from penstock.errors import Conflict, InvalidRequest
from penstock.net.addresses import resource
from penstock.net.broker_caller import BrokerCaller
from penstock.pipeline.jobs import Say, quiet
from penstock.pipeline.jobs.archive_directory import Lake
from penstock.pipeline.lake import outcomes
from penstock.pipeline.lake.commits import new_run
from penstock.pipeline.lake.convert import (
    convert,
    old_archive,
    queue_identity,
    refuse_old,
    remove_old,
)
from penstock.pipeline.lake.data_files import FILE_BYTES, FILES_DDL, DataFile, FileWriter
from penstock.pipeline.lake.dead_letters import write_dead_letters
from penstock.pipeline.lake.frames import archived_frame, source_frame, union_partitions
from penstock.pipeline.lake.maintenance import (
    Maintained,
    Merger,
    Upkeep,
    compact,
    maintain,
    merged_by_tasks,
)
from penstock.pipeline.lake.table import LakeTable, Snapshot, archived_partitions
from penstock.pipeline.lake.typed_columns import INFER, TypedColumns
from penstock.pipeline.options import (
    BROKER_PATIENCE_SECONDS,
    QueueSourceOptions,
    TopicSourceOptions,
    read_options,
)
from penstock.pipeline.session import activate
from penstock.pipeline.sources.queue import QueuePlan
from penstock.pipeline.sources.topic import REMEDY, DataLoss
from penstock.pipeline.sources.topic_catalog import Topics

log = logging.getLogger("penstock.pipeline")

COMPRESSED = 3  # approximate compression by Parquet; only determines the size of tasks
RECORDS_PER_STEP = 20_000_000
RECORDS_PER_TASK = (50_000, 2_000_000)  # least and most


@dataclass
class Origin:
    """The source of an archive, and how to reach it."""

    topic: str | None = None
    queue: str | None = None
    broker: str | None = None
    directory: str | None = None
    database: str | None = None
    url: str | None = None
    token: str | None = None

    def __post_init__(self) -> None:
        if bool(self.topic) == bool(self.queue):
            raise InvalidRequest(
                "archive takes a topic or a queue: give --topic or --queue, and not both"
            )

    @property
    def kind(self) -> str:
        return "topic" if self.topic else "queue"

    @property
    def name(self) -> str:
        return str(self.topic or self.queue)

    def options(self) -> dict[str, str]:
        reach = ("broker", "directory") if self.topic else ("database",)
        names = ("topic", "queue", "token", *reach)
        given = {name: value for name in names if (value := getattr(self, name))}
        return given | ({"firstPartition": "true"} if self.topic else {})


@dataclass(frozen=True)
class Payloads:
    """How payloads are processed, besides being archived unchanged."""

    schema: str | None = None  # columns: DDL, `infer`, or None for those that the table has
    dead_letter: str | None = None  # the topic that gets a copy of records that do not fit
    # messages older than this, with what groups did with them; None = all, without
    outcome_minutes: float | None = None


@dataclass
class ArchiveResult:
    """The result of a run. Rows and files are those of all partitions, position and version those
    of partition 0.
    """

    kind: str
    name: str
    rows: int = 0
    misfits: int = 0  # of these rows, those whose payload does not fit the columns
    files: int = 0  # of the table
    position: int | None = None  # the next offset; a queue's transaction horizon
    version: int = -1  # of the table
    converted: int = 0  # files of an archive of an earlier release
    maintained: Maintained = field(default_factory=Maintained)


@dataclass
class ArchiveStep:
    """The rows that one commit adds."""

    read: dict[str, str]  # options of the source
    identity: str  # of the source: a topic's incarnation; see `queue_identity`
    position: int  # after it


class Archiver:
    """Archives a queue or one partition of a topic; see `partitions`."""

    def __init__(
        self,
        target: str,
        origin: Origin,
        upkeep: Upkeep | None = None,
        payloads: Payloads | None = None,
    ) -> None:
        self.origin = origin
        self.payloads = payloads or Payloads()
        if origin.topic and self.payloads.outcome_minutes is not None:
            raise InvalidRequest("outcomes are of a queue's messages; a topic has none")
        self.target = target
        self.table = LakeTable(target, origin.kind, origin.name)
        self.upkeep = upkeep or Upkeep(FILE_BYTES)

    def partitions(self) -> "list[Archiver]":
        """Return an archiver per partition of the topic, this one first; a queue has one."""
        if not self.origin.topic:
            return [self]
        with closing(Topics(read_options(TopicSourceOptions, self.origin.options()))) as topics:
            labels = topics.partitions(self.origin.topic)
        return [self, *(self._at(label) for label in labels[1:])]

    def _at(self, label: str) -> "Archiver":
        other = copy(self)
        other.origin = replace(self.origin, topic=label)
        other.table = LakeTable(self.target, "topic", label)
        return other

    def position(self, label: str | None = None) -> int | None:
        """Return where the next run begins in this partition; None before the first run."""
        table = self.table if label is None else LakeTable(self.target, "topic", label)
        snapshot = table.open()
        return None if snapshot is None else snapshot.position

    def run_all(self, spark: Any, say: Say = quiet) -> ArchiveResult:
        """Archive everything that every partition has now."""
        done, *others = (one.run(spark, say) for one in self.partitions())
        for other in others:
            done.rows += other.rows
            done.misfits += other.misfits
            done.files += other.files
        return done

    def run(self, spark: Any, say: Say = quiet) -> ArchiveResult:
        """Archive everything that this partition has now. Safe to kill at any moment."""
        spark = activate(spark)
        done = ArchiveResult(self.origin.kind, self.origin.name)
        snapshot = self.table.open()
        refuse_old(self.table, snapshot)
        remove_old(self.table, snapshot)
        self.report_misfits(spark, snapshot)  # left by a killed run
        for step in self.plan(snapshot):
            snapshot = snapshot or self.create(step)
            files, snapshot = self.append(spark, snapshot, step)
            rows = sum(file.rows for file in files)
            done.rows += rows
            done.misfits += sum(file.misfits for file in files)
            say(f"{done.kind} {done.name}: {rows} rows archived, {done.rows} in this run")
            self.mark(snapshot)
            self.report_misfits(spark, snapshot)
        if snapshot is not None:
            if not done.rows:
                self.mark(snapshot)  # the previous run may have been killed before this
            done.position, done.version = snapshot.position, snapshot.version
            done.files = len(snapshot.files())
        return done

    def create(self, step: ArchiveStep) -> Snapshot:
        """Return the table for the first step. Raise Superseded if another run has created and
        filled it in the meantime: the step would add the same rows again.
        """
        snapshot = self.table.create(step.identity)
        if snapshot.position is not None:
            raise self.table.superseded(snapshot)
        return snapshot

    def plan(self, snapshot: Snapshot | None) -> Iterator[ArchiveStep]:
        given = self.origin.options()
        if self.origin.topic:
            return topic_steps(given, snapshot, self.upkeep.file_bytes)
        return queue_steps(given, snapshot, self.payloads.outcome_minutes)

    def append(
        self, spark: Any, snapshot: Snapshot, step: ArchiveStep
    ) -> tuple[list[DataFile], Snapshot]:
        """Archive one step: tasks write files, which are then committed."""
        run = new_run()
        frame = self.frame(spark, {**self.origin.options(), **step.read})
        typed = TypedColumns.of(snapshot, self.table.kind)
        if self.payloads.schema == INFER:
            typed = typed.inferred(frame)
        elif self.payloads.schema:
            typed = typed.declared(self.payloads.schema)
        columns = typed.arrow()
        rows = typed.applied(frame)
        if self.payloads.outcome_minutes is not None:
            columns.append(outcomes.FIELD)
            source = QueuePlan(
                read_options(QueueSourceOptions, self.origin.options()), [], streaming=False
            )
            span = int(step.read["fromXid"]), int(step.read["toXid"])
            rows = outcomes.with_outcomes(spark, rows, source, *span)
        snapshot = self.table.add_columns(snapshot, columns)
        writer = FileWriter(
            self.table.storage, self.table.kind, snapshot.columns(), run, self.upkeep.file_bytes
        )
        files = self.write(rows, writer)
        snapshot = self.table.append(snapshot, run, files, step.position)
        return files, snapshot

    def frame(self, spark: Any, read: dict[str, str]) -> Any:
        return source_frame(spark, self.table.kind, read)

    def write(self, frame: Any, writer: FileWriter) -> list[DataFile]:
        return [DataFile(*row) for row in frame.mapInArrow(writer, FILES_DDL).collect()]

    def mark(self, snapshot: Snapshot) -> None:
        """Tell the broker what is archived, so that retention may delete it."""
        o = self.origin
        if o.topic and o.url and snapshot.position is not None:
            with BrokerCaller(o.url, token=o.token, patience=BROKER_PATIENCE_SECONDS) as caller:
                try:
                    body = {"offset": snapshot.position}
                    caller.json("PUT", resource("/topics", o.topic, "archived"), body)
                except Conflict as error:  # a later run was faster
                    log.info("%s", error)

    def report_misfits(self, spark: Any, snapshot: Snapshot | None) -> None:
        """Copy the records that do not fit to the topic of dead letters, each once."""
        if self.payloads.dead_letter and snapshot is not None:
            reach = {"broker": str(self.origin.broker), "token": self.origin.token or ""}
            write_dead_letters(spark, self.table, snapshot, self.payloads.dead_letter, reach)

    def maintain(self, spark: Any) -> Maintained:
        """Maintain every partition's table."""
        done = Maintained()
        for table in self.tables():
            done.add(maintain(table, self.upkeep, self.merger(spark)))
        return done

    def compact(self, spark: Any) -> int:
        """Merge small files only. Returns how many there were."""
        merger, size = self.merger(spark), self.upkeep.file_bytes
        return sum(compact(table, size, merger) for table in self.tables())

    def tables(self) -> list[LakeTable]:
        """Return the tables of all archived partitions, without asking the broker."""
        if not self.origin.topic:
            return [self.table]
        labels = archived_partitions(self.target, self.origin.topic)
        return [LakeTable(self.target, "topic", label) for label in labels]

    def merger(self, spark: Any) -> Merger:
        return partial(merged_by_tasks, spark)

    def convert(self) -> int:
        """Convert an archive of an earlier release to a table. Returns its number of files."""
        return convert(self.table)


def archive(
    spark: Any,
    target: str,
    origin: Origin,
    upkeep: Upkeep | None = None,
    payloads: Payloads | None = None,
    *,
    convert_old: bool = False,
    say: Say = quiet,
) -> ArchiveResult:
    """Archive everything that a topic or a queue has now, then maintain the table."""
    archiver = Archiver(target, origin, upkeep, payloads)
    converted = archiver.convert() if convert_old else 0
    spark = activate(spark)
    done = archiver.run_all(spark, say)
    done.converted, done.maintained = converted, archiver.maintain(spark)
    return done


def topic_steps(
    given: dict[str, str], snapshot: Snapshot | None, file_bytes: int
) -> Iterator[ArchiveStep]:
    """Yield ranges of offsets from the end of the table to the current end of the topic."""
    name = given["topic"]
    with closing(Topics(read_options(TopicSourceOptions, given))) as topics:
        state = topics.state(name)
    if snapshot is not None and snapshot.identity != state.incarnation:
        raise DataLoss(
            f"topic {name!r} was deleted and created again since it was archived: archive it "
            "to another directory, or move this topic's archive away first"
        )
    start = state.first
    if snapshot is not None and snapshot.position is not None:
        start = snapshot.position
    if start < state.first:
        raise DataLoss(
            f"topic {name!r}: offsets {start} to {state.first - 1} aged out before they were "
            f"archived. {REMEDY}"
        )
    least, most = RECORDS_PER_TASK
    per_task = min(most, max(least, int(COMPRESSED * file_bytes / state.mean_bytes)))
    while start < state.next:
        end = min(state.next, start + RECORDS_PER_STEP)
        read = {
            "startingOffsets": json.dumps({name: start}),
            "endingOffsets": json.dumps({name: end}),
            "maxRecordsPerPartition": str(per_task),
        }
        yield ArchiveStep(read, state.incarnation, end)
        start = end


def queue_steps(
    given: dict[str, str], snapshot: Snapshot | None, minutes: float | None = None
) -> Iterator[ArchiveStep]:
    """Yield what was committed since the table's horizon; with `minutes`, only what is that old."""
    options = QueuePlan(read_options(QueueSourceOptions, given), [], streaming=False)
    state = options.committed_state()
    identity = queue_identity(state.installation, state.id)
    if snapshot is not None and snapshot.identity != identity:
        if snapshot.identity.partition(":")[0] != str(state.installation):
            raise DataLoss("the archive belongs to another database: archive to another directory")
        raise DataLoss(
            f"queue {given['queue']!r} was deleted and created again since it was archived: "
            "archive it to another directory"
        )
    low = snapshot.position if snapshot is not None and snapshot.position is not None else 0
    high = state.horizon
    if minutes is not None:
        high = outcomes.older_than(options, state.id, low, high, minutes)
    first = options.nth_xid(state.id, low, 0)
    if first is not None and first < high:
        yield ArchiveStep({"fromXid": str(low), "toXid": str(high)}, identity, high)


def read_archive(
    spark: Any, target: str, *, topic: str | None = None, queue: str | None = None
) -> Any:
    """Return the archived rows of one snapshot of the table, or of an archive of an earlier
    release. Rows of a topic with several partitions have a column `partition`.
    """
    if topic is None:
        return archived_rows(spark, target, Origin(queue=queue))
    labels = archived_partitions(target, topic)
    if labels == [topic]:
        return archived_rows(spark, target, Origin(topic=topic))
    return union_partitions(
        (label, archived_rows(spark, target, Origin(topic=label)).withColumn("topic", f.lit(topic)))
        for label in labels
    )


def archived_rows(spark: Any, target: str, origin: Origin) -> Any:
    """Return the archived rows of a queue or of one partition of a topic."""
    table = LakeTable(target, origin.kind, origin.name)
    snapshot = table.open()
    if (snapshot is None or snapshot.position is None) and old_archive(table) is not None:
        lake = Lake(target)
        manifest = lake.require(origin.kind, origin.name)
        base = lake.url(lake.folder(origin.kind, origin.name))
        reader = spark.read.option("basePath", base).option("mergeSchema", True)
        frame = reader.parquet(*(lake.url(entry.path) for entry in manifest.files))
    else:
        frame = archived_frame(spark, table, table.require())
    return frame.withColumn(origin.kind, f.lit(origin.name))
