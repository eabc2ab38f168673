"""archive: a topic or queue to Parquet, by topic or queue and day, each record once.

A run takes what came since the last one, up to a fixed end;
`penstock.pipeline.jobs.archive_directory` makes it all or nothing. Rows are sorted into files of
about `file_bytes`, and small files of a day are rewritten into larger ones as they gather, in the
same step. For a topic the broker is told how far the archive reaches, which `topic describe` shows
and retention respects.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidRequest
from penstock.net.broker_caller import BrokerCaller
from penstock.pipeline.jobs.archive_directory import Entry, Lake, Manifest
from penstock.pipeline.options import BROKER_PATIENCE_SECONDS, Options, topic_path
from penstock.pipeline.session import activate
from penstock.pipeline.sources.queue import QueueOptions
from penstock.pipeline.sources.topic import REMEDY, DataLoss
from penstock.pipeline.sources.topic_catalog import Topics

FILE_BYTES = 128 << 20
COMPRESSED = (
    3  # what Parquet makes of raw log bytes, roughly; only decides how many files a run writes
)
RECORDS_PER_STEP = 20_000_000
SMALL_FILES = 8  # of one day, before they are rewritten into one


@dataclass
class Archived:
    """What a run did."""

    kind: str
    name: str
    rows: int = 0
    files: int = 0
    merged: int = 0  # small files that were rewritten into larger ones
    strays: int = 0  # left over from a killed run, removed
    position: Any = None


def archive(
    spark: Any,
    target: str,
    *,
    topic: str | None = None,
    queue: str | None = None,
    broker: str | None = None,
    directory: str | None = None,
    database: str | None = None,
    url: str | None = None,
    token: str | None = None,
    file_bytes: int = FILE_BYTES,
    say: Callable[[str], None] = lambda _: None,
) -> Archived:
    """Archive all there is of a topic or a queue now. Safe to kill at any moment and to run
    again.
    """
    if bool(topic) == bool(queue):
        raise InvalidRequest(
            "archive takes a topic or a queue: give --topic or --queue, and not both"
        )
    spark = activate(spark)
    lake = Lake(target)
    kind, name = ("topic", topic) if topic else ("queue", queue)
    assert name is not None
    manifest = lake.manifest(kind, name)
    done = Archived(kind, name, strays=lake.remove_strays(manifest))
    options = {
        "broker": broker,
        "directory": directory,
        "database": database,
        "topic": topic,
        "queue": queue,
    }
    options["token"] = token
    given = {key: value for key, value in options.items() if value}
    plan = _topic_plan(given, manifest) if topic else _queue_plan(given, manifest)
    for frame_options, position, size in plan:
        frame = spark.read.format("penstock").options(**given, **frame_options).load()
        rows = _append(
            lake, manifest, frame, position, max(1, -(-size // (COMPRESSED * file_bytes)))
        )
        done.rows += rows
        say(f"{kind} {name}: {rows} rows archived, {done.rows} in this run")
        if topic and url:
            with BrokerCaller(url, token=token, patience=BROKER_PATIENCE_SECONDS) as caller:
                caller.json("PUT", topic_path(topic, "archived"), {"offset": position["next"]})
    done.merged = _merge_small(spark, lake, manifest, file_bytes)
    done.files, done.position = len(manifest.files), manifest.position
    return done


def _topic_plan(given: dict[str, str], manifest: Manifest) -> Any:
    """Ranges to archive: options of the read, the position after it, about how many bytes."""
    topics = Topics(Options(given))
    name = given["topic"]
    state = topics.state(name)
    topics.close()
    start = manifest.position.get("next", state.first)
    if manifest.position and manifest.position["incarnation"] != state.incarnation:
        raise DataLoss(
            f"topic {name!r} was deleted and created again since it was archived: archive it "
            "to another directory, "
            "or move this topic's archive away first"
        )
    if start < state.first:
        raise DataLoss(
            f"topic {name!r}: offsets {start} to {state.first - 1} aged out before they were "
            f"archived. {REMEDY}"
        )
    while start < state.next:
        end = min(state.next, start + RECORDS_PER_STEP)
        read = {
            "startingOffsets": json.dumps({name: start}),
            "endingOffsets": json.dumps({name: end}),
        }
        yield (
            read,
            {"incarnation": state.incarnation, "next": end},
            int((end - start) * state.mean_bytes),
        )
        start = end


def _queue_plan(given: dict[str, str], manifest: Manifest) -> Any:
    options = QueueOptions(Options(given), [], streaming=False)
    state = options.committed_state()
    position = manifest.position
    if position and position["installation"] != state.installation:
        raise DataLoss("the archive belongs to another database: archive to another directory")
    if position and position["id"] != state.id:
        raise DataLoss(
            f"queue {given['queue']!r} was deleted and created again since it was archived: "
            "archive it to another "
            "directory"
        )
    low = int(position["xid"]) if position else 0
    first = options.nth_xid(state.id, low, 0)
    if first is not None and first < state.horizon:
        after = {"id": state.id, "installation": state.installation, "xid": str(state.horizon)}
        yield {"fromXid": str(low), "toXid": str(state.horizon)}, after, FILE_BYTES


def _append(
    lake: Lake, manifest: Manifest, frame: Any, position: dict[str, Any], files: int
) -> int:
    """One run: write aside, move in, replace the manifest."""
    from pyspark.sql import functions as f

    column, time = ("offset", "timestamp") if manifest.kind == "topic" else ("seq", "createdAt")
    run, staging = lake.staging()
    dated = frame.drop("topic", "queue").withColumn("date", f.to_date(time))
    ordered = dated.repartitionByRange(files, "date", column) if files > 1 else dated.coalesce(1)
    ordered.sortWithinPartitions("date", column).write.partitionBy("date").parquet(staging)
    added = [
        lake.describe(path, column) for path in lake.take_in(run, manifest.kind, manifest.name)
    ]
    manifest.files += added
    manifest.position = position
    lake.replace(manifest)
    return sum(entry.rows for entry in added)


def _merge_small(spark: Any, lake: Lake, manifest: Manifest, file_bytes: int) -> int:
    """Rewrite the small files of a day into one, for every day that has gathered enough of them."""
    column = "offset" if manifest.kind == "topic" else "seq"
    days: dict[str, list[Entry]] = defaultdict(list)
    for entry in manifest.files:
        if entry.bytes < file_bytes // 4:
            days[entry.path.split("/")[1]].append(entry)
    merged = 0
    for day, small in days.items():
        if len(small) < SMALL_FILES:
            continue
        run, staging = lake.staging()
        # merged: files of an earlier release have no headers
        frame = spark.read.option("mergeSchema", True).parquet(
            *(lake.url(entry.path) for entry in small)
        )
        frame.coalesce(1).sortWithinPartitions(column).write.parquet(f"{staging}/{day}")
        added = [
            lake.describe(path, column) for path in lake.take_in(run, manifest.kind, manifest.name)
        ]
        if sum(entry.rows for entry in added) != sum(entry.rows for entry in small):
            raise DataLoss(
                f"{day}: rewriting {len(small)} files gave another number of rows; the archive "
                "is unchanged"
            )
        gone = {entry.path for entry in small}
        manifest.files = [entry for entry in manifest.files if entry.path not in gone] + added
        lake.replace(manifest)
        lake.remove_strays(manifest)
        merged += len(small)
    return merged


def read_archive(
    spark: Any, target: str, *, topic: str | None = None, queue: str | None = None
) -> Any:
    """The archived rows, exactly those the manifest lists."""
    lake = Lake(target)
    kind, name = ("topic", topic) if topic else ("queue", queue)
    assert name is not None
    manifest = lake.require(kind, name)
    from pyspark.sql import functions as f

    frame = (
        spark.read.option("basePath", lake.url(lake.folder(kind, name)))
        .option("mergeSchema", True)
        .parquet(*(lake.url(entry.path) for entry in manifest.files))
    )
    return frame.withColumn(kind, f.lit(name))
