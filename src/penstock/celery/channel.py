"""A channel of kombu: declare, publish and consume through queues, groups and partitions.

| kombu | Penstock |
|---|---|
| a queue | a queue of the same name, with `ordering: none` |
| a queue with `x-max-priority` | a queue per priority step, all in one namespace |
| a fanout exchange | a queue of its name; each bound queue is a group that starts at new messages |
| a direct exchange that is not durable (for replies) | a queue; each routing key a partition |
| another queue that ends with its connection (for replies) | a queue that is deleted |
| unacknowledged | leased; the lease is renewed |
| ack, reject, reject with requeue | completed, dead letter, retry |
| the header `eta` of a task | the time at which the message is delivered |
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from queue import Empty
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from kombu.exceptions import OperationalError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.json import dumps, loads

from penstock.errors import Forbidden, Full, NotFound, Unavailable
from penstock.types import Received

if TYPE_CHECKING:
    from penstock.celery.kombu_transport import Transport

log = logging.getLogger("penstock.celery")

UNLIMITED_BATCH = 100  # messages that a consumer without a prefetch count takes at once
PRIORITY_STEPS = (0, 3, 6, 9)  # the higher number is delivered first
# A message that kills its worker `retryLimit` times becomes a dead letter.
QUEUE_OPTIONS = {
    "ordering": "none",
    "leaseTime": 60,  # it is renewed; after a kill its messages come again when it ends
    "retryLimit": 10,
    "retentionEnabled": True,
    "completedRetentionSeconds": 3600,
}
# Broadcasts and replies reach the current listeners only.
TRANSIENT_OPTIONS = {
    "ordering": "none",
    "ttl": 600,
    "retentionEnabled": True,
    "retentionSeconds": 3600,
    "deadLetterQueue": False,
}
AHEAD_SECONDS = 0.05
MAX_AHEAD = 64
HELD_SECONDS = 0.5  # that a message waits for its delivery before it goes back
FLUSH_SECONDS = 5.0  # that a synchronous request waits for acknowledgements before it
IDLE_GROUP_SECONDS = 600.0  # after which a listener that does not pop is removed
REPLIES = "reply queues"  # their namespace
UNUSED_REPLIES_SECONDS = 86_400.0  # after which an empty one is deleted


@dataclass(frozen=True, slots=True)
class Source:
    """The place of the messages of a kombu queue."""

    queue: str
    partition: str | None = None
    group: str | None = None
    namespace: str | None = None  # of all priority steps

    @property
    def transient(self) -> bool:
        """Return whether it has broadcasts or replies, which are acknowledged when they are
        taken.
        """
        return self.partition is not None or self.group is not None

    def wanted(self, batch: int) -> dict[str, Any]:
        """Return it as a source of a pop."""
        return {
            "queue": self.queue if self.namespace is None else None,
            "namespace": self.namespace,
            "partition": self.partition,
            "consumerGroup": self.group,
            "subscriptionMode": None if self.group is None else "new",
            "autoAck": self.transient,
            "batch": batch,
        }


class Message(virtual.Message):  # type: ignore[misc]
    """A message that cannot be decoded becomes a dead letter when Celery acknowledges it."""

    def __init__(self, payload: dict[str, Any], channel: "QueueChannel", **options: Any) -> None:
        super().__init__(payload, channel, **options)
        if self.errors:  # it cannot be decompressed
            self._undecodable(self.errors[0][1])

    def _decode(self) -> Any:
        try:
            return super()._decode()
        except Exception as error:
            self._undecodable(error)
            raise

    def _undecodable(self, error: Exception) -> None:
        self.channel.undecodable[self.delivery_tag] = f"cannot be decoded: {error}"


class QoS(virtual.QoS):  # type: ignore[misc]
    """Counts unacknowledged messages, and sends what becomes of them to the broker."""

    def ack(self, delivery_tag: str) -> None:
        super().ack(delivery_tag)
        error = self.channel.undecodable.pop(delivery_tag, None)
        self.channel.settle(delivery_tag, "completed" if error is None else "dlq", error)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        super().ack(delivery_tag)
        if requeue:  # an attempt, so that the next delivery is marked as `redelivered`
            self.channel.settle(delivery_tag, "failed", "requeued by the consumer")
        else:
            self.channel.settle(delivery_tag, "dlq", "rejected by the consumer")

    def restore_unacked(self) -> list[Any]:
        self._flush()
        for delivery_tag in list(self._delivered):
            self.channel.settle(delivery_tag, "retry")
        self._delivered.clear()
        return []


class QueueChannel(virtual.Channel):  # type: ignore[misc]
    Message = Message
    QoS = QoS
    supports_fanout = True
    from_transport_options = (
        *virtual.Channel.from_transport_options,
        "priority_steps",
        "queue_options",
    )
    priority_steps = PRIORITY_STEPS
    queue_options: ClassVar[dict[str, Any]] = {}  # of queues that this channel creates

    connection: "Transport"
    _tags = count(1)

    def __init__(self, connection: "Transport", **options: Any) -> None:
        super().__init__(connection, **options)
        self.undecodable: dict[str, str] = {}  # by delivery tag, why
        self._taken: dict[str, Received] = {}  # by delivery tag
        self._auto_delete: set[str] = set()  # queues to delete when the channel closes
        # Messages to hold beyond the prefetch count: what was delivered in AHEAD_SECONDS lately.
        # Fast tasks do not wait for the broker then, and slow ones are not held.
        self._ahead = 0
        self._received_at = 0.0

    # Declare

    def queue_declare(self, queue: str | None = None, passive: bool = False, **options: Any) -> Any:
        declared = super().queue_declare(queue, passive, **options)
        if options.get("auto_delete") or options.get("exclusive"):
            self._auto_delete.add(declared.queue)
        return declared

    def prepare_queue_arguments(self, arguments: dict[str, Any], **options: Any) -> Any:
        return to_rabbitmq_queue_arguments(arguments, **options)

    def _new_queue(self, queue: str, **options: Any) -> None:
        """Remember the queue. It is created by `queue_bind`, which knows its exchange, or here if
        it has priorities.
        """
        if (options.get("arguments") or {}).get("x-max-priority"):
            self.connection.sources[queue] = Source(queue, namespace=f"priorities of {queue}")
            for step in self.priority_steps:
                about = {"namespace": f"priorities of {queue}"}
                self._create(_step_name(queue, step), QUEUE_OPTIONS | {"priority": step}, **about)
        elif not (options.get("auto_delete") or options.get("exclusive")):
            self._create(queue, QUEUE_OPTIONS)

    def _create(self, queue: str, options: dict[str, Any], **about: str) -> None:
        """Create a queue unless it exists: its options may have been changed since."""
        if queue in self.connection.created:
            return
        line = self.connection.line
        try:
            line.json("GET", "/api/v1/queues", queue, "options")
        except NotFound:
            body = {"queue": queue, "options": options | self.queue_options, **about}
            line.json("POST", "/api/v1/configure", body=body)
        self.connection.created.add(queue)

    def _queue_bind(self, exchange: str, routing_key: str, _: Any, queue: str) -> None:
        about = self.state.exchanges[exchange]
        if about["type"] == "fanout":
            self._create(exchange, TRANSIENT_OPTIONS)
            source = self.connection.sources[queue] = Source(exchange, group=queue)
            waiting = self._pop(source, UNLIMITED_BATCH)  # starts the group
            if queue in self._auto_delete:
                while waiting:  # sent while no one of this name listened
                    waiting = self._pop(source, UNLIMITED_BATCH)
                self._forget_idle_groups(exchange)
            else:
                self.receive(queue, waiting)
        elif _for_replies(about) and queue not in self.connection.sources:
            self._create(exchange, TRANSIENT_OPTIONS)
            self.connection.sources[queue] = Source(exchange, partition=routing_key)

    def get_table(self, exchange: str) -> Any:
        about = self.state.exchanges.get(exchange)
        return [] if about is None else about["table"]

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str]:
        queues = list(super()._lookup(exchange, routing_key, default))
        if not queues and _for_replies(self.state.exchanges.get(exchange)):
            # The consumer that waits for this reply has declared its queue in its own process.
            name = f"{exchange}/{routing_key}"
            self.connection.sources[name] = Source(exchange, partition=routing_key)
            return [name]
        return queues

    def source(self, queue: str) -> Source:
        return self.connection.sources.get(queue) or Source(queue)

    def _create_reply_queues(self) -> None:
        """Create the declared queues that go with this connection and are bound to no exchange:
        replies find them by name. Those of clients that were killed are deleted.
        """
        for queue in self._auto_delete - self.connection.sources.keys() - self.connection.created:
            self._delete_unused_replies()
            self._create(queue, TRANSIENT_OPTIONS, namespace=REPLIES)

    def _delete_unused_replies(self) -> None:
        """Delete unused reply queues. A reply to a client that still lives creates its queue."""
        answer = self.connection.line.json("GET", "/api/v1/resources/queues", namespace=REPLIES)
        for queue in answer["queues"]:
            old = _age(queue["createdAt"]) > UNUSED_REPLIES_SECONDS
            if old and not queue["messages"]["total"]:
                self._remove("/api/v1/resources/queues", queue["name"])

    # Publish

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Keep text as it is, so that people can read it in the Console."""
        return (body, None) if isinstance(body, str) else super().encode_body(body, encoding)

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        source = self.source(queue)
        name = source.queue
        if source.namespace is not None:
            priority = self._get_message_priority(message)
            name = _step_name(name, max(one for one in self.priority_steps if one <= priority))
        self._push(name, source.partition, message)

    def _put_fanout(self, exchange: str, message: Any, _: str, **__: Any) -> None:
        self._create(exchange, TRANSIENT_OPTIONS)
        self._push(exchange, None, message)

    def _push(self, queue: str, partition: str | None, message: dict[str, Any]) -> None:
        self._create_reply_queues()
        item: dict[str, Any] = {
            "queue": queue,
            "partition": partition,
            "payload": msgspec.Raw(dumps(message).encode()),
            "transactionId": message["properties"]["delivery_tag"],
        }
        if (eta := _future(message.get("headers"))) is not None:
            item["deliverAt"] = eta
        try:
            patience = self.connection.publish_patience
            (result,) = self.connection.line.json(
                "POST", "/api/v1/push", body={"items": [item]}, retry_for=patience
            )
        except Full as error:
            raise OperationalError(str(error)) from error
        if result["status"] == "failed":
            raise OperationalError(str(result.get("error")))

    # Consume

    def basic_consume(
        self,
        queue: str,
        no_ack: bool,
        callback: Callable[[Any], Any],
        consumer_tag: str,
        **_: Any,
    ) -> None:
        self._create_reply_queues()
        self._tag_to_queue[consumer_tag] = queue
        self._active_queues.append(queue)
        self._consumers.add(consumer_tag)

        def deliver(raw: dict[str, Any]) -> None:
            if (message := self._message(raw, queue)) is None:
                return
            if no_ack:
                self.settle(message.delivery_tag, "completed")
            else:
                self.qos.append(message, message.delivery_tag)
            callback(message)

        self.connection.consume(self, queue, deliver)

    def basic_cancel(self, consumer_tag: str) -> None:
        if consumer_tag in self._consumers:
            self._consumers.remove(consumer_tag)
            queue = self._tag_to_queue.pop(consumer_tag)
            self._active_queues.remove(queue)
            self.connection.cancel(self, queue)

    def basic_get(self, queue: str, no_ack: bool = False, **_: Any) -> Any:
        try:
            message = self._message(self._get(queue), queue)
        except Empty:
            return None
        if message is not None and no_ack:
            self.settle(message.delivery_tag, "completed")
        elif message is not None:
            self.qos.append(message, message.delivery_tag)
        return message

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        self.connection.settler.flush(FLUSH_SECONDS)  # what was requeued can be taken again
        for raw in self._opened(self._pop(self.source(queue), 1, timeout or 0.0)):
            return raw
        raise Empty

    def _pop(self, source: Source, batch: int, wait: float = 0.0) -> Sequence[Received]:
        answer = self.connection.line.pop([source.wanted(batch)], wait)
        return self.connection.settler.take(answer).messages

    def _message(self, raw: dict[str, Any], queue: str) -> Any:
        """Return the message of kombu. Anything else becomes a dead letter."""
        try:
            return self.Message(raw, channel=self)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._refuse(raw["properties"]["delivery_tag"], queue, repr(error))
            return None

    def can_deliver(self, queue: str) -> bool:
        return self.source(queue).transient or bool(self.qos.can_consume())

    def wanted(self) -> int:
        """Return how many messages may be taken now: up to the prefetch count, and those held
        ahead.
        """
        undelivered = self.connection.undelivered(self)
        if undelivered > self._ahead // 2:
            return 0
        return self._window() + self._ahead - undelivered

    def _window(self) -> int:
        if not self.qos.can_consume():
            return 0
        estimate = self.qos.can_consume_max_estimate()
        return UNLIMITED_BATCH if estimate is None else int(estimate)

    def receive(self, queue: str, messages: Sequence[Received]) -> None:
        """Keep the messages of a pop until they are delivered."""
        self.connection.ready.extend((self, queue, raw) for raw in self._opened(messages))
        if not self.source(queue).transient and self.qos.prefetch_count:
            now = time.monotonic()
            rate = len(messages) / max(1e-3, now - self._received_at)
            self._ahead, self._received_at = min(MAX_AHEAD, int(rate * AHEAD_SECONDS)), now

    def give_back_held(self) -> None:
        """Return messages that cannot be delivered soon: they were taken ahead and tasks are slow,
        or the prefetch count has become smaller.
        """
        if time.monotonic() > self._received_at + HELD_SECONDS:
            self._ahead = 0
            self.connection.return_ready(self)

    def _opened(self, messages: Iterable[Received]) -> Iterable[dict[str, Any]]:
        """Return messages as kombu has them, each with a tag of ours."""
        for message in messages:
            tag = f"{message.id}-{next(self._tags)}"
            if message.lease_id:
                self._taken[tag] = message
            try:
                raw = loads(bytes(message.raw))
            except Exception as error:  # noqa: BLE001 whatever a decoder that is registered raises
                self._refuse(tag, message.queue, repr(error))
                continue
            if isinstance(raw, dict) and isinstance(raw.get("properties"), dict):
                raw["properties"]["delivery_tag"] = tag
                info = raw["properties"].get("delivery_info")
                if isinstance(info, dict):
                    info["redelivered"] = message.attempt > 1
                if _expired(raw["properties"].get("expiration"), message.created_at):
                    self.settle(tag, "completed")
                else:
                    yield raw
            else:
                self._refuse(tag, message.queue, "it has no properties")

    def _refuse(self, delivery_tag: str, queue: str, reason: str) -> None:
        text = f"not a message of kombu: {reason}"
        log.error("a message in %r becomes a dead letter: %s", queue, text)
        self.settle(delivery_tag, "dlq", text)

    def settle(self, delivery_tag: str, status: str, error: str | None = None) -> None:
        message = self._taken.pop(delivery_tag, None)
        if message is not None:
            self.connection.settler.settle(message, status, error)

    # Look and delete

    def _has_queue(self, queue: str, **_: Any) -> bool:
        try:
            self.connection.line.json("GET", "/api/v1/queues", self.source(queue).queue, "options")
        except NotFound:
            return False
        return True

    def _size(self, queue: str) -> int:
        """Return the number of messages that are not delivered."""
        self.connection.settler.flush(FLUSH_SECONDS)
        return sum(self._waiting(name) for name in self._stored(queue))

    def _waiting(self, queue: str) -> int:
        try:
            about = self.connection.line.json("GET", "/api/v1/resources/queues", queue)
        except NotFound:
            return 0
        return int(about["totals"]["pending"])

    def _purge(self, queue: str) -> int:
        size = self._size(queue)
        for name in self._stored(queue):
            try:
                self.connection.line.json("DELETE", "/api/v1/queues", name, "clear")
            except NotFound:
                continue
        return size

    def queue_delete(self, queue: str, _: bool = False, if_empty: bool = False, **__: Any) -> None:
        """Delete a queue, also one that is bound to no exchange: kombu leaves those."""
        if not (if_empty and self._size(queue)):
            self._delete(queue)
            self.state.queue_bindings_delete(queue)

    def _delete(self, queue: str, *_: Any, **__: Any) -> None:
        source, stored = self.source(queue), self._stored(queue)
        self.connection.sources.pop(queue, None)
        if source.group is not None:
            self._forget_group(source.queue, source.group)
        for name in stored:
            self._remove("/api/v1/resources/queues", name)
            self.connection.created.discard(name)

    def _stored(self, queue: str) -> list[str]:
        """Return the queues of Penstock that have only messages of this one."""
        source = self.source(queue)
        if source.namespace is not None:
            return [_step_name(queue, step) for step in self.priority_steps]
        return [] if source.transient else [queue]

    def _forget_group(self, queue: str, group: str) -> None:
        self._remove("/api/v1/consumer-groups", group, "queues", queue)

    def _remove(self, *path: str) -> None:
        try:
            self.connection.line.json("DELETE", *path)
        except (NotFound, Forbidden) as error:  # a token may push and pop, and not delete
            log.debug("%s is not deleted: %s", "/".join(path), error)

    def _forget_idle_groups(self, queue: str) -> None:
        """Remove listeners that were killed: they could not remove themselves."""
        for group in self.connection.line.json("GET", "/api/v1/consumer-groups", queue=queue):
            idle = queue in group["topics"] and not group["members"]
            if idle and _age(group["subscriptionCreatedAt"]) > IDLE_GROUP_SECONDS:
                self._forget_group(queue, group["name"])

    def remove_unused(self) -> None:
        """Remove listeners of this channel's exchanges and reply queues of killed clients."""
        sources = self.connection.sources.values()
        for exchange in {source.queue for source in sources if source.group is not None}:
            self._forget_idle_groups(exchange)
        self._delete_unused_replies()

    def close(self) -> None:
        if not self.closed and self.connection is not None:
            for consumer in list(self._consumers):
                self.basic_cancel(consumer)
            try:
                for queue in self._auto_delete:
                    self.queue_delete(queue)
            except Unavailable as error:
                log.warning("queues of this connection are not deleted: %s", error)
        super().close()


def _for_replies(exchange: dict[str, Any] | None) -> bool:
    return exchange is not None and exchange["type"] == "direct" and not exchange["durable"]


def _step_name(queue: str, step: int) -> str:
    return f"{queue}.priority-{step}" if step else queue


def _future(headers: Any) -> str | None:
    """Return the eta of a task, if it is in the future."""
    eta = headers.get("eta") if isinstance(headers, dict) else None
    try:
        at = datetime.fromisoformat(eta) if isinstance(eta, str) else None
    except ValueError:
        return None  # the worker reports it
    if at is None or at.tzinfo is None or at <= datetime.now(UTC):
        return None
    return at.isoformat()


def _age(moment: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()


def _expired(expiration: Any, created_at: datetime) -> bool:
    """Return whether a message with an expiration in milliseconds, as in AMQP, is too old."""
    try:
        age = datetime.now(UTC) - created_at
        return expiration is not None and age.total_seconds() * 1000 > float(expiration)
    except (TypeError, ValueError):
        return False
