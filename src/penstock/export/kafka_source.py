"""Read a topic of a Kafka cluster as the source of a route, as a member of a consumer group.

Records are put into the send queue, with the durability of the route, before their offsets are
committed. After a crash in between, or a rebalance, some records are read again, but none is
skipped.

librdkafka's calls block, so they run in a thread of their own.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.errors import Unavailable
from penstock.export.envelope import wrap_record
from penstock.export.kafka import confluent_kafka
from penstock.export.sources import SourceReader, make_blocks, push_patiently
from penstock.protocol.kafka_batch import KafkaRecord

log = logging.getLogger("penstock.export")
T = TypeVar("T")

POLL_SECONDS = 1.0  # a cancelled route waits for one poll at most
ANSWER_SECONDS = 10.0
# The send queue may be full for as long as its destination is down.
MAX_POLL_MILLISECONDS = 24 * 3600 * 1000


class KafkaSource(SourceReader):
    _lag: int | None = None  # as of the last poll
    _failure: Any = None  # the last error of the connection that was not reported

    def lag(self) -> int | None:
        return self._lag

    async def _read(self) -> None:
        library = confluent_kafka()
        thread = ThreadPoolExecutor(1, "kafka-source")
        consumer = library.Consumer(self._settings())

        async def call(function: Callable[..., T], *arguments: Any, **more: Any) -> T:
            try:
                return await asyncio.wrap_future(thread.submit(function, *arguments, **more))
            except library.KafkaException as error:
                raise Unavailable(error.args[0].str()) from error

        try:
            await call(consumer.subscribe, [self._name])
            while True:
                await self._move(library, consumer, call)
        finally:
            closing = thread.submit(consumer.close)  # runs after a poll that was cancelled
            thread.shutdown(wait=False)
            with contextlib.suppress(TimeoutError, library.KafkaException):
                await asyncio.wait_for(asyncio.wrap_future(closing), ANSWER_SECONDS)

    def _settings(self) -> dict[str, Any]:
        return {
            **self._spec.source.kafka.settings(),
            "group.id": self._spec.source.group,
            "enable.auto.commit": False,
            "auto.offset.reset": self._spec.source.start,
            "isolation.level": "read_committed",
            "max.poll.interval.ms": MAX_POLL_MILLISECONDS,
            "error_cb": self._note,
        }

    def _note(self, error: Any) -> None:
        self._failure = error

    async def _move(self, library: Any, consumer: Any, call: Callable[..., Any]) -> None:
        """Put messages into the send queue, then commit their offsets."""
        messages = await call(_take, consumer, self._batch.records, self._batch.linger)
        for message in messages:
            if message.error() is not None:
                raise Unavailable(message.error().str())
        if not messages and self._failure is not None:
            self._failure = None
            await call(consumer.list_topics, self._name, ANSWER_SECONDS)  # check the connection
        self.problem = None
        if messages:
            records = [self._record_of(message) for message in messages]
            blocks = await self._context.in_pool(make_blocks, records, self._encoding, self._batch)
            await push_patiently(self._queue, blocks, self._context.clock)
            ends = {message.partition(): message.offset() + 1 for message in messages}
            places = [library.TopicPartition(self._name, *place) for place in ends.items()]
            await call(consumer.commit, offsets=places, asynchronous=False)
        self._lag = await call(_lag_of, consumer)

    def _record_of(self, message: Any) -> bytes:
        if not self._spec.target.takes_records:
            return message.value() or b""
        headers = tuple(message.headers() or ())
        _, timestamp = message.timestamp()
        return wrap_record(
            self._name,
            KafkaRecord(message.offset(), timestamp, message.key(), message.value(), headers),
        )


def _take(consumer: Any, most: int, linger: float) -> list[Any]:
    """Return messages as soon as there is one, with those that follow within `linger` seconds."""
    first = consumer.poll(POLL_SECONDS)
    if first is None:
        return []
    return [first, *(consumer.consume(most - 1, linger) if most > 1 else ())]


def _lag_of(consumer: Any) -> int | None:
    """Return how many records this member has not read; None if that is still unknown."""
    total = 0
    for place in consumer.position(consumer.assignment()):
        low, high = consumer.get_watermark_offsets(place, cached=True)
        if high < 0:
            return None
        total += max(0, high - (place.offset if place.offset >= 0 else low))
    return total
