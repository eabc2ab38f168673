"""What a route's definition says, from YAML or from the API: the same text in both.

    routes:
      orders-to-lake:
        source: {topic: orders, start: earliest}      or {queue: orders, group: lake}, or nothing: direct pushes
        destination: {type: http, url: "https://..."} see `destinations`
        batch: {records: 1000, bytes: 1Mi, linger: 50ms}
        queue: {...}                                  overrides of `exporter.queue` for this route

A route with a source has `full_behavior: block` unless it says otherwise: what does not fit stays safe in the source.
Its queue stores what its destination takes compressed, unless `queue.compression` says otherwise.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from penstock.config import build
from penstock.config.schema import Seconds, Secret, SendQueue, Size, key, section
from penstock.errors import ConfigError
from penstock.export.destinations import Destination
from penstock.export.destinations.broker import BrokerDestination
from penstock.export.destinations.http import HttpDestination
from penstock.export.destinations.local import QueueDestination, TopicDestination
from penstock.export.destinations.postgres import PostgresDestination
from penstock.export.payload import COMPRESSIONS
from penstock.export.ports import QueuePort, TopicsPort

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    topic: str = key("", "read this topic")
    start: str = key("earliest", "where a new route begins: earliest, latest or an offset")
    queue: str = key("", "read this queue")
    group: str = key("", "as this consumer group; default: the route's name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    records: int = key(1000, "most records in a batch")
    bytes: Size = key(1 << 20, "most bytes in a batch")
    linger: Seconds = key(0.05, "how long a batch that is not full waits for more")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTarget:
    type: str = key("http", "")
    url: str = key("", "address")
    format: Literal["ndjson", "json", "raw"] = key("ndjson", "how records are put together")
    method: Literal["POST", "PUT", "PATCH", "post", "put", "patch"] = key("POST", "method")
    headers: dict[str, str] = key({}, "sent with every request")
    compression: Literal["none", "gzip", "zstd", "snappy"] = key("none", "what the server takes")
    timeout: Seconds = key(30.0, "longest wait for an answer")
    connections: int = key(64, "most connections")
    ca: Path | None = key(None, "certificate authority to trust")


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresTarget:
    type: str = key("postgres", "")
    url: Secret = key("", "address")
    table: str = key("", "table")
    column: str = key("payload", "column that takes the record")
    columns: bool = key(False, "records are objects whose keys are columns")
    once: bool = key(True, "remember batch keys so that nothing is stored twice")
    timeout: Seconds = key(30.0, "longest wait")
    connections: int = key(4, "most connections")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerTarget:
    type: str = key("broker", "")
    url: str = key("", "address of the other broker")
    topic: str = key("", "topic there; default: the source's")
    token: Secret = key("", "bearer token")
    timeout: Seconds = key(30.0, "longest wait for an answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicTarget:
    type: str = key("topic", "")
    topic: str = key("", "topic here")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTarget:
    type: str = key("queue", "")
    queue: str = key("", "queue here")
    partition: str = key("Default", "partition")


Target = HttpTarget | PostgresTarget | BrokerTarget | TopicTarget | QueueTarget
TARGETS: dict[str, type[Any]] = {
    "http": HttpTarget,
    "postgres": PostgresTarget,
    "broker": BrokerTarget,
    "topic": TopicTarget,
    "queue": QueueTarget,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The sections whose shape does not depend on the destination."""

    source: Source = section(Source, "where records come from")
    batch: Batching = section(Batching, "how they are put together")
    destination: dict[str, Any] = key({}, "where they go")
    queue: dict[str, Any] = key({}, "overrides of exporter.queue")


@dataclass(frozen=True, slots=True)
class RouteSpec:
    name: str
    source: Source
    batch: Batching
    target: Target
    queue: SendQueue


def parse_route(name: str, tree: Any, defaults: SendQueue) -> RouteSpec:
    """Check a definition; all mistakes in it at once."""
    origin = f"route {name}"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no route name: letters, digits, '.', '_' and '-' only, at most 100")
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{origin}: expected a mapping with `destination`, got {type(tree).__name__}")
    tree = {word: value for word, value in tree.items() if not (word == "source" and value in (None, "push", {}))}
    parts = build(_Parts, tree, origin)
    kind = parts.destination.get("type", "")
    if kind not in TARGETS:
        raise ConfigError(f"{origin}: destination.type must be one of {', '.join(TARGETS)}, not {kind!r}")
    target: Target = build(TARGETS[kind], parts.destination, f"{origin}, destination")
    if parts.source.topic and parts.source.queue:
        raise ConfigError(f"{origin}: a source is a topic or a queue, not both")
    if isinstance(target, BrokerTarget) and not target.topic:
        target = replace(target, topic=parts.source.topic)
    for needed in ("url", "table", "topic", "queue"):
        if getattr(target, needed, None) == "":
            raise ConfigError(f"{origin}: destination.{needed} is missing")
    if not parts.batch.records or not parts.batch.bytes:
        raise ConfigError(f"{origin}: batch.records and batch.bytes must be at least 1")
    return RouteSpec(name, parts.source, parts.batch, target, _queue_settings(parts, target, defaults, origin))


def _queue_settings(parts: _Parts, target: Target, defaults: SendQueue, origin: str) -> SendQueue:
    derived: dict[str, Any] = {}
    if parts.source.topic or parts.source.queue:
        derived["full_behavior"] = "block"
    wanted = getattr(target, "compression", "none")
    if wanted != "none":
        derived["compression"] = wanted
    queue = build(SendQueue, {**derived, **parts.queue}, f"{origin}, queue", defaults)
    if not queue.always_queue:
        raise ConfigError(f"{origin}: always_queue: false is not offered: everything goes through the queue")
    if queue.max_size < 1 or queue.inmemory_blocks < 1 or queue.meta_sync_interval <= 0:
        raise ConfigError(f"{origin}: max_size, inmemory_blocks and meta_sync_interval must be above 0")
    if queue.backoff.multiplier < 1:
        raise ConfigError(f"{origin}: backoff.multiplier must be at least 1")
    if queue.type == "memory" and parts.source.topic:
        raise ConfigError(f"{origin}: a queue of type memory cannot remember how far it read a topic; use disk")
    assert queue.compression in COMPRESSIONS
    return queue


def make_destination(spec: RouteSpec, topics: TopicsPort | None, queues: QueuePort | None) -> Destination:
    target = spec.target
    if isinstance(target, HttpTarget):
        return HttpDestination(
            target.url,
            format=target.format,
            method=target.method.upper(),
            headers=target.headers,
            compression=target.compression,
            timeout=target.timeout,
            connections=target.connections,
            ca=target.ca,
        )
    if isinstance(target, PostgresTarget):
        return PostgresDestination(
            target.url,
            target.table,
            column=target.column,
            columns=target.columns,
            once=target.once,
            timeout=target.timeout,
            connections=target.connections,
        )
    if isinstance(target, BrokerTarget):
        return BrokerDestination(target.url, target.topic, token=target.token, timeout=target.timeout)
    if isinstance(target, TopicTarget):
        if topics is None:
            raise ConfigError(f"route {spec.name}: this process has no topics")
        return TopicDestination(topics, target.topic)
    if queues is None:
        raise ConfigError(f"route {spec.name}: this process has no queues")
    return QueueDestination(queues, target.queue, target.partition)
