"""compact: the latest record per key of a topic, to another topic, to Parquet, or in place. Each
partition is compacted by itself, since the records of a key are in one.

The key is a JSON path into the payload, or a SQL expression over topic, offset, timestamp and
payload; keys are compared as text. A tombstone (an empty payload, or what the caller says is one)
deletes its key. A record that has no key, or is not JSON, belongs to no key: it is kept as it is,
and counted.

In place: see `penstock.pipeline.jobs.compact_in_place`.

To a topic: each run appends the latest of what came since the last one, in order. How far it got is
a consumer group of the source, `compact-<target>`; where the run under way ends is written down
before it writes, in the group `compact-<target>-plan`, so one that was killed is repeated exactly,
and the idempotent producer drops what is there.

To Parquet: a snapshot, replaced as a whole by replacing its manifest
(`penstock.pipeline.jobs.archive_directory`). The files of the snapshot before stay until the next
run, for those who read them.
"""

from contextlib import closing
from dataclasses import dataclass
from typing import Any

from pyspark.sql import functions as f

from penstock.errors import Conflict, InvalidRequest, NotFound
from penstock.net.broker_caller import BrokerCaller
from penstock.pipeline.jobs import Say, quiet
from penstock.pipeline.jobs.archive_directory import Lake, Manifest
from penstock.pipeline.jobs.compact_in_place import in_place
from penstock.pipeline.jobs.keyed_topic import (
    RECORD_OVERHEAD_BYTES,
    Compacted,
    KeyedRecords,
    Keys,
    latest_rows,
)
from penstock.pipeline.options import (
    BROKER_PATIENCE_SECONDS,
    TopicSourceOptions,
    read_options,
)
from penstock.pipeline.session import activate
from penstock.pipeline.sinks.identity import append_once
from penstock.pipeline.sources.topic import DataLoss
from penstock.pipeline.sources.topic_catalog import Topics

__all__ = ["CompactOptions", "Compacted", "compact", "read_compacted"]

# source offsets written to a topic at once; part of the identity, so it never changes
OFFSETS_PER_WRITE = 1_000_000
SEGMENT_BYTES = 256 << 20  # neighbouring segments are merged up to this size
ROWS_PER_FILE = 5_000_000
KEPT = "key IS NULL OR NOT tombstone"
TOMBSTONE_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class CompactOptions:
    topic: str
    key: str | None = None
    key_sql: str | None = None
    tombstone: str | None = None
    tombstone_sql: str | None = None
    to_topic: str | None = None
    to: str | None = None
    in_place: bool = False
    broker: str = "127.0.0.1:12345"
    url: str = "http://127.0.0.1:6632"
    directory: str | None = None
    token: str | None = None
    tombstone_seconds: float = TOMBSTONE_SECONDS
    roll: bool = False
    segment_bytes: int = SEGMENT_BYTES
    dry_run: bool = False


def compact(spark: Any, options: CompactOptions, say: Say = quiet) -> Compacted:
    """Keep the latest record per key of the topic. Safe to kill at any moment and to run again."""
    if sum((bool(options.to_topic), bool(options.to), options.in_place)) != 1:
        raise InvalidRequest(
            "compact goes to a topic, to a directory of Parquet files, or is done in place"
        )
    if options.to_topic == options.topic:
        raise InvalidRequest(f"to compact {options.topic!r} into itself is to do it in place")
    keys = Keys(options.key, options.key_sql, options.tombstone, options.tombstone_sql)
    spark = activate(spark)
    given = {"broker": options.broker, "directory": options.directory, "token": options.token}
    connection = {name: value for name, value in given.items() if value}
    with BrokerCaller(options.url, token=options.token, patience=BROKER_PATIENCE_SECONDS) as caller:
        with closing(
            Topics(read_options(TopicSourceOptions, {**connection, "topic": options.topic}))
        ) as topics:
            labels = topics.partitions(options.topic)
        done, *others = (
            _compact_one(
                KeyedRecords(spark, caller, label, keys, connection, options.dry_run, say), options
            )
            for label in labels
        )
        for other in others:
            done.add(other)
        return done


def _compact_one(source: KeyedRecords, options: CompactOptions) -> Compacted:
    if options.to_topic:
        return _to_topic(source, options.to_topic)
    if options.to:
        return _to_parquet(source, options.to)
    return in_place(source, options.tombstone_seconds, options.roll, options.segment_bytes)


def read_compacted(spark: Any, root: str, topic: str) -> Any:
    """Return the rows of the snapshots of all partitions that the manifests list: key, offset,
    timestamp, payload.
    """
    lake = Lake(root)
    labels = [
        name
        for kind, name in lake.names()
        if kind == "compacted" and (name == topic or name.startswith(f"{topic}/"))
    ]
    manifests = [lake.require("compacted", label) for label in labels or [topic]]
    return spark.read.parquet(*(lake.url(one.path) for each in manifests for one in each.files))


