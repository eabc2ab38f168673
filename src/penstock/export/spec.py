"""What a route's definition says, from YAML or from the API: the same text in both.

    routes:
      orders-to-lake:
        source: {topic: orders, start: earliest}      or {queue: orders, group: lake}, or nothing: direct pushes
        destination: {type: http, url: "https://..."} see `destinations`
        batch: {records: 1000, bytes: 1Mi, linger: 50ms}
        queue: {...}                                  overrides of `exporter.queue` for this route

A route with a source has `full_behavior: block` unless it says otherwise: what does not fit stays
safe in the source. Its queue stores what its destination takes compressed, unless
`queue.compression` says otherwise.

What cannot work is refused here, before anything runs, so that a mistake is an answer and not a
route that retries for ever or buries every record.

The files that a definition names are read with the broker's rights, and whoever may make routes
over the API need not have those. So over the API `ca` is the text of a PEM file, or the name of a
file in one directory that the operator fills (`exporter.certificates`), a PostgreSQL address names
no files, and what is wrong with a file is in the log only.
"""

import logging
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from penstock.config import Config, build
from penstock.config.schema import Seconds, Secret, SendQueue, Size, key, section
from penstock.errors import ConfigError, InvalidRequest
from penstock.export.destinations import Destination
from penstock.export.destinations.broker import BrokerDestination
from penstock.export.destinations.http import HttpDestination
from penstock.export.destinations.local import QueueDestination, TopicDestination
from penstock.export.destinations.postgres import PostgresDestination
from penstock.export.payload import COMPRESSIONS
from penstock.export.protocols import QueuePort, TopicsPort
from penstock.net.tls import client_context, is_pem
from penstock.protocol.names import DEFAULT_PARTITION, check_name
from penstock.queues.catalog import check_group
from penstock.queues.catalog import check_name as check_queue_name

log = logging.getLogger("penstock.export")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_NO_ADDRESS = re.compile(r"[^\x21-\x7e]")
_ABOVE_0 = (
    "max_size",
    "max_bytes",
    "inmemory_blocks",
    "meta_sync_interval",
    "retry_interval",
    "memory_limit_ratio",
)
_IDENTIFIERS = ("table", "column", "topic", "queue", "partition")  # of destinations
_LONGEST_IDENTIFIER = 63  # bytes; PostgreSQL cuts longer names, and then they are others
_FILE_PARAMETERS = frozenset(
    ("sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile", "service", "servicefile")
)
_LONGEST_OFFSET = 14  # digits; positions have 48 bits
_FOR_ALL = (
    "path",
    "enabled",
    "global_send_limit",
)  # of `exporter.queue`; one route cannot have its own


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
    ca: str = key("", "certificate authority to trust: a PEM file, or its text")


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresTarget:
    type: str = key("postgres", "")
    url: Secret = key("", "address")
    table: str = key("", "table")
    column: str = key("payload", "column that takes the record")
    columns: bool = key(False, "records are objects whose keys are columns")
    strict: bool = key(
        True,
        "with columns: a record with a key that is no column is bad; false = the key is left out",
    )
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
    ca: str = key("", "certificate authority to trust with https: a PEM file, or its text")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicTarget:
    type: str = key("topic", "")
    topic: str = key("", "topic here")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTarget:
    type: str = key("queue", "")
    queue: str = key("", "queue here")
    partition: str = key(DEFAULT_PARTITION, "partition")


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
    remote: bool = False  # it came over the API


