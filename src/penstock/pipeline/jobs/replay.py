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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import Conflict, InvalidRequest
from penstock.net.tls import ca_text
from penstock.net.topic_link import TopicLink
from penstock.pipeline.failure import cause
from penstock.pipeline.jobs.archive import read_archive
from penstock.pipeline.options import BROKER_PATIENCE_SECONDS, Options
from penstock.pipeline.session import activate
from penstock.pipeline.sinks.identity import OTHER_ROWS
from penstock.pipeline.sinks.queue import PushLink
from penstock.protocol.sink_claims import Claim, Claimed

RANGE = 100_000  # offsets in one write, at most; part of the identity


@dataclass
class Replayed:
    """What would be, or was, written."""

    rows: int
    first: int | None
    last: int | None
    ranges: int
    executed: bool


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Which records are written again, and where to."""

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


def replay(
    spark: Any, options: ReplayOptions, say: Callable[[str], None] = lambda _: None
) -> Replayed:
    """Write the records again that `where` (SQL over topic, offset, timestamp, payload)
    selects.
    """
    if bool(options.to_topic) == bool(options.to_queue):
        raise InvalidRequest("replay goes to a topic or to a queue")
    if options.to_topic == options.topic and not options.archive:
        raise InvalidRequest(
            f"a replay of {options.topic!r} into itself would read what it writes: name an end, or "
            "another topic"
        )
    if options.rate < 0:
        raise InvalidRequest(f"the rate is a number of records per second, not {options.rate:g}")
    spark = activate(spark)
    connection = {"broker": options.broker, "directory": options.directory, "token": options.token}
    frame = _source(spark, options.topic, options.archive, connection, options.start, options.end)
    if options.where:
        frame = frame.where(options.where)
    bounds = frame.selectExpr("min(offset) AS first", "max(offset) AS last").collect()[0]
    if bounds.last is None:
        return Replayed(0, None, None, 0, options.execute)
    limit, step = bounds.last + 1, min(RANGE, max(1, int(options.rate))) if options.rate else RANGE
    if options.execute:
        keeper = _keeper(options.to_topic, options.broker, options.url, options.token)
        try:
            plan = json.dumps(
                [options.where or "", options.start, options.end, bool(options.archive)]
            )
            limit, step = _planned(
                keeper.claim,
                options.to_topic or str(options.to_queue),
                options.topic,
                options.id,
                plan,
                limit,
                step,
            )
        finally:
            keeper.close()
    frame = frame.where(f"offset < {limit}")
    counts = frame.selectExpr(f"offset DIV {step} AS range", "offset").groupBy("range")
    ranges = sorted(tuple(row) for row in counts.agg({"offset": "count"}).collect())
    last = frame.selectExpr("max(offset) AS last").collect()[0].last
    result = Replayed(
        sum(count for _, count in ranges), bounds.first, last, len(ranges), options.execute
    )
    if not options.execute:
        return result
    written, fastest = 0, float("inf")
    for number, count in ranges:
        began = time.monotonic()
        low = number * step
        part = (
            frame.where(f"offset >= {low} AND offset < {low + step}")
            .coalesce(1)
            .select("offset", "payload")
        )
        writer = part.write.format("penstock").mode("append").option("orderBy", "offset")
        app = (
            f"replay:{options.id}:{options.topic}:{low}"
            if step == RANGE
            else f"replay:{options.id}:{options.topic}:{low}:{step}"
        )
        writer = writer.option("appId", app).options(
            **({"token": options.token} if options.token else {})
        )
        writer = (
            writer.option("topic", options.to_topic).option("broker", str(options.broker))
            if options.to_topic
            else writer.option("queue", str(options.to_queue)).option("url", str(options.url))
        )
        try:
            writer.save()
        except Exception as error:
            if OTHER_ROWS not in cause(error):
                raise
            raise Conflict(
                f"the source no longer has the records that replay {options.id!r} was begun with "
                f"(offsets {low} to "
                f"{low + step - 1}). Nothing of these was written. Replay what is there under "
                "another --id."
            ) from error
        written += count
        say(f"{written} of {result.rows} records")
        fastest = min(fastest, time.monotonic() - began)
        # the next ones arrive at the end of a write, which takes its time too
        if options.rate and written < result.rows:
            time.sleep(max(0.0, count / options.rate - fastest))
    return result


def _keeper(
    to_topic: str | None, broker: str | None, url: str | None, token: str | None
) -> TopicLink | PushLink:
    """The broker that keeps what the replay is: the one that is written to."""
    token, ca = Options({"token": token or ""}).token(), ca_text(None)
    if to_topic:
        return TopicLink(str(broker), BROKER_PATIENCE_SECONDS, token, ca)
    return PushLink(str(url), token, BROKER_PATIENCE_SECONDS, ca)


def _planned(
    claim: Callable[[Claim], Claimed],
    target: str,
    topic: str,
    id: str,
    plan: str,
    limit: int,
    step: int,
) -> tuple[int, int]:
    """How far the replay of this id goes and in what ranges: as now, or as when it was first
    begun.
    """
    checksum = hashlib.sha256(plan.encode()).hexdigest()[:32]
    note = json.dumps([limit, step])
    answer = claim(Claim(target, f"replay:{id}:{topic}", 0, 0, checksum, uuid.uuid4().hex, note))
    if answer.verdict != "write":
        raise Conflict(
            f"replay {id!r} of {topic!r} into {target!r} was begun with another --where, "
            "--start, --end or source. "
            "Nothing was written. Run it with those it was begun with, or give this one "
            "another --id."
        )
    limit, step = json.loads(answer.note)
    return int(limit), int(step)


def _source(
    spark: Any,
    topic: str,
    archive: str | None,
    connection: dict[str, str | None],
    start: int | None,
    end: int | None,
) -> Any:
    if archive:
        frame = read_archive(spark, archive, topic=topic)
    else:
        given = {"topic": topic, **connection}
        if start is not None:
            given["startingOffsets"] = json.dumps({topic: start})
        if end is not None:
            given["endingOffsets"] = json.dumps({topic: end})
        frame = (
            spark.read.format("penstock").options(**{k: v for k, v in given.items() if v}).load()
        )
    if start is not None:
        frame = frame.where(f"offset >= {int(start)}")
    return frame.where(f"offset < {int(end)}") if end is not None else frame
