"""Deliver the records of a topic to many subscribers (SSE, WebSocket) as they are appended.

A topic with subscribers has one feed. It reads and formats each record once (`FeedChunk`) and hands
the same bytes to every subscriber at the head of the log. A subscriber whose socket is full leaves
the head and keeps only its position. When its socket has room again, it reads from there at its own
pace until it is back at the head. A slow subscriber delays only itself, misses nothing, and uses
bounded memory.

After a delivery the feed rests twice as long as the delivery took (at most `MAX_REST_SECONDS`).
Records that are appended meanwhile go out together. With many subscribers this keeps the fan-out at
a third of the event loop: a delivery costs a system call per subscriber, here and at the client.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import cached_property
from itertools import repeat
from typing import Protocol

import msgspec

from penstock.errors import Damaged, NotFound, StorageError, Unavailable
from penstock.io.tasks import RETRY_SECONDS
from penstock.log.segment import Batch
from penstock.log.tier.cache import NotCached
from penstock.protocol.records import RecordMessage, message, record_message
from penstock.protocol.status import details_of
from penstock.topics.topic_log import TopicLog
from penstock.wire.keepalive import KeepAlive

MAX_RECORDS = 500  # per chunk
MAX_BYTES = 256 << 10  # per chunk
REST_FACTOR = 2.0  # times as long as a delivery took
MAX_REST_SECONDS = 0.004

log = logging.getLogger("penstock.feed")

_encode = msgspec.json.Encoder().encode


def messages_of(topic: str, batch: Batch) -> list[RecordMessage]:
    """Return the records as JSON structs, with key, headers and timestamp where they exist."""
    records = batch.records()
    if records is not None:
        return [record_message(topic, record) for record in records]
    return list(map(message, repeat(topic), batch.offsets.tolist(), batch.payloads()))


class Notification(msgspec.Struct):
    topic: str
    messages: list[RecordMessage]
    command: str = "message_batch_notification"
    partition: int | msgspec.UnsetType = msgspec.UNSET  # unless it is 0


class FeedChunk:
    """Consecutive records, formatted on first use and then shared by all subscribers."""

    empty = False  # no records: only offsets without records, at the end of the log

    def __init__(self, topic: str, batch: Batch, partition: int = 0) -> None:
        self.topic = topic
        self.partition = partition
        self.next_offset = batch.next_offset
        self.empty = not batch.count
        self._batch = batch

    @cached_property
    def _messages(self) -> list[RecordMessage]:
        return messages_of(self.topic, self._batch)

    @cached_property
    def sse(self) -> bytes:
        return b"".join(
            b"id: %d\nevent: message\ndata: %b\n\n" % (message.offset, _encode(message))
            for message in self._messages
        )

    @cached_property
    def notification(self) -> bytes:
        """Return the WebSocket's message_batch_notification."""
        notification = Notification(self.topic, self._messages)
        notification.partition = self.partition or msgspec.UNSET
        return _encode(notification)


class Lost(FeedChunk):
    """Records that can no longer be read: subscribers get an error, then the records after them."""

    def __init__(self, topic: str, error: Damaged, next_offset: int) -> None:
        self.topic = topic
        self.next_offset = next_offset
        self._error = str(error)
        self._details = msgspec.to_builtins(details_of(error))

    @cached_property
    def sse(self) -> bytes:
        data = {"topic": self.topic, "error": self._error, **self._details}
        return b"event: error\ndata: %b\n\n" % _encode(data)

    @cached_property
    def notification(self) -> bytes:
        data = {"topic": self.topic, "error_message": self._error, "command": "error_response"}
        return _encode(data | self._details)


class Subscriber(Protocol):
    def deliver(self, chunk: FeedChunk) -> bool:
        """Accept the chunk; return False if nothing more fits until `Subscription.resume`."""

    def ended(self) -> None:
        """Note that the topic was deleted."""


class Subscription:
    """A subscriber's position in a topic."""

    __slots__ = ("_feed", "closed", "position", "subscriber")

    def __init__(self, feed: "Feed", subscriber: Subscriber, position: int) -> None:
        self._feed = feed
        self.subscriber = subscriber
        self.position = position
        self.closed = False

    def resume(self) -> None:
        """Continue after the subscriber has room again."""
        self._feed.catch_up(self)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._feed.remove(self)


