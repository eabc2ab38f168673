"""The topic source, batch and streaming.

An offset in Spark's checkpoint is, per topic, the incarnation and the exclusive end: `{"orders":
{"incarnation": "6f...", "next": 500}}`. The incarnation tells a topic from a later one with the
same name. Without it, a query would silently skip or repeat records after a topic was re-created.

A task reads a range of offsets. Ranges depend only on start, end and the options, never on the
number of cores or the state of the log. A repeated batch must be cut into the same tasks: sinks
that write exactly once rely on it.
"""

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.errors import (
    Conflict,
    Damaged,
    InvalidOffset,
    InvalidRequest,
    NotFound,
    PenstockError,
)
from penstock.pipeline.failure import plain_errors
from penstock.pipeline.options import EARLIEST, LATEST, Positions, TopicSourceOptions
from penstock.pipeline.source_columns import (
    ALL_TOPIC_COLUMNS,
    KEYED_COLUMNS,
    checked_columns,
    topic_batch,
)
from penstock.pipeline.sources.pushed_filters import FilteredReader, Interval, Names
from penstock.pipeline.sources.topic_catalog import Topics, TopicState
from penstock.pipeline.sources.trigger_delay import TriggerDelay
from penstock.protocol.names import partition_label, split_label

log = logging.getLogger("penstock.pipeline")

MANY_TASKS = 64  # for one topic; above this, ask the broker for gaps
# Small topics share tasks: a task costs Spark about 20 ms, reading a few records much less. Do not
# change these: a batch repeated by a newer version must be cut into the same tasks.
GROUP_FROM = 32  # topics with something to read; with fewer, each has its own task
GROUP_TOPICS = 64  # per task, at most
GROUP_RECORDS = 100_000  # per task, at most
REMEDY = (
    "Records were lost to this query. To resume with what remains, start it once with "
    "failOnDataLoss=false; to begin again, give it a new checkpoint."
)


class DataLoss(PenstockError):
    """The records that follow the checkpoint are gone."""


@dataclass
class Range:
    """One task's share of a topic."""

    topic: str
    incarnation: str
    start: int
    end: int


@dataclass
class TopicTask(InputPartition):
    """The ranges that a task reads in order: one, or those of several small topics."""

    ranges: list[Range]


