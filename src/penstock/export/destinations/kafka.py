"""A topic of a Kafka cluster, through an idempotent producer of librdkafka.

Records keep their key, headers and timestamp. The key decides the partition as in Kafka's own
clients. librdkafka numbers the records and retries without a limit. After a timeout, the next
attempt waits for the same answer instead of sending the batch again. So an outage of the cluster
leaves no duplicates, however long it is. A kill of this broker repeats the batches in flight.

Kafka answers each record of a batch. Delivered records are remembered while the others are retried
or cut out.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from penstock.config.schema import Seconds, key
from penstock.export.checks import limit_problems
from penstock.export.context import RouteContext
from penstock.export.destinations import (
    BatchRefused,
    Denied,
    Destination,
    OutgoingBatch,
    RetryLater,
    Target,
    TooBig,
    destination,
)
from penstock.export.envelope import unwrap_record
from penstock.export.kafka import DENIED_ERRORS, KafkaCluster, confluent_kafka
from penstock.protocol.kafka_batch import NewRecord

ADDRESS_ERRORS = (
    "UNKNOWN_TOPIC_OR_PART",
    "_UNKNOWN_TOPIC",
    "_UNKNOWN_PARTITION",
    "TOPIC_EXCEPTION",
)
TOO_LARGE = "MSG_SIZE_TOO_LARGE"
REFUSED_ERRORS = ("INVALID_RECORD", "INVALID_TIMESTAMP", "INVALID_MSG")
POLL_SECONDS = 0.5  # wait for answers before the thread checks whether to end
MAX_REMEMBERED = 1000  # partly delivered batches


@destination("kafka")
@dataclass(frozen=True, kw_only=True)
class KafkaTarget(Target, KafkaCluster):
    needed = ("brokers", "topic")
    takes_records = True

    codec: Literal["none", "gzip", "snappy", "lz4", "zstd"] = key("none", "compression of batches")
    timeout: Seconds = key(30.0, "longest wait for an answer")

    def checks(self) -> list[str]:
        return [*self.cluster_problems(), *limit_problems(self.timeout)]

    def with_source(self, topic: str, _queue: str) -> Target:
        return replace(self, topic=self.topic or topic)

    def make(self, _context: RouteContext) -> Destination:
        return KafkaDestination(self)


@dataclass(slots=True)
class Sending:
    """A batch that the producer is sending. Its thread counts the answers."""

    loop: asyncio.AbstractEventLoop
    remaining: int  # records without an answer
    errors: dict[int, Any] = field(default_factory=dict)  # KafkaError, by the record's index
    done: asyncio.Event = field(default_factory=asyncio.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, place: int, error: Any, _message: Any) -> None:
        with self.lock:
            if error is not None:
                self.errors[place] = error
            self.remaining -= 1
            if not self.remaining:
                self.loop.call_soon_threadsafe(self.done.set)


class PolledProducer:
    """A producer of librdkafka, and the thread that runs its callbacks."""

    def __init__(self, library: Any, settings: dict[str, Any]) -> None:
        self._library = library
        self._producer = library.Producer(settings)
        self._ending = False
        self._work = threading.Event()  # set while there may be answers
        self._thread = threading.Thread(target=self._poll, name="kafka-route", daemon=True)
        self._thread.start()

    def produce(self, topic: str, record: NewRecord, answered: Callable[[Any, Any], None]) -> None:
        try:
            self._producer.produce(
                topic,
                value=record.value,
                key=record.key,
                headers=list(record.headers) or None,
                timestamp=record.timestamp or 0,
                on_delivery=answered,
            )
        except BufferError:
            answered(self._library.KafkaError(self._library.KafkaError._QUEUE_FULL), None)
        except self._library.KafkaException as error:
            answered(error.args[0], None)
        self._work.set()

    def _poll(self) -> None:
        """Run the producer's callbacks. Sleep while no answers are outstanding."""
        while not self._ending:
            self._producer.poll(POLL_SECONDS)
            self._work.clear()
            if not len(self._producer) and not self._ending:
                self._work.wait()

    def end(self) -> threading.Thread:
        """Drop undelivered records, and return the thread, which ends soon."""
        self._ending = True
        self._producer.purge()
        self._work.set()
        return self._thread


