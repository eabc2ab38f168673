"""The client of queues: push, pop, take, ack and transactions.

A push carries transaction ids made here, so it can be sent again after a lost answer without being
stored twice. The leases of messages that a consumer has not answered are renewed in the background.
An empty pop is an empty list. Brokers may be restarted at any time: requests continue with the next
one that answers.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from datetime import datetime
from math import inf
from typing import Any, Unpack
from urllib.parse import urlencode

import msgspec

from penstock.client import tracing
from penstock.client.brokers import Brokers, check, understood
from penstock.client.items import (
    Item,
    MessageOptions,
    PushOptions,
    TakeOptions,
    ack_item,
    check_names,
    new_item,
    storable,
)
from penstock.client.leases import LeaseKeeper
from penstock.client.messages import AckStatus, Address, Message, Popped, Received, bind
from penstock.client.transactions import Transaction
from penstock.contract import operations
from penstock.contract.deliveries import Acked, Later, PopSource, Pushed
from penstock.errors import AckRefused, Conflict, InvalidRequest, QueueFull, Unavailable
from penstock.net.http import HttpAnswer
from penstock.protocol.names import QUEUE_MODE
from penstock.protocol.payload import encode_payload

_pushed = msgspec.json.Decoder(list[Pushed])
_acked = msgspec.json.Decoder(list[Acked])

log = logging.getLogger("penstock.client")

MAX_REPORTED = 1000
MAX_ITEMS = 10_000  # of one request: what a broker takes by default (queues.max_items)
STOP_SECONDS = 0.2  # what a fetch under way gets to arrive, so that its messages can be given back
LONG_POLL_SECONDS = 30.0  # the longest wait of one pop request
GRACE_SECONDS = 10.0  # by which an answer may be later than that
# The queues pushed to, while this is a set: `penstock worker` watches the import of a module.
watched_pushes: set[str] | None = None


# Of an acknowledgement, in the HTTP API: status, error, worker, delay, maxAttempts.
Answer = dict[str, str | float]
Addresses = str | Address | Sequence[str | Address]


class Outage:
    """Logs once per client that no broker answers, and once that one answers again, however many
    workers wait.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    def note(self, error: Exception) -> None:
        """Note that a request of a consumer failed and will be repeated."""
        if self._since is None:
            self._since = time.monotonic()
            log.warning("consumers wait for a broker: %s", error)

    def end(self) -> None:
        """Note that a request of a consumer was answered."""
        if self._since is not None:
            seconds = time.monotonic() - self._since
            log.info("a broker answers the consumers again, after %.1f s", seconds)
            self._since = None


class _Refused(msgspec.Struct):
    error: str
    results: list[Pushed] = []


_refused, _later = msgspec.json.Decoder(_Refused), msgspec.json.Decoder(Later)


