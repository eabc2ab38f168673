"""replay: records of an archive, or a range of a topic, once more into a topic or a queue.

It goes forward in ranges of offsets, one after another, so that order is kept and the rate can be
held: a range holds at most a second's worth of records. Every range is written under an identity
made of the replay's `id` and the range itself. What the replay is (which records, how far, in what
ranges) is kept at its target when it is first begun, under its id: run again it goes by that, so
one that was killed adds what is missing, and one that was finished adds nothing, however the source
has grown since. The same id for other records is refused. Run without `execute` it changes nothing
and says what it would do.
"""

import hashlib
import json
import time
import uuid
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import functions as f

from penstock.errors import Conflict, InvalidRequest
from penstock.net.tls import ca_text
from penstock.net.topic_link import TopicLink
from penstock.pipeline.failure import cause
from penstock.pipeline.jobs import Say, quiet
from penstock.pipeline.jobs.archive import Origin, archived_rows
from penstock.pipeline.lake.table import archived_partitions
from penstock.pipeline.options import (
    BROKER_PATIENCE_SECONDS,
    TopicSourceOptions,
    default_token,
    read_options,
)
from penstock.pipeline.session import activate
from penstock.pipeline.sinks.identity import OTHER_ROWS, append_once
from penstock.pipeline.sinks.queue import PushLink
from penstock.pipeline.sources.topic_catalog import Topics
from penstock.protocol.sink_claims import Claim

OFFSETS_PER_WRITE = 100_000  # offsets in one write, at most; part of the identity


@dataclass
class Replayed:
    rows: int
    first: int | None
    last: int | None
    ranges: int
    executed: bool


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    topic: str
    id: str
    to_topic: str | None = None
    to_queue: str | None = None
    archive: str | None = None
    broker: str | None = None
    directory: str | None = None
    url: str | None = None
    token: str | None = None
    where: str | None = None
    start: int | None = None
    end: int | None = None
    rate: float = 0.0
    execute: bool = False


def replay(spark: Any, options: ReplayOptions, say: Say = quiet) -> Replayed:
    """Write the records again that `where` (SQL over topic, offset, timestamp, payload) selects."""
    if bool(options.to_topic) == bool(options.to_queue):
        raise InvalidRequest("replay goes to a topic or to a queue")
    if options.to_topic == options.topic and not options.archive and options.end is None:
        raise InvalidRequest(
            f"a replay of {options.topic!r} into itself would read what it writes: name an end, or "
            "another topic"
        )
    if options.rate < 0:
        raise InvalidRequest(f"the rate is a number of records per second, not {options.rate:g}")
    spark = activate(spark)
    labels = _partitions(options)
    if len(labels) > 1 and (options.start, options.end) != (None, None):
        raise InvalidRequest(
            f"topic {options.topic!r} has {len(labels)} partitions, each with offsets of its own: "
            f"with a start or an end, name one of them, as in {labels[1]!r}"
        )
    result, *others = (_replay(spark, replace(options, topic=label), say) for label in labels)
    for other in others:
        result.rows += other.rows
        result.ranges += other.ranges
    if others:
        result.first = result.last = None  # offsets are of one partition
    return result


def _partitions(options: ReplayOptions) -> list[str]:
    """Return the labels of the partitions to replay, one after another."""
    if options.archive:
        return archived_partitions(options.archive, options.topic)
    with closing(Topics(read_options(TopicSourceOptions, _reach(options)))) as topics:
        return topics.partitions(options.topic)


def _reach(options: ReplayOptions) -> dict[str, str]:
    names = ("topic", "broker", "directory", "token")
    return {name: value for name in names if (value := getattr(options, name))}