class KafkaDestination(Destination):
    def __init__(self, target: KafkaTarget) -> None:
        self._target = target
        self._library = confluent_kafka()
        self._settings = {
            **target.settings(),
            "enable.idempotence": True,
            "message.timeout.ms": 0,  # never give up: a new attempt could store a second copy
            "partitioner": "murmur2_random",  # as Java's clients
            "compression.type": target.codec,
            "linger.ms": 0,
            "topic.metadata.propagation.max.ms": int(target.timeout * 1000),
            "error_cb": self._note,
        }
        self._producer: PolledProducer | None = None
        self._problem: Any = None  # the last error of the connection, until an answer comes
        self._waiting: dict[str, Sending] = {}  # batches that timed out, by key
        self._delivered: dict[str, set[int]] = {}  # record indexes of partly delivered blocks

    async def stop(self) -> None:
        if self._producer is not None:
            await asyncio.to_thread(self._producer.end().join)
            self._producer = None

    def describe(self) -> str:
        return f"Kafka topic {self._target.topic} at {self._target.brokers}"

    def prepare(self, batch: OutgoingBatch) -> list[NewRecord]:
        return [unwrap_record(record) for record in batch.split()]

    async def send(self, batch: OutgoingBatch, prepared: list[NewRecord]) -> None:
        sending = self._waiting.pop(batch.key, None) or self._start(batch, prepared)
        try:
            async with asyncio.timeout(self._target.timeout):
                await sending.done.wait()
        except BaseException as error:
            # The next attempt waits for the same answer, which may have just arrived.
            self._waiting[batch.key] = sending
            if isinstance(error, TimeoutError):
                raise self._unanswered() from None
            raise
        self._problem = None
        if sending.errors:
            self._remember(batch, sending)
            raise self._meaning(sending.errors.values())

    def _start(self, batch: OutgoingBatch, records: list[NewRecord]) -> Sending:
        if self._producer is None:
            self._producer = PolledProducer(self._library, self._settings)
        delivered = self._delivered.get(batch.whole or batch.key, ())
        unsent = [
            (place, record)
            for place, record in enumerate(records, batch.first)
            if place not in delivered
        ]
        sending = Sending(asyncio.get_running_loop(), len(unsent))
        if not unsent:
            sending.done.set()
        for place, record in unsent:
            self._producer.produce(self._target.topic, record, partial(sending.answered, place))
        return sending

    def _note(self, error: Any) -> None:
        self._problem = error

    def _unanswered(self) -> Exception:
        problem = self._problem
        text = f"no answer within {self._target.timeout:g} s"
        if problem is None:
            return RetryLater("timeout", text)
        if problem.name() in DENIED_ERRORS:
            return Denied(problem.str())
        return RetryLater("network", f"{text}: {problem.str()}")

    def _remember(self, batch: OutgoingBatch, sending: Sending) -> None:
        """Remember the delivered records, so that only the others are sent again."""
        places = range(batch.first, batch.first + batch.records)
        key = batch.whole or batch.key
        if key not in self._delivered and len(self._delivered) >= MAX_REMEMBERED:
            del self._delivered[next(iter(self._delivered))]
        self._delivered.setdefault(key, set()).update(
            place for place in places if place not in sending.errors
        )

    def _meaning(self, errors: Iterable[Any]) -> Exception:
        """Return the error for a batch, given the errors of its records."""
        by_name = {error.name(): error for error in errors}
        text = "; ".join(sorted({error.str() for error in by_name.values()}))
        if any(error.fatal() for error in by_name.values()) and self._producer is not None:
            self._producer.end()  # after a fatal error it accepts no more records: replace it
            self._producer = None
            return RetryLater("server_error", text)
        if by_name.keys() & set(DENIED_ERRORS):
            return Denied(text)
        if by_name.keys() & set(ADDRESS_ERRORS):
            return Denied(text, "address")
        if by_name.keys() - set(REFUSED_ERRORS) - {TOO_LARGE}:
            return RetryLater("server_error", text)
        return TooBig(text) if TOO_LARGE in by_name else BatchRefused(text)
