"""compact in place: compute which offsets of sealed segments stay; the broker rewrites the
segments.

The broker has the bytes, so the job only sends which offsets stay, a bit each, for neighbouring
sealed segments (`POST /topics/{topic}/compact`). Only sealed segments are read: a power failure
may still take what lies behind them, so it must not be the reason to remove anything. Oldest
segments go first and a swap is all or nothing, so a value is always gone before the
tombstone that deleted it, wherever the job dies. Run again, it continues.
"""

import base64
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark.sql import functions as f

from penstock.errors import Conflict
from penstock.pipeline.jobs.keyed_topic import Compacted, KeyedRecords, latest_rows

BUCKET_OFFSETS = 32_768  # of one of Spark's bitmaps


class Kept:
    """The offsets that stay, in buckets of bits (the lowest bit of a byte first)."""

    def __init__(self, buckets: dict[int, bytes]) -> None:
        self._buckets = buckets

    def between(self, start: int, end: int) -> npt.NDArray[np.uint8]:
        """Return one bit per offset from `start` to `end`, 1 for those that stay."""
        flags = np.zeros(end - start, np.uint8)
        for bucket in range(start // BUCKET_OFFSETS, -(-end // BUCKET_OFFSETS)):
            if (packed := self._buckets.get(bucket)) is not None:
                first = bucket * BUCKET_OFFSETS
                low, high = max(start, first), min(end, first + BUCKET_OFFSETS)
                bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
                flags[low - start : high - start] = bits[low - first : high - first]
        return flags

    def count(self, start: int, end: int) -> int:
        return int(self.between(start, end).sum()) if end > start else 0


def _groups(sealed: list[Any], kept: Kept, target: int) -> list[list[Any]]:
    """Group neighbouring segments whose compacted records fit into about `target` bytes."""
    groups: list[list[Any]] = []
    size = 0.0
    for segment in sealed:
        stays = kept.count(segment["base"], segment["end"])
        share = segment["bytes"] * stays / max(1, segment["records"])
        if groups and (size + share <= target or size == 0):
            groups[-1].append(segment)
            size += share
        else:
            groups.append([segment])
            size = share
    return groups


def _dirty(group: list[Any], kept: Kept) -> bool:
    there = sum(segment["records"] for segment in group)
    return bool(kept.count(group[0]["base"], group[-1]["end"]) < there)


def in_place(
    source: KeyedRecords, tombstone_seconds: float, roll: bool, segment_bytes: int
) -> Compacted:
    """Have the broker swap sealed segments for compacted ones. Conflict when the topic's policy
    is not `compact`, or its segments changed meanwhile.
    """
    if roll and not source.dry_run:
        source.ask("POST", "roll")
        source.state = source.describe()
    if source.state["policy"] != "compact":
        raise Conflict(
            f"the policy of topic {source.topic!r} is {source.state['policy']!r}: compacting in "
            f"place takes `penstock topic policy {source.topic} compact`, which also ends the "
            "deletion of its old segments"
        )
    archived = source.state["archived_offset"]
    sealed = [
        segment
        for segment in source.state["segments"]
        if segment["sealed"] and (archived is None or segment["end"] <= archived)
    ]
    first = source.state["first_offset"]
    done = Compacted(source.topic, "in place", first, sealed[-1]["end"] if sealed else first)
    done.executed = not source.dry_run
    if not sealed:
        archive = "" if archived is None else " and archived"
        source.say(f"topic {source.topic}: nothing is sealed{archive}")
        return done
    kept = _plan(source, done, tombstone_seconds)
    there, stored = (sum(segment[name] for segment in sealed) for name in ("records", "bytes"))
    if done.records_before != there:  # offsets that were not examined would be removed
        raise Conflict(
            f"topic {source.topic!r}: {done.records_before} records were read where its segments "
            f"have {there}: they changed meanwhile, or cannot be read whole. Nothing was done; run "
            "it again, or `penstock topic verify`"
        )
    groups = [group for group in _groups(sealed, kept, segment_bytes) if _dirty(group, kept)]
    done.bytes_before, done.bytes = stored, stored - done.bytes_before + done.bytes
    if source.dry_run:
        done.swaps = len(groups)
        return done
    done.records, done.bytes = there, stored
    for number, group in enumerate(groups, 1):
        swapped = _swap(source, group, kept)
        done.swaps += 1
        removed = swapped["records_before"] - swapped["records"]
        done.records -= removed
        done.bytes -= swapped["bytes_before"] - swapped["bytes"]
        source.say(
            f"topic {source.topic}: {number} of {len(groups)} swaps, offsets {group[0]['base']} to "
            f"{group[-1]['end'] - 1}: {removed} of {swapped['records_before']} records removed"
        )
    return done


def _plan(source: KeyedRecords, done: Compacted, tombstone_seconds: float) -> Kept:
    """Return the offsets that stay, with the counts."""
    oldest = time.time() - tombstone_seconds
    latest = latest_rows(source.rows(done.first, done.end), "size")
    # Readers that are behind must meet the tombstone, so it stays a while; and a log ends with a
    # record.
    aged = f.col("timestamp") < f.timestamp_seconds(f.lit(oldest))
    keyed = f.col("key").isNotNull() & (f.col("offset") != done.end - 1)
    judged = latest.withColumn("dropped", keyed & f.col("tombstone") & aged)
    counts = {
        "records_before": "sum(records)",
        "bytes_before": "sum(bytes)",
        "bytes": "coalesce(sum(size) FILTER (WHERE NOT dropped), 0)",
        "tombstones": "count_if(dropped)",
        "keyless": "count_if(key IS NULL)",
        "broken": "count_if(broken AND key IS NULL)",
    }
    bits = f"bitmap_construct_agg(offset % {BUCKET_OFFSETS}) FILTER (WHERE NOT dropped)"
    buckets = (
        judged.groupBy(f.expr(f"offset DIV {BUCKET_OFFSETS}"))
        .agg(f.expr(bits), *(f.expr(count).alias(name) for name, count in counts.items()))
        .collect()
    )
    for name in counts:
        setattr(done, name, sum(row[name] for row in buckets))
    kept = Kept({row[0]: bytes(row[1]) for row in buckets})
    done.records = kept.count(done.first, done.end)
    return kept


def _swap(source: KeyedRecords, group: list[Any], kept: Kept) -> Any:
    bases = [segment["base"] for segment in group]
    bits = np.packbits(kept.between(bases[0], group[-1]["end"]), bitorder="little").tobytes()
    body = {
        "incarnation": source.state["incarnation"],
        "bases": bases,
        "keep": base64.b64encode(bits).decode(),
    }
    try:
        return source.ask("POST", "compact", body=body, timeout=3600.0)
    except Conflict:
        if not source.caller.repeated:
            raise
        # The answer to the first attempt was lost with its connection: was it done?
        now = {segment["base"]: segment for segment in source.describe()["segments"]}
        if bases[0] not in now or any(base in now for base in bases[1:]):
            raise
        answer = {}
        for name in ("records", "bytes"):
            answer[f"{name}_before"] = sum(segment[name] for segment in group)
            answer[name] = now[bases[0]][name]
        return answer