def _replay(spark: Any, options: ReplayOptions, say: Say) -> Replayed:
    """Replay one partition."""
    frame = _source(spark, options)
    bounds = frame.selectExpr("min(offset) AS first", "max(offset) AS last").collect()[0]
    if bounds.last is None:
        return Replayed(0, None, None, 0, options.execute)
    limit, step = bounds.last + 1, OFFSETS_PER_WRITE
    if options.rate:
        step = min(OFFSETS_PER_WRITE, max(1, int(options.rate)))
    if options.execute:
        limit, step = _planned(options, limit, step)
    frame = frame.where(f"offset < {limit}")
    counts = frame.groupBy(f.expr(f"offset DIV {step}")).agg(f.count("offset"), f.max("offset"))
    ranges = sorted(tuple(row) for row in counts.collect())
    total, last = sum(count for _, count, _ in ranges), ranges[-1][2] if ranges else None
    result = Replayed(total, bounds.first, last, len(ranges), options.execute)
    if not options.execute:
        return result
    sink = {"queue": options.to_queue, "url": options.url, "token": options.token}
    if options.to_topic:
        sink = {"topic": options.to_topic, "broker": options.broker, "token": options.token}
    written, fastest = 0, float("inf")
    for number, count, _ in ranges:
        began = time.monotonic()
        low = number * step
        part = frame.where(f"offset >= {low} AND offset < {low + step}")
        own_step = f":{step}" if step != OFFSETS_PER_WRITE else ""
        app = f"replay:{options.id}:{options.topic}:{low}{own_step}"
        try:
            append_once(part, ["offset"], app, **sink)
        except Exception as error:
            if OTHER_ROWS not in cause(error):
                raise
            raise Conflict(
                f"the source no longer has the records with which replay {options.id!r} began "
                f"(offsets {low} to {low + step - 1}). None of these were written. Replay the "
                "existing records under another --id."
            ) from error
        written += count
        say(f"{written} of {result.rows} records")
        fastest = min(fastest, time.monotonic() - began)
        # counted from the end of a write, which takes time too
        if options.rate and written < result.rows:
            time.sleep(max(0.0, count / options.rate - fastest))
    return result


def _planned(options: ReplayOptions, limit: int, step: int) -> tuple[int, int]:
    """Return how far the replay of this id goes, and its ranges: those of its first run, which the
    target broker remembers, or new ones.
    """
    token, ca = default_token(options.token), ca_text(None)
    keeper: TopicLink | PushLink
    if options.to_topic:
        keeper = TopicLink(str(options.broker), BROKER_PATIENCE_SECONDS, token, ca)
    else:
        keeper = PushLink(str(options.url), token, BROKER_PATIENCE_SECONDS, ca)
    plan = json.dumps([options.where or "", options.start, options.end, bool(options.archive)])
    checksum = hashlib.sha256(plan.encode()).hexdigest()[:32]
    target, app = options.to_topic or str(options.to_queue), f"replay:{options.id}:{options.topic}"
    note = json.dumps([limit, step])
    with closing(keeper):
        answer = keeper.claim(Claim(target, app, 0, 0, checksum, uuid.uuid4().hex, note))
    if answer.verdict != "write":
        raise Conflict(
            f"replay {options.id!r} of {options.topic!r} into {target!r} began with another "
            "--where, --start, --end or source. Nothing was written. Run it with the same ones, or "
            "with another --id."
        )
    limit, step = json.loads(answer.note)
    return int(limit), int(step)


def _source(spark: Any, options: ReplayOptions) -> Any:
    topic, start, end = options.topic, options.start, options.end
    if options.archive:
        frame = archived_rows(spark, options.archive, Origin(topic=topic))
    else:
        given = {**_reach(options), "firstPartition": "true"}
        if start is not None:
            given["startingOffsets"] = json.dumps({topic: start})
        if end is not None:
            given["endingOffsets"] = json.dumps({topic: end})
        frame = spark.read.format("penstock").options(**given).load()
    if start is not None:
        frame = frame.where(f"offset >= {int(start)}")
    if end is not None:
        frame = frame.where(f"offset < {int(end)}")
    return frame.where(options.where) if options.where else frame