class TopicPlan:
    """Choose topics and ranges, and cut them into tasks. Picklable."""

    def __init__(self, options: TopicSourceOptions, columns: Sequence[str]) -> None:
        self.columns = checked_columns("topic", ALL_TOPIC_COLUMNS, columns)
        keyed = not {*KEYED_COLUMNS.names}.isdisjoint(self.columns)
        if keyed and (options.tier or options.archive):
            raise InvalidRequest("keys and headers are read without the options tier and archive")
        self.given = options
        self.topics = Topics(options, keyed=keyed)
        self.named = list(dict.fromkeys(options.topics))
        self.delay = TriggerDelay(options)
        self._all_partitions = not options.first_partition

    def names(self) -> list[str]:
        """Return the topics to read: those named, or those that match the pattern now."""
        return self.named or [
            name for name in self.topics.names() if re.fullmatch(self.given.pattern or "", name)
        ]

    def states(self) -> dict[str, TopicState]:
        """Return the state of every partition of the topics, by label."""
        return dict(self.each_partition(self.names(), self.topics.state))

    def each_partition(
        self, names: Iterable[str], look: Callable[[str], TopicState]
    ) -> Iterator[tuple[str, TopicState]]:
        for name in names:
            state = look(name)
            yield name, state
            if self._all_partitions and "/" not in name:
                for number in range(1, state.partitions):
                    label = partition_label(name, number)
                    yield label, look(label)

    def state_for_batch(self, topic: str) -> TopicState:
        """Return the state. A batch read from a given offset needs nothing before that offset."""
        asked = self.given.starting_offsets
        if isinstance(asked, dict) and not self.given.starting_at:
            return self.topics.state(topic, asked.get(topic, EARLIEST))
        return self.topics.state(topic)

    def start_of(self, topic: str, state: TopicState) -> int:
        return self._resolve(
            topic, state, self.given.starting_offsets, self.given.starting_at, EARLIEST
        )

    def end_of(self, topic: str, state: TopicState) -> int:
        return self._resolve(topic, state, self.given.ending_offsets, self.given.ending_at, LATEST)

    def _resolve(
        self, topic: str, state: TopicState, asked: Positions, times: Positions | None, missing: int
    ) -> int:
        at = times.get(topic) if isinstance(times, dict) else times
        if at is not None:
            return min(max(self.topics.offset_at(topic, at), state.first), state.next)
        offset = asked.get(topic, missing) if isinstance(asked, dict) else asked
        if offset == EARLIEST:
            return state.first
        if offset == LATEST:
            return state.next
        if not state.first <= offset <= state.next and self.given.fail_on_data_loss:
            raise InvalidOffset(
                f"topic {topic!r} has offsets {state.first} to {state.next}; {offset} was asked "
                "for. Ask for one of those, or set failOnDataLoss=false to take the nearest."
            )
        return min(max(offset, state.first), state.next)

    def split(self, span: Range, share: int) -> list[Range]:
        """Cut a span into at least `share` ranges of nearly equal length, within the task limit."""
        total = span.end - span.start
        count = min(total, max(share, -(-total // self.given.max_records_per_partition)))
        cuts = [span.start + total * i // count for i in range(count + 1)] if count else []
        return [Range(span.topic, span.incarnation, a, b) for a, b in pairwise(cuts)]

    def _without_gaps(self, span: Range) -> Iterator[Range]:
        """Cut large gaps out of a span that would otherwise be very many tasks. Adoption from the
        tier leaves such gaps."""
        begin = at = span.start
        while (
            at < span.end
            and span.end - span.start > MANY_TASKS * self.given.max_records_per_partition
        ):
            first = min(span.end, self.topics.first_from(span.topic, at))
            if first - at >= self.given.max_records_per_partition:
                if begin < at:
                    yield Range(span.topic, span.incarnation, begin, at)
                begin = first
            at = max(at, first) + self.given.max_records_per_partition
        if begin < span.end:
            yield Range(span.topic, span.incarnation, begin, span.end)

    def tasks(self, spans: dict[str, tuple[str, int, int]]) -> list[TopicTask]:
        """Cut (incarnation, start, end) by topic into tasks. The same spans give the same tasks."""
        pieces = [
            piece
            for topic in sorted(spans)
            for piece in self._without_gaps(Range(topic, *spans[topic]))
        ]
        total = sum(piece.end - piece.start for piece in pieces)
        groups: list[list[Range]] = []
        for piece in pieces:
            share = -(-self.given.min_partitions * (piece.end - piece.start) // total)
            groups += [[part] for part in self.split(piece, share)]
        if len(spans) > max(GROUP_FROM, self.given.min_partitions):
            # `minPartitions` asks for more, and so for shorter, tasks.
            most = total // self.given.min_partitions if self.given.min_partitions > 1 else total
            groups = _grouped(
                groups, min(most, GROUP_RECORDS, self.given.max_records_per_partition)
            )
        return [TopicTask(ranges) for ranges in groups]


def _grouped(parts: list[list[Range]], most: int) -> list[list[Range]]:
    """Group neighbouring topics up to the limits of a task. Only their lengths count."""
    tasks: list[list[Range]] = []
    records = 0
    for (part,) in parts:
        size = part.end - part.start
        if tasks and records + size <= most and len(tasks[-1]) < GROUP_TOPICS:
            tasks[-1].append(part)
            records += size
        else:
            tasks.append([part])
            records = size
    return tasks


@plain_errors
class _TaskReader:
    """Read a task's rows, for the batch reader and the streaming reader."""

    plan: TopicPlan
    _times: Interval | None = None  # microseconds; set by a filter on `timestamp`

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a task's rows. Raise DataLoss if some are gone and `failOnDataLoss` is set."""
        assert isinstance(partition, TopicTask)
        try:
            for part in partition.ranges:
                yield from self._read_range(part)
        finally:
            self.plan.topics.close()

    def _read_range(self, task: Range) -> Iterator[pa.RecordBatch]:
        o, start = self.plan, task.start
        while True:
            try:
                for batch in o.topics.read(task.topic, task.incarnation, start, task.end):
                    rows = topic_batch(task.topic, batch, o.columns)
                    yield rows if self._times is None else self._times.filter(rows, batch.times)
                    start = int(batch.offsets[-1]) + 1
                return
            except InvalidOffset as error:
                state = o.topics.state(task.topic)
                if o.given.fail_on_data_loss:
                    raise DataLoss(
                        f"topic {task.topic!r}: offsets {start} to "
                        f"{min(state.first, task.end) - 1} were to be read and have aged out "
                        f"({error}). {REMEDY}"
                    ) from error
                start = max(state.first, start + 1)
            except Damaged as error:
                if o.given.fail_on_data_loss or error.resume is None:
                    raise DataLoss(f"topic {task.topic!r}: {error}. {REMEDY}") from error
                start = max(error.resume, start + 1)
            except (Conflict, NotFound) as error:
                if o.given.fail_on_data_loss:
                    raise DataLoss(f"{error}. {REMEDY}") from error
                return


@plain_errors
class TopicReader(_TaskReader, FilteredReader):
    """`spark.read.format("penstock").option("topic", ...)`."""

    def __init__(self, plan: TopicPlan) -> None:
        self.plan = plan
        self._offsets = Interval()
        self._times: Interval = Interval()
        self._names = Names()
        filters: dict[str, Interval | Names] = {
            "offset": self._offsets,
            "timestamp": self._times,
            "topic": self._names,
        }
        super().__init__(filters, ALL_TOPIC_COLUMNS.names)

    def partitions(self) -> Sequence[InputPartition]:
        o = self.plan
        spans = {}
        names = [name for name in o.names() if split_label(name)[0] in self._names]
        for topic, state in o.each_partition(names, o.state_for_batch):
            span = o.start_of(topic, state), o.end_of(topic, state)
            start, end = self._narrowed(topic, *span, ordered=state.ordered)
            if start < end:
                spans[topic] = (state.incarnation, start, end)
        o.topics.close()
        return o.tasks(spans) or [TopicTask([])]  # without a task, Spark would create one

    def _narrowed(self, topic: str, start: int, end: int, *, ordered: bool) -> tuple[int, int]:
        """Narrow the range to the offsets and times that the filters allow. The broker finds times
        by whole milliseconds, if they are in order."""
        topics, times = self.plan.topics, self._times
        if ordered and times.low is not None:
            start = max(start, topics.offset_at(topic, max(0, times.low // 1000)))
        if ordered and times.high is not None:
            end = min(end, topics.offset_at(topic, max(0, -(-times.high // 1000))))
        if self._offsets.high is not None:
            end = min(end, self._offsets.high)
        return max(start, self._offsets.low or 0), end


@plain_errors
class TopicStreamReader(_TaskReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("penstock").option("topic", ...)`."""

    def __init__(self, plan: TopicPlan) -> None:
        plan.given.refuse_end()
        self.plan = plan
        self._target: dict[str, TopicState] | None = None
        self._shown: dict[str, Any] | None = None  # the position that the group shows

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        o = self.plan
        return {
            topic: {"incarnation": state.incarnation, "next": o.start_of(topic, state)}
            for topic, state in o.states().items()
        }

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self.plan.given.max_offsets_per_trigger:
            return ReadMaxRows(self.plan.given.max_offsets_per_trigger)
        if self.plan.given.max_bytes_per_trigger:
            return ReadMaxBytes(self.plan.given.max_bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self.plan.states()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch. Everything before `start` is done, though Spark calls
        `commit` only when there is a next batch."""
        _check_shape(start)
        self.commit(start)
        now = self.plan.states() if self._target is None else self._target
        self._refuse_vanished(start, now)
        lags: dict[str, int] = {}
        begins: dict[str, int] = {}
        for topic, state in now.items():
            begins[topic] = self._begin(topic, start.get(topic), state)
            lags[topic] = max(0, state.next - begins[topic])
        waiting, delay = sum(lags.values()), self.plan.delay
        if self._target is None and waiting and delay.holds(waiting >= delay.at_least):
            return start
        if not isinstance(limit, ReadAllAvailable) and self._admit(now, lags, limit) != lags:
            for topic, state in now.items():  # a gap would be very many empty batches
                begins[topic] = min(
                    state.next,
                    max(begins[topic], self.plan.topics.first_from(topic, begins[topic])),
                )
                lags[topic] = max(0, state.next - begins[topic])
        takes = self._admit(now, lags, limit)
        offsets = {
            topic: {"incarnation": state.incarnation, "next": begins[topic] + takes[topic]}
            for topic, state in now.items()
        }
        # A deleted topic keeps its offset: there is nothing more to read from it.
        return {**{topic: at for topic, at in start.items() if topic not in now}, **offsets}

    def _begin(self, topic: str, at: dict[str, Any] | None, state: TopicState) -> int:
        """Return the offset to continue at. Raise DataLoss if records before it were lost."""
        if at is None:
            return state.first  # new since the query started: read all of it
        resume, loss = int(at["next"]), ""
        if at["incarnation"] != state.incarnation:
            loss = (
                " was deleted and created again since the last batch: the checkpoint is at "
                f"offset {resume} of incarnation {at['incarnation']}, the topic is incarnation "
                f"{state.incarnation}"
            )
            resume = state.first
        elif resume < state.first:
            loss = f": offsets {resume} to {state.first - 1} have aged out before they were read"
            resume = state.first
        elif resume > state.next:
            loss = f" ends at offset {state.next}, but {resume} was already read: its end was lost"
            resume = state.next
        if loss and self.plan.given.fail_on_data_loss:
            raise DataLoss(f"topic {topic!r}{loss}. {REMEDY}")
        return resume

    def _refuse_vanished(self, start: dict[str, Any], now: Collection[str]) -> None:
        gone = [label for label in start if label not in now and split_label(label)[0] not in now]
        if gone and not self.plan.given.pattern:
            raise InvalidRequest(
                f"the checkpoint belongs to the topics {', '.join(sorted(start))}; this query "
                f"reads {', '.join(sorted(now))}. Use a checkpoint of its own for another list of "
                "topics."
            )

    def _admit(
        self, now: dict[str, TopicState], lags: dict[str, int], limit: ReadLimit
    ) -> dict[str, int]:
        """Return the number of records to read per topic, in proportion to its lag."""
        if isinstance(limit, ReadAllAvailable):
            return lags
        o = self.plan
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else o.given.max_offsets_per_trigger
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else o.given.max_bytes_per_trigger
        share = 1.0
        total = sum(lags.values())
        if rows and total > rows:
            share = min(share, rows / total)
        # Only the mean record size of a topic is known, so a limit in bytes is approximate.
        weight = sum(lag * now[topic].mean_bytes for topic, lag in lags.items())
        if size and weight > size:
            share = min(share, size / weight)
        if share == 1.0:
            return lags
        takes = {topic: int(lag * share) for topic, lag in lags.items()}
        if not any(takes.values()):  # a limit below one record each must not stop the query
            takes[max(lags, key=lambda topic: lags[topic])] = 1
        return takes

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return {
            topic: {"incarnation": state.incarnation, "next": state.next}
            for topic, state in self.plan.states().items()
        }

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        spans = {}
        _check_shape(end)
        # Spark repeats an unfinished batch without asking for the latest offset first.
        if not self.plan.given.pattern:
            self._refuse_vanished(end, self.plan.named)
        for topic, to in end.items():
            at = start.get(topic)
            if at is not None and at["incarnation"] == to["incarnation"]:
                begin = int(at["next"])
            else:
                begin = min(self.plan.topics.state(topic).first, int(to["next"]))
            if begin < to["next"]:
                spans[topic] = (to["incarnation"], begin, int(to["next"]))
        return self.plan.tasks(spans)

    def commit(self, end: dict[str, Any]) -> None:
        """Commit the position for a group, for display: a failure only warns."""
        group = self.plan.given.group
        if not group or not self.plan.given.broker or end == self._shown:
            return
        self._shown = end
        for topic, at in end.items():
            try:
                self.plan.topics.link.commit(topic, group, at["next"])
            except PenstockError as error:
                log.warning(
                    "group %s of topic %s could not be moved to %d: %s",
                    *(group, topic, at["next"], error),
                )

    def stop(self) -> None:
        self.plan.topics.close()


def _check_shape(offset: Any) -> None:
    ok = isinstance(offset, dict) and all(
        isinstance(at, dict) and {"incarnation", "next"} <= at.keys() for at in offset.values()
    )
    if not ok:
        raise InvalidRequest(f"the checkpoint is not of a topic source: {json.dumps(offset)[:200]}")