def _to_topic(source: KeyedRecords, target: str) -> Compacted:
    group, plan = f"compact-{target}", f"compact-{target}-plan"
    reached, planned = _position(source, group), _position(source, plan)
    start = source.state["first_offset"] if reached is None else reached
    if start < source.state["first_offset"]:
        raise DataLoss(
            f"topic {source.topic!r}: offsets {start} to {source.state['first_offset'] - 1} aged "
            f"out before they were compacted to {target!r}. Delete the group {group!r} and compact "
            "to another topic."
        )
    end = source.state["next_offset"]
    if planned is not None and planned > start:  # by a run that was killed
        end = planned
    done = Compacted(source.topic, f"topic {target}", start, end, executed=not source.dry_run)
    if start >= end:
        return done
    latest = latest_rows(source.rows(start, end)).persist()
    try:
        # A key that was never there needs no deletion.
        kept = KEPT if reached is None else "true"
        _count(done, latest, kept)
        if source.dry_run:
            return done
        _commit(source, plan, end)
        origin = f"{source.topic}:{source.state['incarnation']}"
        app = f"compact:{origin}:{target}:{source.keys.digest}:{start}:{end}"
        # Which records they are is part of who writes them: what a compaction in place took out of
        # a range since a killed run must not shift others onto numbers that the broker has seen.
        ranges = latest.where(kept).groupBy(
            f.expr(f"offset DIV {OFFSETS_PER_WRITE}").alias("range")
        )
        totals = ranges.agg(f.count(f.lit(1)), f.expr("bit_xor(xxhash64(offset))")).collect()
        for number, (low, rows, identity) in enumerate(sorted(tuple(row) for row in totals), 1):
            part = latest.where(kept).where(f"offset DIV {OFFSETS_PER_WRITE} = {low}")
            reach = {name: source.connection.get(name) for name in ("broker", "token")}
            append_once(part, ["offset"], f"{app}:{low}:{rows}:{identity}", topic=target, **reach)
            source.say(
                f"topic {source.topic}: {number} of {len(totals)} ranges written to topic {target}"
            )
        _commit(source, group, end)
    finally:
        latest.unpersist()
    return done


def _position(source: KeyedRecords, group: str) -> int | None:
    try:
        return int(source.ask("GET", "groups", group)["committed"])
    except NotFound:
        return None


def _commit(source: KeyedRecords, group: str, offset: int) -> None:
    source.ask("POST", "groups", group, "commit", body={"offset": offset})


def _count(done: Compacted, latest: Any, kept: str) -> None:
    size = f"length(payload) + {RECORD_OVERHEAD_BYTES}"
    counts = {
        "records_before": "coalesce(sum(records), 0)",
        "bytes_before": "coalesce(sum(bytes), 0)",
        "keyless": "count_if(key IS NULL)",
        "broken": "count_if(broken AND key IS NULL)",
        "records": f"count_if({kept})",
        "bytes": f"coalesce(sum({size}) FILTER (WHERE {kept}), 0)",
        "tombstones": f"count_if(NOT ({kept}))",
    }
    (row,) = latest.agg(*(f.expr(count).alias(name) for name, count in counts.items())).collect()
    for name in counts:
        setattr(done, name, row[name])


def _to_parquet(source: KeyedRecords, root: str) -> Compacted:
    lake = Lake(root)
    manifest = lake.manifest("compacted", source.topic)
    start, end = _parquet_range(source, manifest)
    done = Compacted(source.topic, root, start, end, executed=not source.dry_run)
    if start >= end:
        return done
    rows = source.rows(start, end)
    if manifest.files:
        before = source.spark.read.parquet(*(lake.url(entry.path) for entry in manifest.files))
        older = before.selectExpr(
            *("key", "offset", "timestamp", "payload", "false AS tombstone", "false AS broken"),
            "CASE WHEN key IS NULL THEN offset END AS own",
        )
        rows = older.unionByName(rows)
    latest = latest_rows(rows).persist()
    try:
        _count(done, latest, KEPT)
        if source.dry_run:
            return done
        lake.remove_strays(manifest)
        run, staging = lake.staging()
        files = max(1, -(-done.records // ROWS_PER_FILE))
        kept = latest.where(KEPT).select("key", "offset", "timestamp", "payload")
        parts = kept.repartitionByRange(files, "offset").sortWithinPartitions("offset")
        parts.write.parquet(staging)
        paths = lake.take_in(run, manifest.kind, manifest.name)
        manifest.files = [lake.describe(path, "offset") for path in paths]
        if manifest.rows != done.records:
            raise DataLoss(
                f"{manifest.rows} rows were written instead of {done.records}; the snapshot is "
                "unchanged"
            )
        manifest.position = {
            "incarnation": source.state["incarnation"],
            "next": end,
            "keys": source.keys.digest,
        }
        lake.replace(manifest)
    finally:
        latest.unpersist()
    return done


def _parquet_range(source: KeyedRecords, manifest: Manifest) -> tuple[int, int]:
    position, first = manifest.position, source.state["first_offset"]
    if not position:
        return first, source.state["next_offset"]
    if position["incarnation"] != source.state["incarnation"]:
        raise DataLoss(
            f"topic {source.topic!r} was deleted and created again since this snapshot: "
            "compact to another directory"
        )
    if position["keys"] != source.keys.digest:
        raise Conflict(
            "this snapshot was made with another key or other tombstones: compact to another "
            "directory"
        )
    if position["next"] < first:
        raise DataLoss(
            f"topic {source.topic!r}: offsets {position['next']} to {first - 1} aged out before "
            "they were compacted: compact to another directory"
        )
    return int(position["next"]), source.state["next_offset"]
