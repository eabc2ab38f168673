"""Answer Produce, Fetch, ListOffsets and OffsetForLeaderEpoch. Batches are passed on unchanged.

A Fetch answers with whole batches, at least one, however large. The first one contains the
requested offset. A Fetch waits until it has `min_bytes` or `max_wait` is over.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from kio.schema.errors import ErrorCode as Code

from penstock.errors import Damaged, InvalidRequest, PenstockError
from penstock.io.fs import Bytes
from penstock.log.tier.cache import NotCached
from penstock.protocol.kafka_batch import split_batches
from penstock.protocol.roles import Role
from penstock.topics.shared.log import MAX_LOADS, NotLoaded, SharedLog
from penstock.topics.store import AnyLog, TopicStore
from penstock.topics.topic import Appended, Topic
from penstock.wire.framed import Slot
from penstock.wire.kafka.codec import KafkaHead, Values, encode_answer
from penstock.wire.kafka.connection import KafkaConnection, KafkaRequest
from penstock.wire.kafka.errors import code_of, each_partition, text_of, with_code
from penstock.wire.kafka.node import KafkaHandlers

MAX_READ = 1 << 20  # bytes of one partition in an answer; it is read on the event loop
MAX_FETCHED = 4 << 20  # bytes of an answer; the last batch may exceed it
MAX_WAIT = 60.0  # seconds a Fetch may wait for records
LEADER_EPOCH = 1  # the highest in our batches (`kafka_batch`)
LATEST, EARLIEST, MAX_TIMESTAMP = -1, -2, -3
MAX_EPOCH = (1 << 15) - 1


class ProduceAnswer(Slot):
    """The answer to a Produce. It is sent when every partition's append is answered."""

    __slots__ = ("_connection", "_head", "_topics", "_waiting")

    def __init__(self, connection: KafkaConnection, head: KafkaHead | None, weight: int) -> None:
        super().__init__(weight)
        self._connection = connection
        self._head = head  # None: the client wants no answer
        self._topics: list[dict[str, Any]] = []
        self._waiting = 1  # unanswered appends, and one for the request itself

    def partitions(self, topic: str) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        self._topics.append({"name": topic, "partition_responses": answers})
        return answers

    def begin(self) -> None:
        self._waiting += 1

    def end(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            pieces = (
                encode_answer(self._head, {"responses": self._topics})
                if self._head is not None
                else []
            )
            self._connection.fill(self, *pieces)


class PartitionAppend:
    """Receives the answer to one partition's append (`penstock.log.commit.Promise`)."""

    __slots__ = ("_answer", "_produced", "_topic")

    def __init__(self, produced: ProduceAnswer, answer: dict[str, Any], topic: AnyLog) -> None:
        self._produced = produced
        self._answer = answer
        self._topic = topic

    def done(self) -> bool:
        return "error_code" in self._answer

    def set_result(self, appended: Appended) -> None:
        self._answer["error_code"] = Code.none
        self._answer["base_offset"] = appended.first_offset
        self._answer["log_start_offset"] = self._topic.first_offset
        self._produced.end()

    def set_exception(self, error: PenstockError) -> None:
        _refuse(self._answer, error)
        self._produced.end()


def _refuse(answer: dict[str, Any], error: BaseException) -> None:
    corrupt = isinstance(error, Damaged)  # the received batch, not a stored one
    answer["error_code"] = Code.corrupt_message if corrupt else code_of(error)
    answer["error_message"] = text_of(error)
    answer["base_offset"] = -1


class LogRequests(KafkaHandlers):
    # Produce

    def produce(self, connection: KafkaConnection, request: KafkaRequest) -> None:
        body = request.body
        size = sum(len(p.records or b"") for t in body.topic_data for p in t.partition_data)
        produced = ProduceAnswer(connection, request.head if body.acks else None, max(1, size))
        connection.promise(produced)
        for data in body.topic_data:
            answers = produced.partitions(data.name)
            for partition in data.partition_data:
                answer: dict[str, Any] = {"index": partition.index}
                answers.append(answer)
                try:
                    self._access.require(connection, Role.READ_WRITE)
                    if body.transactional_id is not None:
                        raise InvalidRequest("transactions are not supported")
                    topic = self._topics.partition(data.name, partition.index)
                    self._append(topic, partition.records, produced, answer)
                except Exception as error:  # noqa: BLE001 - answered; the connection stays usable
                    _refuse(answer, error)
        produced.end()

    def _append(
        self, topic: AnyLog, records: Bytes | None, produced: ProduceAnswer, answer: dict[str, Any]
    ) -> None:
        batches = split_batches(records or b"")
        if len(batches) != 1:
            raise InvalidRequest(f"a partition gets one record batch, not {len(batches)}")
        topic.appends.enqueue_batch(*batches[0], PartitionAppend(produced, answer, topic))
        produced.begin()
        topic.appends.schedule()

    @with_code
    async def init_producer_id(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        """Return a new producer id. A producer that lost track of its sequences keeps its id and
        gets the next epoch.
        """
        body = request.body
        self._access.require(connection, Role.READ_WRITE, Code.cluster_authorization_failed)
        if body.transactional_id is not None:
            raise InvalidRequest("transactions are not supported")
        before, epoch = getattr(body, "producer_id", -1), getattr(body, "producer_epoch", -1)
        if before >= 0 and 0 <= epoch < MAX_EPOCH:
            return {"producer_id": before, "producer_epoch": epoch + 1}
        return {"producer_id": secrets.randbits(62), "producer_epoch": 0}

    # Fetch

    def fetch(
        self, connection: KafkaConnection, request: KafkaRequest
    ) -> Values | Awaitable[Values]:
        body = request.body
        if getattr(body, "session_id", 0):  # fetch sessions are not supported
            return {"error_code": Code.fetch_session_id_not_found}
        fetch = Fetch(body, lambda: self._access.require(connection, Role.READ_ONLY), self._topics)
        try:
            if fetch.read():
                return fetch.answer()
        except NotCached:
            pass
        return fetch.wait()

    # Offsets

    async def list_offsets(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        async def of_partition(name: str, asked: Any) -> dict[str, Any]:
            self._access.require(connection, Role.READ_ONLY)
            topic = self._topics.partition(name, asked.partition_index)
            offset, time = await _find(topic, asked.timestamp)
            epoch = leader_epoch(self._topics, topic) if offset >= 0 else -1
            return {"offset": offset, "timestamp": time, "leader_epoch": epoch}

        return {"topics": await each_partition(request.body.topics, of_partition)}

    async def offset_for_leader_epoch(
        self, connection: KafkaConnection, request: KafkaRequest
    ) -> Values:
        """Return the end offset of an epoch. A local topic has a single epoch. In a shared topic, a
        failover of the database ends the epoch and begins a new one.
        """

        async def of_partition(name: str, asked: Any) -> dict[str, Any]:
            self._access.require(connection, Role.READ_ONLY)
            topic = self._topics.partition(name, asked.partition)
            end = topic.next_offset
            if isinstance(topic, SharedLog):
                end = await topic.end_of_timeline(asked.leader_epoch)
            return {"leader_epoch": asked.leader_epoch, "end_offset": end}

        return {"topics": await each_partition(request.body.topics, of_partition)}


def leader_epoch(topics: TopicStore, topic: AnyLog) -> int:
    """Return the timeline of the database for a shared topic, a constant for a local one."""
    if topics.shared is not None and isinstance(topic, SharedLog):
        return topics.shared.timeline
    return LEADER_EPOCH


async def _find(topic: AnyLog, timestamp: int) -> tuple[int, int]:
    """Return the first offset at or after this time, and its time; times in milliseconds."""
    if isinstance(topic, SharedLog):
        await topic.refresh_if_possible()
    if timestamp == LATEST:
        return topic.next_offset, -1
    if timestamp == EARLIEST:
        return topic.first_offset, -1
    seconds = timestamp / 1000
    if timestamp == MAX_TIMESTAMP and not isinstance(topic, SharedLog):
        seconds = max(segment.newest for segment in topic.segments) / 1e6
    elif timestamp < 0:
        raise InvalidRequest(f"{timestamp} is not a time")

    def search() -> tuple[int, int]:
        offset = topic.offset_at(seconds)
        if offset >= topic.next_offset:
            return -1, -1
        return offset, int(topic.timestamps(np.array([offset]))[0]) // 1000

    return await topic.read_through(search)


class Fetch:
    """A Fetch request that is being answered."""

    def __init__(self, body: Any, check: Callable[[], None], topics: TopicStore) -> None:
        self._body = body
        self._check = check
        self._topics = topics
        self._responses: list[dict[str, Any]] = []
        self._sources: dict[str, AnyLog] = {}  # the partitions that it reads, by label

    def answer(self) -> Values:
        return {"responses": self._responses}

    def read(self) -> bool:
        """Read all partitions. Return whether that is enough for an answer. Raises `NotCached` if
        some records must be read from the tier: call again in a thread.
        """
        responses: list[dict[str, Any]] = []
        size, left = 0, min(self._body.max_bytes, MAX_FETCHED)
        failed = False
        for asked_topic in self._body.topics:
            answers = []
            for asked in asked_topic.partitions:
                answer: dict[str, Any] = {
                    "partition_index": asked.partition,
                    "high_watermark": -1,
                    "records": b"",
                    "aborted_transactions": None,
                }
                answers.append(answer)
                try:
                    self._check()
                    topic = self._topics.partition(asked_topic.topic, asked.partition)
                    self._sources[topic.name] = topic
                    most = min(asked.partition_max_bytes, left, MAX_READ)
                    # Take the end after the read, so that no record in the answer is beyond it.
                    try:
                        if most > 0 or not size:
                            answer["records"] = topic.batches(asked.fetch_offset, max(1, most)).data
                    except NotLoaded:
                        # Load one partition at a time: all may not fit into the cache. In a later
                        # request, the client lists this one earlier.
                        if not size:
                            raise
                    answer |= {
                        "high_watermark": topic.next_offset,
                        "last_stable_offset": topic.next_offset,
                        "log_start_offset": topic.first_offset,
                    }
                except NotCached:
                    raise
                except Exception as error:  # noqa: BLE001 - answered for this partition
                    answer["error_code"] = code_of(error)
                    failed = True
                size += len(answer["records"])
                left -= len(answer["records"])
            responses.append({"topic": asked_topic.topic, "partitions": answers})
        self._responses = responses  # assigned at once, since this may run in a thread
        return failed or size >= self._body.min_bytes or not self._body.max_wait

    async def wait(self) -> Values:
        """Read again after each commit, until the answer is large enough or time is up."""
        changed = asyncio.Event()
        seconds = min(self._body.max_wait / 1000, MAX_WAIT)
        cancels = [topic.subscribe(changed.set) for topic in self._sources.values()]
        try:
            enough = await self._read_through()
            async with asyncio.timeout(max(0.0, seconds)):
                while not enough:
                    await changed.wait()
                    changed.clear()
                    enough = await self._read_through()
        except TimeoutError:
            pass
        finally:
            for cancel in cancels:
                cancel()
        return self.answer()

    async def _read_through(self) -> bool:
        for _ in range(MAX_LOADS):
            try:
                return self.read()
            except NotLoaded as missing:
                await missing.load()
            except NotCached:
                local = next(one for one in self._sources.values() if isinstance(one, Topic))
                try:
                    return await local.read_through(self.read)
                except NotLoaded as missing:
                    await missing.load()
        return True