class QueueClient:
    """Queues through one or more brokers. The base of `penstock.Client`."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._leases = LeaseKeeper(brokers)
        self.outage = Outage()
        # the blocking client has its own class of messages
        self._decode_popped: Callable[[bytes], Popped[Any]]
        self._decode_popped = msgspec.json.Decoder(Popped[Message]).decode
        self._answers_to: object = self  # who the messages' own methods call
        self._missing: set[str] = set()  # addresses whose queue was not there, each reported once
        # fetched by the takes under way, and not yet given to their loops
        self._fetched: dict[int, list[Message]] = {}

    # Push

    async def push(
        self,
        address: str | Address,
        payload: Any,
        *,
        buffer_ms: int | None = None,
        buffer_max: int | None = None,
        **options: Unpack[PushOptions],
    ) -> Pushed:
        """Push one message. Returns once it is durable.

        The payload is anything that JSON can express, a dataclass, a msgspec, attrs or pydantic
        model, or a `msgspec.Raw` that already holds JSON. NaN, infinity and bytes are rejected. A
        queue that is created by a push without a partition has no order (`ordering: none`).

        If the partition already has a message with this `transaction_id`, the result is
        `duplicate`. With `buffer_ms` or `buffer_max`, the broker answers once the message is in its
        buffer and stores it a little later, in a larger batch (QoS 0).
        """
        item = new_item(address, payload, **options)
        (result,) = await self._push_items([item], buffer_ms=buffer_ms, buffer_max=buffer_max)
        return result if options.get("transaction_id") else _own(result)

    async def push_many(
        self,
        address: str | Address,
        payloads: Iterable[Any],
        *,
        buffer_ms: int | None = None,
        buffer_max: int | None = None,
        **options: Unpack[MessageOptions],
    ) -> list[Pushed]:
        """Push several messages, in order. Headers, delay and time apply to each of them. More
        messages than fit into one request are sent in several.
        """
        check_names(options, MessageOptions)  # a transaction id is of one message
        items = [new_item(address, payload, **options) for payload in payloads]
        results: list[Pushed] = []
        for begin in range(0, len(items), MAX_ITEMS):
            part = items[begin : begin + MAX_ITEMS]
            try:
                results += await self._push_items(part, buffer_ms=buffer_ms, buffer_max=buffer_max)
            except QueueFull as error:
                raise QueueFull(str(error), [*results, *error.results]) from None
        for index, result in enumerate(results):
            result.index = index
        return [_own(result) for result in results]

    async def _push_items(
        self,
        items: Sequence[Item],
        *,
        buffer_ms: int | None = None,
        buffer_max: int | None = None,
        retry_for: float | None = None,
    ) -> list[Pushed]:
        """Push items of `new_item`."""
        if watched_pushes is not None:
            watched_pushes.update(item["queue"] for item in items)
        body: dict[str, Any] = {}
        buffered = buffer_ms is not None or buffer_max is not None
        if buffer_ms is not None:
            body["bufferMs"] = buffer_ms
        if buffer_max is not None:
            body["bufferMax"] = buffer_max
        with tracing.sending(list(items)) as sent:
            body["items"] = sent
            answer = await self._brokers.ask(
                operations.PUSH.method,
                operations.PUSH.path,
                msgspec.json.encode(body),
                again=operations.PUSH.repeatable,
                retry_for=retry_for,
            )
        if answer.status == 429:
            refused = understood(_refused.decode, answer.body)
            raise QueueFull(refused.error, refused.results)
        check(answer)
        if buffered and answer.body[:1] == b"{":  # QoS 0 answers for all of them at once
            if not understood(_later.decode, answer.body).pushed:
                raise Unavailable("the broker did not say that it took the messages")
            return [
                Pushed("buffered", index, item["transactionId"]) for index, item in enumerate(items)
            ]
        results = understood(_pushed.decode, answer.body)
        if len(results) != len(items):
            raise Unavailable(f"the answer to {len(items)} messages is about {len(results)}")
        for index, (result, item) in enumerate(zip(results, items, strict=True)):
            result.index = index
            result.transaction_id = result.transaction_id or item["transactionId"]
        return results

    def _report_missing(self, address: str, reason: str | None) -> None:
        """Log a queue that does not exist, once. It is not an error, because a consumer may start
        before its producer; but a wrong name must not look like no work.
        """
        if reason and address not in self._missing and len(self._missing) < MAX_REPORTED:
            self._missing.add(address)
            log.warning(
                "nothing to take from %s: %s (the first push creates a queue)", address, reason
            )

    # Pop and ack

    async def pop(
        self,
        address: Addresses | None = None,
        *,
        wait: float = 0.0,
        namespace: str | None = None,
        task: str | None = None,
        renew: bool = True,
        retry_for: float | None = None,
        **options: Unpack[TakeOptions],
    ) -> list[Message]:
        """Fetch up to `batch` messages. Returns an empty list if none arrive within `wait` seconds.

        The messages are leased to this client. The lease is extended in the background until they
        are acknowledged or your program has let go of them, unless you pass `renew=False`. Of
        several addresses, messages come from the first that has some. Without an address, they come
        from any queue of the namespace or task.
        """
        check_names(options, TakeOptions)
        auto_ack = options.get("auto_ack", False)
        method, body = "GET", b""
        if address is None or isinstance(address, str | Address):
            where = Address.parse(address) if address is not None else None
            if where is None and not (namespace or task):
                raise InvalidRequest("name a queue, a namespace or a task to take messages from")
            target = _pop_target(where, wait, options, namespace=namespace, task=task)
        elif namespace or task:
            raise InvalidRequest("name several addresses, or a namespace or task, not both")
        else:
            sources = [
                PopSource(
                    options.get("batch", 1),
                    one.group,
                    auto_ack,
                    options.get("partitions"),
                    options.get("subscription_mode"),
                    iso_time(options.get("subscription_from")),
                    queue=one.queue,
                    partition=one.partition,
                )
                for one in map(Address.parse, address)
            ]
            method, target = operations.POP_ANY.method, operations.POP_ANY.path
            waiting = {"wait": wait > 0, "timeout": round(wait * 1000)}
            body = msgspec.json.encode({"sources": sources, **waiting})
        started = tracing.now()
        # A pop whose answer was lost has leased messages to nobody: they come again when the lease
        # ends. Under auto-ack they would be gone, so such a pop is not repeated.
        answer = await self._brokers.ask(
            method,
            target,
            body,
            again=not auto_ack,
            timeout=wait + GRACE_SECONDS,
            retry_for=retry_for,
            polling=wait > 0,
        )
        source = str(address or namespace or task)
        return self._messages_of(answer, source, started, renew=renew and not auto_ack)

    async def _ack_and_pop(
        self,
        address: str | Address,
        answers: Sequence[tuple[Received, Answer]],
        acked: Callable[[Sequence[Acked]], None],
        *,
        wait: float,
        **options: Unpack[TakeOptions],
    ) -> list[Message]:
        """Acknowledge messages of the address's group and fetch the next ones, in one request, with
        the options of `pop`. `acked` is called with the results of the acknowledgements.

        This request is not retried. After an error, acknowledge the messages again; repeating an
        ack is safe.
        """
        where = Address.parse(address)
        target = _pop_target(where, wait, options)
        self._leases.drop(message for message, _ in answers)
        started = tracing.now()
        answer = await self._brokers.ask(
            operations.ACK_AND_POP.method,
            target,
            _acks_body(answers, where.group or QUEUE_MODE),
            timeout=wait + GRACE_SECONDS,
            retry_for=0.0,
            polling=wait > 0,
        )
        return self._messages_of(answer, str(where), started, renew=True, acked=acked)

    def _messages_of(
        self,
        answer: HttpAnswer,
        source: str,
        started: int,
        *,
        renew: bool,
        acked: Callable[[Sequence[Acked]], None] = lambda _: None,
    ) -> list[Message]:
        check(answer)
        popped = understood(self._decode_popped, answer.body) if answer.body else Popped()
        acked(popped.acknowledged)
        if not popped.messages:
            self._report_missing(source, answer.headers.get("empty-reason"))
            return []
        most, delay = answer.headers.get("max-attempts", ""), answer.headers.get("retry-delay")
        for message in popped.messages:
            message.retry_delay = None if delay is None else float(delay)
            message.queue = message.queue or popped.queue
            message.max_attempts = int(most) if most.isdecimal() else 0
        bind(popped.messages, self._answers_to)
        if renew:
            lease_time = answer.headers.get("lease-time", "")
            self._leases.keep(popped.messages, float(lease_time) if lease_time.isdecimal() else 0.0)
        tracing.received(popped.messages, started)
        return popped.messages

    async def take(
        self,
        address: Addresses,
        *,
        limit: int | None = None,
        idle: float | None = None,
        prefetch: bool = False,
        **options: Unpack[TakeOptions],
    ) -> AsyncGenerator[Message, None]:
        """Iterate over messages: `async for message in client.take("orders@billing")`, or of
        several queues: `client.take(["orders@billing", "mail"])`. These take turns.

        The loop runs until you leave it. It also ends after `limit` messages, or when no message
        arrives for `idle` seconds (0: as soon as the queue is empty). Acknowledge each message.

        With `auto_ack`, the broker acknowledges messages when it hands them out. A message that was
        fetched but not processed is then lost, also if the broker dies while it sends it.

        With `prefetch`, the next batch is fetched and leased while you work on the current one.
        When the loop ends, messages it has not seen yet are returned to the queue.

        The loop continues when brokers restart. It raises `Unavailable` if no broker answers for
        the client's `retry_for`.
        """
        batch, auto_ack = options.get("batch", 1), options.get("auto_ack", False)
        if prefetch and auto_ack:
            raise InvalidRequest("auto_ack acknowledges on delivery: prefetch would lose messages")
        most = inf if limit is None else limit
        given = 0
        remaining: list[Message] = []
        ahead: asyncio.Task[list[Message]] | None = None
        clock = asyncio.get_running_loop().time

        def fetch(wanted: float) -> Coroutine[Any, Any, list[Message]]:
            nonlocal address
            if not isinstance(address, str | Address):
                address = [*address[1:], *address[:1]]
            some: TakeOptions = {**options, "batch": int(min(batch, wanted))}
            return self._next_batch(address, inf if idle is None else clock() + idle, some)

        try:
            while given < most:
                wanted = most - given
                if ahead is not None:
                    fetched, ahead = ahead, None
                    remaining = await fetched
                if not remaining:  # also when what was fetched ahead waited for the loop's own acks
                    remaining = await fetch(wanted)
                if not remaining:
                    return
                if prefetch and wanted > len(remaining):
                    ahead = asyncio.create_task(self._held(fetch(wanted - len(remaining))))
                remaining.reverse()
                if not auto_ack:
                    self._fetched[id(remaining)] = remaining
                while remaining:
                    given += 1
                    yield remaining.pop()
                self._fetched.pop(id(remaining), None)
        finally:
            self._fetched.pop(id(remaining), None)
            if ahead is not None:
                messages = await asyncio.shield(received_late(ahead))
                self._fetched.pop(id(messages), None)
                remaining = remaining + messages
            if remaining and not auto_ack:
                await asyncio.shield(self._give_back(remaining))

    async def _held(self, fetching: Awaitable[list[Message]]) -> list[Message]:
        """Return the list of messages fetched ahead, which `close` releases."""
        messages = await fetching
        self._fetched[id(messages)] = messages
        return messages

    async def _next_batch(
        self, address: Addresses, stop_at: float, options: TakeOptions
    ) -> list[Message]:
        clock = asyncio.get_running_loop().time
        failing_since: float | None = None
        while True:
            longest = max(0.0, min(LONG_POLL_SECONDS, stop_at - clock()))
            try:
                messages = await self.pop(address, wait=longest, **options)
            except Unavailable as error:
                # An auto-ack pop that was cut off is not repeated, since it may have taken
                # messages; the next one is another pop, and what the first one took is lost as
                # `auto_ack` says.
                now = clock()
                failing_since = now if failing_since is None else failing_since
                if not options.get("auto_ack") or now - failing_since >= self._brokers.retry_for:
                    raise
                log.warning("taking from %s resumes after: %s", address, error)
                await asyncio.sleep(min(0.1, self._brokers.retry_for))
                continue
            failing_since = None
            if messages or clock() >= stop_at:
                return messages

    async def ack(
        self,
        message: Received | Sequence[Received],
        status: AckStatus = "completed",
        *,
        error: str | None = None,
        delay: float = 0.0,
        group: str | None = None,
    ) -> list[Acked]:
        """Acknowledge one or more messages as "completed", "failed", "retry" or "dlq".

        Raises `AckRefused` if the broker rejected some of them because their lease was lost; those
        messages are delivered again. "failed" counts an attempt and "retry" does not; with a
        `delay`, the broker delivers the messages again after so many seconds.
        """
        messages = [message] if isinstance(message, Received) else list(message)
        answer: Answer = {"status": status}
        if error is not None:
            answer["error"] = error
        if delay:
            answer["delay"] = delay
        return await self._ack_each([(one, answer) for one in messages], group=group)

    async def _ack_each(
        self, answers: Sequence[tuple[Received, Answer]], *, group: str | None = None
    ) -> list[Acked]:
        """Acknowledge each message with its own status: `{"status": ..., "error": ...}`."""
        by_group: dict[str, list[tuple[Received, Answer]]] = {}
        for message, answer in answers:
            by_group.setdefault(group or message.consumer_group, []).append((message, answer))
        results: list[Acked] = []
        for name, part in by_group.items():
            results += await self._acked(part, name)
        refused = [result for result in results if not result.success]
        if refused:
            raise AckRefused(
                f"{len(refused)} of {len(results)} acks refused: {refused[0].error}", results
            )
        return results

    async def _acked(self, answers: Sequence[tuple[Received, Answer]], group: str) -> list[Acked]:
        try:
            reply = await self._brokers.ask(
                operations.ACK.method, operations.ACK.path, _acks_body(answers, group), again=True
            )
            check(reply)
        finally:  # nobody works on these any longer: while leased they are not delivered
            self._leases.drop(message for message, _ in answers)
        results = understood(_acked.decode, reply.body)
        if len(results) != len(answers):
            raise Unavailable(f"the answer to {len(answers)} acks is about {len(results)}")
        return results

    async def _give_back(self, messages: Sequence[Received]) -> None:
        """Return unprocessed messages to the queue without counting an attempt. If that fails, they
        are delivered again when their lease expires.
        """
        try:
            await self.ack(messages, "retry")
        except (Conflict, Unavailable):
            self._leases.drop(messages)

    async def extend(self, message: Received, seconds: int = 60) -> bool:
        """Lease the message for `seconds` from now. Returns False if the lease is lost."""
        return await self._leases.extend(message.lease_id, seconds)

    def transaction(self) -> Transaction:
        """Create a transaction: `async with client.transaction() as tx`. All its pushes and acks
        take effect, or none.
        """
        return Transaction(self._brokers, self._leases)

    async def trace(
        self,
        message: Received,
        data: Any,
        *,
        event_type: str = "info",
        names: Sequence[str] = (),
    ) -> str:
        """Attach a trace event to a message. Returns the id of the trace."""
        body = {
            "transactionId": message.transaction_id,
            "partitionId": message.partition_id,
            "consumerGroup": message.consumer_group,
            "eventType": event_type,
            "traceNames": list(names) or None,
            "data": encode_payload(data),
        }
        return (await self._brokers.call(operations.ADD_TRACE, body=body)).trace_id


async def received_late(fetch: "asyncio.Future[list[Message]]") -> list[Message]:
    """Cancel a fetch, and return the messages that it brings nevertheless."""
    await asyncio.wait([fetch], timeout=STOP_SECONDS)
    if not fetch.done():
        fetch.cancel()
        await asyncio.wait([fetch])
    return fetch.result() if not fetch.cancelled() and fetch.exception() is None else []


def _pop_target(
    where: Address | None, wait: float, options: TakeOptions, **query: str | int | None
) -> str:
    """Return the path and query of a pop."""
    partitions = options.get("partitions", 1)
    query |= {
        "batch": options.get("batch", 1),
        "autoAck": "true" if options.get("auto_ack") else None,
        "partitions": partitions if partitions > 1 else None,
        "subscriptionMode": options.get("subscription_mode"),
        "subscriptionFrom": iso_time(options.get("subscription_from")),
        "consumerGroup": where.group if where is not None else None,
    }
    named = {name: value for name, value in query.items() if value}
    if wait > 0:
        named |= {"wait": "true", "timeout": round(wait * 1000)}
    path = where.pop_path if where is not None else "/api/v1/pop"
    return f"{path}?{urlencode(named)}"


def iso_time(moment: datetime | str | None) -> str | None:
    return moment.isoformat() if isinstance(moment, datetime) else moment


def _acks_body(answers: Sequence[tuple[Received, Answer]], group: str) -> bytes:
    items: list[Item] = []
    for message, answer in answers:
        item = ack_item(message) | answer
        if "error" in item:
            item["error"] = storable(str(item["error"]))
        items.append(item)
    return msgspec.json.encode({"acknowledgments": items, "consumerGroup": group})


def _own(result: Pushed) -> Pushed:
    """Report a duplicate as stored: the id is new, so the duplicate is our own first attempt, whose
    answer was lost.
    """
    if result.status == "duplicate":
        result.status = "queued"
    return result
