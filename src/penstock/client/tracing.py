"""Trace messages with OpenTelemetry, if `opentelemetry-api` is installed
(`pip install 'penstock[otel]'`). Without it, every function here does nothing.

The headers of a message carry the W3C `traceparent` of its producer, also through dead letters,
requeues and buffers. Spans follow the messaging conventions: `send` for the request of a push,
`create` for a message that is sent later (buffer, transaction), `receive` for a pop that returns
messages, `process` for the handler. The handler of one message continues its trace; the handler of
a batch links to all traces. A `traceparent` header set by the caller is kept.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.client.items import Item
from penstock.client.messages import Received, Retry
from penstock.protocol.names import QUEUE_MODE

try:
    from opentelemetry import trace
    from opentelemetry.trace import Link, SpanKind, StatusCode, Tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    ENABLED = False
else:
    ENABLED = True
    _propagator = TraceContextTextMapPropagator()

CARRIER = "traceparent"
MAX_LINKS = 128  # per span: the default limit of SDKs


def tracer() -> "Tracer":
    """Return the tracer of the program's provider."""
    # an import would be a cycle, in which type checkers lose our signatures
    version = str(sys.modules["penstock"].__version__)
    return trace.get_tracer("penstock", version)


@contextmanager
def sending(items: list[Item]) -> Iterator[list[Item]]:
    """Start a `send` span for a push. Yields the items with the context in their headers."""
    if not ENABLED:
        yield items
        return
    queues = {item["queue"] for item in items}
    queue = next(iter(queues)) if len(queues) == 1 else ""
    attributes = _attributes("push", "send", queue)
    if len(items) == 1:
        attributes["messaging.message.id"] = items[0]["transactionId"]
        attributes["messaging.destination.partition.id"] = items[0]["partition"]
    else:
        attributes["messaging.batch.message_count"] = len(items)
    links = _links(item.get("headers") for item in items)
    with tracer().start_as_current_span(
        f"send {queue}".strip(), kind=SpanKind.PRODUCER, attributes=attributes, links=links
    ):
        carrier: dict[str, str] = {}
        _propagator.inject(carrier)
        yield [_with(item, carrier) for item in items]


def created(item: Item) -> Item:
    """Record a `create` span for an item that is sent later. Return it with the context."""
    if not ENABLED:
        return item
    attributes = _attributes("push", "create", item["queue"])
    attributes["messaging.message.id"] = item["transactionId"]
    with tracer().start_as_current_span(
        f"create {item['queue']}", kind=SpanKind.PRODUCER, attributes=attributes
    ):
        carrier: dict[str, str] = {}
        _propagator.inject(carrier)
        return _with(item, carrier)


def now() -> int:
    """Return the start time of a pop, for `received`."""
    return time.time_ns() if ENABLED else 0


def received(messages: Sequence[Received], started: int) -> None:
    """Record a `receive` span from `started` until now, with links to the messages."""
    if not ENABLED or not messages:
        return
    first = messages[0]
    attributes = _attributes("pop", "receive", first.queue, first.consumer_group)
    attributes["messaging.batch.message_count"] = len(messages)
    tracer().start_span(
        f"receive {first.queue}",
        kind=SpanKind.CLIENT,
        attributes=attributes,
        links=_links(message.headers for message in messages),
        start_time=started,
    ).end()


@contextmanager
def processing(*messages: Received) -> Iterator[None]:
    """Start a `process` span for the work on messages. Consumers do this for you.

    async for message in client.take("orders@billing"):
        with processing(message):
            ...
    """
    if not ENABLED or not messages:
        yield
        return
    first = messages[0]
    attributes = _attributes("process", "process", first.queue, first.consumer_group)
    if len(messages) == 1:
        attributes["messaging.message.id"] = first.transaction_id
        attributes["messaging.destination.partition.id"] = first.partition
        about: dict[str, Any] = {"context": _propagator.extract(first.headers)}
        if CARRIER not in first.headers:
            about = {}  # use the current context
    else:
        attributes["messaging.batch.message_count"] = len(messages)
        about = {"links": _links(message.headers for message in messages)}
    with tracer().start_as_current_span(
        f"process {first.queue}",
        kind=SpanKind.CONSUMER,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
        **about,
    ) as span:
        try:
            yield
        except Retry:
            span.set_attribute("messaging.penstock.outcome", "retry")
            raise
        except Exception as error:
            span.set_attribute("error.type", type(error).__qualname__)
            span.record_exception(error)
            span.set_status(StatusCode.ERROR, str(error))
            raise


def _attributes(name: str, kind: str, queue: str, group: str = "") -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "messaging.system": "penstock",
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
    }
    if queue:
        attributes["messaging.destination.name"] = queue
    if group and group != QUEUE_MODE:
        attributes["messaging.consumer.group.name"] = group
    return attributes


def _with(item: Item, carrier: Mapping[str, str]) -> Item:
    headers = item.get("headers") or {}
    if not carrier or CARRIER in headers:
        return item
    return {**item, "headers": {**headers, **carrier}}


def _links(headers: Iterator[Any]) -> "list[Link]":
    links: dict[str, Link] = {}
    for one in headers:
        if one and CARRIER in one and one[CARRIER] not in links and len(links) < MAX_LINKS:
            context = trace.get_current_span(_propagator.extract(one)).get_span_context()
            if context.is_valid:
                links[one[CARRIER]] = Link(context)
    return list(links.values())
