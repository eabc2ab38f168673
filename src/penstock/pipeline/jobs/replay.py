"""replay: records of an archive, or a range of a topic, once more into a topic or a queue.

It goes forward in ranges of offsets, one after another, so that order is kept and the rate can be held. Every range is
written under an identity made of the replay's `id` and the range itself: a replay that was killed and is run again with
the same id adds only what is missing. Run without `execute` it changes nothing and says what it would do.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidRequest
from penstock.pipeline.jobs.archive import read_archive
from penstock.pipeline.session import activate

RANGE = 100_000  # offsets in one write; part of the identity, so it never changes


@dataclass
class Replayed:
    """What would be, or was, written."""

    rows: int
    first: int | None
    last: int | None
    ranges: int
    executed: bool


def replay(
    spark: Any,
    *,
    topic: str,
    id: str,
    to_topic: str | None = None,
    to_queue: str | None = None,
    archive: str | None = None,
    broker: str | None = None,
    directory: str | None = None,
    url: str | None = None,
    token: str | None = None,
    where: str | None = None,
    start: int | None = None,
    end: int | None = None,
    rate: float = 0.0,
    execute: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Replayed:
    """Write the records of `topic` again that `where` (SQL over topic, offset, timestamp, payload) selects."""
    if bool(to_topic) == bool(to_queue):
        raise InvalidRequest("replay goes to a topic or to a queue")
    if to_topic == topic and not archive:
        raise InvalidRequest(
            f"a replay of {topic!r} into itself would read what it writes: name an end, or another topic"
        )
    spark = activate(spark)
    frame = _source(spark, topic, archive, broker, directory, token, start, end)
    if where:
        frame = frame.where(where)
    counts = frame.selectExpr("offset DIV %d AS range" % RANGE, "offset").groupBy("range")  # noqa: UP031
    found = sorted(tuple(row) for row in counts.agg({"offset": "count"}).collect())
    bounds = frame.selectExpr("min(offset) AS first", "max(offset) AS last").collect()[0]
    result = Replayed(sum(count for _, count in found), bounds.first, bounds.last, len(found), execute)
    if not execute:
        return result
    began, written = time.monotonic(), 0
    for number, count in found:
        low = number * RANGE
        part = frame.where(f"offset >= {low} AND offset < {low + RANGE}").coalesce(1).select("offset", "payload")
        writer = part.write.format("penstock").mode("append").option("orderBy", "offset")
        writer = writer.option("appId", f"replay:{id}:{topic}:{low}").options(**({"token": token} if token else {}))
        if to_topic:
            writer.option("topic", to_topic).option("broker", str(broker)).save()
        else:
            writer.option("queue", str(to_queue)).option("url", str(url)).save()
        written += count
        say(f"{written} of {result.rows} records")
        if rate > 0 and (ahead := written / rate - (time.monotonic() - began)) > 0:
            time.sleep(ahead)
    return result


def _source(
    spark: Any,
    topic: str,
    archive: str | None,
    broker: str | None,
    directory: str | None,
    token: str | None,
    start: int | None,
    end: int | None,
) -> Any:
    if archive:
        frame = read_archive(spark, archive, topic=topic)
    else:
        given = {"topic": topic, "broker": broker, "directory": directory, "token": token}
        if start is not None:
            given["startingOffsets"] = json.dumps({topic: start})
        if end is not None:
            given["endingOffsets"] = json.dumps({topic: end})
        frame = spark.read.format("penstock").options(**{k: v for k, v in given.items() if v}).load()
    if start is not None:
        frame = frame.where(f"offset >= {int(start)}")
    return frame.where(f"offset < {int(end)}") if end is not None else frame