def parse_routes(config: Config) -> dict[str, RouteSpec]:
    """The routes of the configuration; all mistakes in all of them at once."""
    problems, found = _queue_problems(config.exporter.queue, "exporter.queue"), {}
    for name, tree in sorted(config.routes.items()):
        try:
            found[name] = parse_route(name, tree, config.exporter.queue)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def parse_route(name: str, tree: Any, defaults: SendQueue) -> RouteSpec:
    """Check a definition."""
    origin = f"route {name}"
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no route name: letters, digits, '.', '_' and '-' only, at most 100"
        )
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"{origin}: expected a mapping with `destination`, got {type(tree).__name__}"
        )
    tree = {
        word: value
        for word, value in tree.items()
        if not (word == "source" and value in (None, "push", {}))
    }
    parts = build(_Parts, tree, origin)
    kind = parts.destination.get("type", "")
    if not isinstance(kind, str) or kind not in TARGETS:
        raise ConfigError(
            f"{origin}: destination.type must be one of {', '.join(TARGETS)}, not {kind!r}"
        )
    target: Target = build(TARGETS[kind], parts.destination, f"{origin}, destination")
    if isinstance(target, BrokerTarget) and not target.topic:
        target = replace(target, topic=parts.source.topic)
    problems = [*_source_problems(parts.source, tree, origin), *_target_problems(target, origin)]
    same_topic = isinstance(target, TopicTarget) and target.topic == parts.source.topic
    if same_topic or (isinstance(target, QueueTarget) and target.queue == parts.source.queue):
        problems.append(f"{origin}: it would feed itself: its destination is its source")
    if not parts.batch.records or not parts.batch.bytes:
        problems.append(f"{origin}: batch.records and batch.bytes must be at least 1")
    problems += [
        f"{origin}: queue.{word} is set for all routes, in exporter.queue"
        for word in _FOR_ALL
        if word in parts.queue
    ]
    queue = _queue_settings(parts, target, defaults, origin)
    problems += _queue_problems(queue, origin)
    if queue.type == "memory" and parts.source.topic:
        problems.append(
            f"{origin}: a queue of type memory cannot remember how far it read a topic; use disk"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return RouteSpec(name, parts.source, parts.batch, target, queue)


def parse_remote(
    name: str, tree: Any, defaults: SendQueue, certificates: Path, *, stored: bool = False
) -> RouteSpec:
    """Check a definition that came over the API. `stored`: it was accepted before, perhaps by an
    older version.
    """
    spec = parse_route(name, tree, defaults)
    target = spec.target
    problems = []
    if isinstance(target, HttpTarget | BrokerTarget) and target.ca and not is_pem(target.ca):
        if _is_file_name(target.ca):
            target = replace(target, ca=str(certificates / target.ca))
        elif not stored:
            problems.append(_ca_problem(name))
    if isinstance(target, PostgresTarget) and not stored:
        named = _FILE_PARAMETERS.intersection(
            word for word, _ in parse_qsl(urlsplit(target.url).query)
        )
        if named:
            problems.append(
                f"route {name}: destination.url names files of the broker ({', '.join(sorted(named))}): "
                "a route that needs them belongs into the broker's configuration"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    return replace(spec, target=target, remote=True)


def _is_file_name(text: str) -> bool:
    return "/" not in text and "\\" not in text and "\0" not in text and text not in (".", "..")


def _ca_problem(name: str) -> str:
    return (
        f"route {name}: destination.ca cannot be used: give the text of a PEM file, or the name of one in the broker's "
        "directory exporter.certificates (the broker's log says what is wrong with it)"
    )


def _source_problems(source: Source, tree: Mapping[str, Any], origin: str) -> list[str]:
    problems = []
    if source.topic and source.queue:
        problems.append(f"{origin}: a source is a topic or a queue, not both")
    elif "source" in tree and not source.topic and not source.queue:
        problems.append(f"{origin}: source names neither a topic nor a queue")
    if source.start not in ("earliest", "latest") and not source.start.isdecimal():
        problems.append(
            f"{origin}: source.start is earliest, latest or an offset, not {source.start[:40]!r}"
        )
    elif len(source.start) > _LONGEST_OFFSET:
        problems.append(f"{origin}: source.start is larger than any offset")
    if source.topic:
        problems += _name_problems(check_name, f"{origin}: source.topic", source.topic)
    if source.queue:
        problems += _name_problems(
            check_queue_name, f"{origin}: source.queue", "queue", source.queue
        )
        problems += _name_problems(check_group, f"{origin}: source.group", source.group)
    return problems


def _name_problems(check: Callable[..., object], where: str, *name: str) -> list[str]:
    try:
        check(*name)
    except InvalidRequest as error:
        return [f"{where}: {error}"]
    return []


def _identifier_problems(target: Target, origin: str) -> list[str]:
    """No name of ours holds a character that nobody can see; a NUL no server takes."""
    problems = []
    names = {word: getattr(target, word) for word in _IDENTIFIERS if hasattr(target, word)}
    for word, name in names.items():
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
            problems.append(
                f"{origin}: destination.{word} holds a control character: {name[:80]!r}"
            )
    if problems:
        return problems
    if isinstance(target, PostgresTarget):
        problems += [
            f"{origin}: destination: a name in PostgreSQL has 1 to {_LONGEST_IDENTIFIER} bytes, not {part[:80]!r}"
            for part in (*target.table.split("."), target.column)
            if not 0 < len(part.encode()) <= _LONGEST_IDENTIFIER
        ]
    if isinstance(target, QueueTarget):
        problems += _name_problems(
            check_queue_name, f"{origin}: destination.queue", "queue", target.queue
        )
        problems += _name_problems(
            check_queue_name, f"{origin}: destination.partition", "partition", target.partition
        )
    return problems


def _target_problems(target: Target, origin: str) -> list[str]:
    problems = [
        f"{origin}: destination.{needed} is missing"
        for needed in ("url", "table", "topic", "queue")
        if getattr(target, needed, None) == ""
    ]
    if problems:
        return problems
    schemes = (
        ("postgres", "postgresql") if isinstance(target, PostgresTarget) else ("http", "https")
    )
    if isinstance(target, HttpTarget | BrokerTarget | PostgresTarget):
        problems += _url_problems(target.url, schemes, f"{origin}: destination.url")
        if target.timeout <= 0 or getattr(target, "connections", 1) < 1:
            problems.append(
                f"{origin}: destination.timeout and destination.connections must be above 0"
            )
    if isinstance(target, BrokerTarget | TopicTarget):
        problems += _name_problems(check_name, f"{origin}: destination.topic", target.topic)
    return problems + _identifier_problems(target, origin)


def _url_problems(url: str, schemes: tuple[str, ...], where: str) -> list[str]:
    """Nothing of the address is told: it may hold a password."""
    if _NO_ADDRESS.search(url):
        return [f"{where} holds a space or a character that must be written as %XX"]
    example = f"{schemes[-1]}://host/..."
    try:
        parts = urlsplit(url)
        if parts.scheme not in schemes or ("http" in schemes and not parts.hostname):
            return [f"{where} must be an address such as {example}"]
        if "http" in schemes:
            _ = parts.port  # a list of hosts, as PostgreSQL takes it, has none
    except ValueError as error:
        return [f"{where} must be an address such as {example}: {error}"]
    return []


def _queue_settings(parts: _Parts, target: Target, defaults: SendQueue, origin: str) -> SendQueue:
    derived: dict[str, Any] = {}
    if parts.source.topic or parts.source.queue:
        derived["full_behavior"] = "block"
    wanted = getattr(target, "compression", "none")
    if wanted != "none":
        derived["compression"] = wanted
    queue = build(SendQueue, {**derived, **parts.queue}, f"{origin}, queue", defaults)
    assert queue.compression in COMPRESSIONS
    return queue


def _queue_problems(queue: SendQueue, origin: str) -> list[str]:
    problems = []
    if not queue.always_queue:
        problems.append(
            f"{origin}: always_queue: false is not offered: everything goes through the queue"
        )
    problems += [
        f"{origin}: {word} must be above 0" for word in _ABOVE_0 if getattr(queue, word) <= 0
    ]
    if queue.backoff.multiplier < 1:
        problems.append(f"{origin}: backoff.multiplier must be at least 1")
    if queue.catchup_rate < 0:
        problems.append(f"{origin}: catchup_rate must not be negative")
    breaker, workers = queue.circuit_breaker, queue.adaptive_workers
    if breaker.enabled and (breaker.threshold < 1 or breaker.reset_timeout <= 0):
        problems.append(
            f"{origin}: circuit_breaker.threshold and reset_timeout must be above 0; enabled: false is off"
        )
    if workers.enabled and workers.max_workers and workers.max_workers < workers.min_workers:
        problems.append(f"{origin}: adaptive_workers.max_workers is below min_workers")
    return problems


def make_destination(
    spec: RouteSpec, topics: TopicsPort | None, queues: QueuePort | None
) -> Destination:
    _check_ca(spec)
    try:
        return _make_destination(spec, topics, queues)
    except (
        InvalidRequest,
        OSError,
        ValueError,
    ) as error:  # a header that is none, a certificate that is not there
        raise ConfigError(f"route {spec.name}: its destination cannot be made: {error}") from error


def _check_ca(spec: RouteSpec) -> None:
    if not isinstance(spec.target, HttpTarget | BrokerTarget) or not spec.target.ca:
        return
    try:
        client_context(spec.target.ca)
    except InvalidRequest as error:
        if not spec.remote:
            raise ConfigError(f"route {spec.name}: destination.ca: {error}") from error
        log.warning("route %s: %s", spec.name, error)
        raise ConfigError(_ca_problem(spec.name)) from None


def _make_destination(
    spec: RouteSpec, topics: TopicsPort | None, queues: QueuePort | None
) -> Destination:
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
            strict=target.strict,
            once=target.once,
            timeout=target.timeout,
            connections=target.connections,
        )
    if isinstance(target, BrokerTarget):
        return BrokerDestination(
            target.url, target.topic, token=target.token, timeout=target.timeout, ca=target.ca
        )
    if isinstance(target, TopicTarget):
        if topics is None:
            raise ConfigError(f"route {spec.name}: this process has no topics")
        return TopicDestination(topics, target.topic)
    if queues is None:
        raise ConfigError(f"route {spec.name}: this process has no queues")
    return QueueDestination(queues, target.queue, target.partition)