class Feed:
    def __init__(self, topic: TopicLog, empty: Callable[["Feed"], None]) -> None:
        self.topic = topic
        self._empty = empty  # called when the last subscriber has left
        self._loop = asyncio.get_running_loop()
        self._head = topic.next_offset  # the next offset for subscribers at the head
        self.live: dict[Subscription, None] = {}  # at the head, in order of arrival
        self._all: set[Subscription] = set()
        self._scheduled: asyncio.TimerHandle | asyncio.Handle | None = None  # the next delivery
        # The earliest next delivery, by `perf_counter`: uvloop's clock counts milliseconds.
        self._rest_until = 0.0
        self._unsubscribe = topic.subscribe(self._appended)
        # Subscribers that are reading from the tier.
        self._reading: dict[Subscription, asyncio.Task[None]] = {}

    @property
    def subscribers(self) -> int:
        return len(self._all)

    def add(self, subscriber: Subscriber, position: int) -> Subscription:
        """Start the subscriber at `position`; existing records follow at once."""
        subscription = Subscription(self, subscriber, position)
        self._all.add(subscription)
        self._loop.call_soon(self.catch_up, subscription)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        self._all.discard(subscription)
        self.live.pop(subscription, None)
        if not self._all:
            self.close()
            self._empty(self)

    def close(self) -> None:
        self._unsubscribe()
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None

    def end(self) -> None:
        """Tell every subscriber that the topic was deleted."""
        for subscription in list(self._all):
            subscription.closed = True
            subscription.subscriber.ended()
        self._all.clear()
        self.live.clear()
        self.close()
        self._empty(self)

    def catch_up(self, subscription: Subscription) -> None:
        """Send a lagging subscriber one chunk per turn until it is at the head or full."""
        if subscription.closed or subscription in self.live or subscription in self._reading:
            return
        if self.topic.deleted:
            self.end()
            return
        if subscription.position >= self._head:
            self.live[subscription] = None
            return
        try:
            chunk = self._read(subscription.position)
        except NotCached:
            self._reading[subscription] = self._loop.create_task(self._read_tier(subscription))
        except (Unavailable, StorageError) as error:  # also of a shared topic's failed load
            self._retry(subscription, error)
        else:
            self._hand_over(subscription, chunk)

    def _retry(self, subscription: Subscription, error: Exception) -> None:
        log.warning("topic %s: a subscriber waits, trying again: %s", self.topic.name, error)
        self._loop.call_later(RETRY_SECONDS, self.catch_up, subscription)

    async def _read_tier(self, subscription: Subscription) -> None:
        """Catch up from the tier, in a task of its own."""
        position = subscription.position
        try:
            chunk = await self.topic.read_through(lambda: self._read(position))
        except NotFound:  # the topic was deleted; the subscriber was notified
            return
        except Exception as error:  # noqa: BLE001 no error may leave the subscriber waiting
            self._retry(subscription, error)
        else:
            if not subscription.closed:
                self._hand_over(subscription, chunk)
        finally:
            del self._reading[subscription]

    def _hand_over(self, subscription: Subscription, chunk: FeedChunk) -> None:
        subscription.position = chunk.next_offset
        if chunk.empty or subscription.subscriber.deliver(chunk):
            self._loop.call_soon(self.catch_up, subscription)

    def _appended(self) -> None:
        if self.topic.deleted:
            self.end()
            return
        if self._scheduled is not None:
            return
        if not self.live:
            self._head = self.topic.next_offset
            return
        rest = self._rest_until - time.perf_counter()
        if rest <= 0:
            self._scheduled = self._loop.call_soon(self._deliver)
        else:
            self._scheduled = self._loop.call_later(rest, self._deliver)

    def _deliver(self) -> None:
        self._scheduled = None
        started = time.perf_counter()
        if self._head < self.topic.next_offset:
            try:
                chunk = self._read(self._head)
            except (Unavailable, StorageError):  # every subscriber catches up by itself
                for subscription in self.live:
                    self._loop.call_soon(self.catch_up, subscription)
                self.live.clear()
                self._head = self.topic.next_offset
                return
            first, self._head = self._head, chunk.next_offset
            following = self._head
            full = []
            for subscription in self.live:
                if subscription.position > first:  # it waits for an offset beyond the head
                    if subscription.position < following:
                        full.append(subscription)
                        self._loop.call_soon(self.catch_up, subscription)
                    continue
                subscription.position = following
                if not (chunk.empty or subscription.subscriber.deliver(chunk)):
                    full.append(subscription)
            for subscription in full:
                self.live.pop(subscription, None)
        ended = time.perf_counter()
        self._rest_until = ended + min(REST_FACTOR * (ended - started), MAX_REST_SECONDS)
        if self._head < self.topic.next_offset:
            self._appended()

    def _read(self, position: int) -> FeedChunk:
        """Read the next records from `position`, or from the first one that is still stored."""
        topic = self.topic
        try:
            batch = topic.read(position, MAX_RECORDS, MAX_BYTES)
        except Damaged as error:
            log.error("topic %s: damaged records at offset %d: %s", topic.name, position, error)
            return Lost(
                topic.topic,
                error,
                error.resume if error.resume is not None else topic.next_offset,
            )
        return FeedChunk(topic.topic, batch, topic.partition)


class Feeds:
    """The feeds of all watched topics. A feed exists while it has subscribers.

    `keep_alive` sends a comment to idle subscribers.
    """

    def __init__(self, keep_alive: KeepAlive | None = None) -> None:
        self.keep_alive = keep_alive or KeepAlive()
        self._feeds: dict[TopicLog, Feed] = {}  # each has at least one subscriber

    def subscribe(self, topic: TopicLog, subscriber: Subscriber, position: int) -> Subscription:
        feed = self.of(topic)
        if feed is None:
            feed = self._feeds[topic] = Feed(topic, self._remove)
        return feed.add(subscriber, position)

    def of(self, topic: TopicLog) -> Feed | None:
        """Return the feed of a topic that has subscribers."""
        return self._feeds.get(topic)

    def _remove(self, feed: Feed) -> None:
        self._feeds.pop(feed.topic, None)

    @property
    def subscribers(self) -> int:
        return sum(feed.subscribers for feed in self._feeds.values())
