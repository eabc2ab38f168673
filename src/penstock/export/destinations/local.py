"""A topic or a queue of this broker.

    type: topic                   type: queue
    topic: enriched               queue: orders
                                  partition: Default

A queue takes JSON payloads and drops what it has seen (each message's transaction id is the batch's
key and its place), so redelivery changes nothing there. A topic may hold a batch twice after a
crash.
"""

from typing import Any

from penstock.errors import Full, InvalidRequest, StorageFailed, StorageFull, TooLarge, Unavailable
from penstock.export.destinations import Batch, Refused, Retry, TooBig, cheap_to_open
from penstock.export.payload import FRAMES, as_json
from penstock.export.protocols import QueuePort, TopicsPort
from penstock.protocol.names import DEFAULT_PARTITION


class _Local:
    encoding = FRAMES
    compression: int | None = None

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def is_cheap(self, batch: Batch) -> bool:
        return cheap_to_open(batch)

    async def send(self, batch: Batch, prepared: Any) -> None:
        try:
            await self._store(batch.key, prepared)
        except (Unavailable, Full, StorageFull, StorageFailed) as error:
            raise Retry("storage", str(error), getattr(error, "retry_after", None)) from error
        except TooLarge as error:
            raise TooBig(str(error)) from error
        except InvalidRequest as error:
            raise Refused(str(error)) from error
        except TimeoutError as error:
            raise Retry("timeout", "no answer in time") from error

    async def _store(self, _key: str, _records: list[bytes]) -> None:
        raise NotImplementedError


class TopicDestination(_Local):
    def __init__(self, topics: TopicsPort, topic: str) -> None:
        self._topics, self._topic = topics, topic

    def prepare(self, batch: Batch) -> list[bytes]:
        return batch.split()

    async def _store(self, _key: str, records: list[bytes]) -> None:
        topic = self._topics.get(self._topic) or await self._topics.create(self._topic)
        await topic.append(records)

    def describe(self) -> str:
        return f"topic {self._topic}"


class QueueDestination(_Local):
    def __init__(self, queues: QueuePort, queue: str, partition: str = DEFAULT_PARTITION) -> None:
        self._queues, self._queue, self._partition = queues, queue, partition

    def prepare(self, batch: Batch) -> list[bytes]:
        return [as_json(record) for record in batch.split()]

    async def _store(self, key: str, records: list[bytes]) -> None:
        await self._queues.push(self._queue, self._partition, records, key)

    def describe(self) -> str:
        return f"queue {self._queue}"
