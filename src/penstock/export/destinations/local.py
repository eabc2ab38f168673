"""A topic or a queue of this broker.

A queue accepts JSON payloads and drops duplicates, so a repeated batch is stored once: the
transaction id of a message is the key of the batch and the index in it. Messages from a queue keep
their headers. A topic may get a batch twice after a crash. Records from a topic with record
batches, or from Kafka, keep key, headers and timestamp there, and the key decides the partition.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.buffer import Buffer
from penstock.config.schema import key
from penstock.errors import ConfigError, Full, InvalidRequest, StorageError, TooLarge, Unavailable
from penstock.export.checks import character_problems, name_problems
from penstock.export.context import NO_TOPICS, RouteContext
from penstock.export.destinations import (
    BatchRefused,
    Destination,
    OutgoingBatch,
    RetryLater,
    Target,
    TooBig,
    destination,
)
from penstock.export.envelope import parts, unwrap_record
from penstock.export.payload import as_json
from penstock.log.batches.format import BATCHES
from penstock.protocol.kafka_batch import NewRecord
from penstock.protocol.names import DEFAULT_PARTITION, check_name
from penstock.protocol.partitions import Rotation, partition_of
from penstock.queues.checks import check_name as check_queue_name
from penstock.queues.types import Item
from penstock.topics.store import TopicStore


@destination("topic")
@dataclass(frozen=True, kw_only=True)
class TopicTarget(Target):
    needed = ("topic",)
    takes_records = True

    topic: str = key("", "topic here")

    def checks(self) -> list[str]:
        names = name_problems(check_name, "topic", self.topic)
        return names + character_problems(topic=self.topic)

    def fills(self) -> tuple[str, str]:
        return "topic", self.topic

    def make(self, context: RouteContext) -> Destination:
        if context.topics is None:
            raise ConfigError(NO_TOPICS)
        return TopicDestination(self, context.topics)


@destination("queue")
@dataclass(frozen=True, kw_only=True)
class QueueTarget(Target):
    needed = ("queue",)

    queue: str = key("", "queue here")
    partition: str = key(DEFAULT_PARTITION, "partition")

    def checks(self) -> list[str]:
        return character_problems(queue=self.queue, partition=self.partition) or [
            *name_problems(check_queue_name, "queue", "queue", self.queue),
            *name_problems(check_queue_name, "partition", "partition", self.partition),
        ]

    def fills(self) -> tuple[str, str]:
        return "queue", self.queue

    def make(self, context: RouteContext) -> Destination:
        if context.buffer is None:
            raise ConfigError("this process has no queues")
        return QueueDestination(self, context.buffer)

    def with_source(self, _topic: str, queue: str) -> Target:
        return _FromQueue(**vars(self)) if queue else self


class _FromQueue(QueueTarget):
    """The target of a route from queue to queue."""

    takes_headers = True


@contextmanager
def _errors() -> Iterator[None]:
    """Translate errors of the broker into errors for a batch."""
    try:
        yield
    except (Unavailable, Full, StorageError) as error:
        raise RetryLater("storage", str(error), getattr(error, "retry_after", None)) from error
    except TooLarge as error:
        raise TooBig(str(error)) from error
    except InvalidRequest as error:
        raise BatchRefused(str(error)) from error
    except TimeoutError as error:
        raise RetryLater("timeout", "no answer in time") from error


class TopicDestination(Destination):
    def __init__(self, target: TopicTarget, topics: TopicStore) -> None:
        self._topic = target.topic
        self._topics = topics
        self._rotation = Rotation()

    def prepare(self, batch: OutgoingBatch) -> list[NewRecord]:
        return list(map(unwrap_record, batch.split()))

    async def send(self, batch: OutgoingBatch, prepared: list[NewRecord]) -> None:  # noqa: ARG002
        with _errors():
            if not self._topics.partitions(self._topic):
                timed = any(record.timestamp is not None for record in prepared)
                form = BATCHES.name if timed else None  # they came from record batches
                await self._topics.create(self._topic, form=form)
            count = self._topics.partitions(self._topic)
            without_key = self._rotation.next(count)
            chosen: dict[int, list[NewRecord]] = {}
            for record in prepared:
                key = record.key
                number = without_key if key is None else partition_of(bytes(key), count)
                chosen.setdefault(number, []).append(record)
            for number, records in chosen.items():
                await self._topics.partition(self._topic, number).append_records(records)

    def describe(self) -> str:
        return f"topic {self._topic}"


class QueueDestination(Destination):
    """A queue. Messages are pushed through the buffer, behind older messages that wait there."""

    def __init__(self, target: QueueTarget, buffer: Buffer) -> None:
        self._target = target
        self._buffer = buffer

    def prepare(self, batch: OutgoingBatch) -> list[Item]:
        items = []
        for index, record in enumerate(batch.split()):
            payload, headers = parts(record) if self._target.takes_headers else (record, None)
            item = Item(self._target.queue, as_json(payload), self._target.partition)
            item.transaction_id = f"{batch.key}-{index}"  # sent again, it is stored once
            item.headers = headers
            items.append(item)
        return items

    async def send(self, batch: OutgoingBatch, prepared: list[Item]) -> None:  # noqa: ARG002
        with _errors():
            for pushed in await self._buffer.push(prepared):
                if pushed.status == "full":
                    raise Full(f"queue {self._target.queue} is full")

    def describe(self) -> str:
        return f"queue {self._target.queue}"
