"""Parse the definition of a route, which is the same in YAML and over the API.

    routes:
      orders-to-lake:
        source: {topic: orders, start: earliest}
            or {queue: orders, group: lake, envelope: true},
            or {kafka: {brokers: "kafka:9092", topic: orders}, group: lake}, or {otlp: all},
            or {remote_write: true}, or nothing: direct pushes
        destination: {type: http, url: "https://..."}, see `destinations`
        batch: {records: 1000, bytes: 1Mi, linger: 50ms}
        queue: {...}, overrides of `exporter.queue` for this route

A route with a source has `full_behavior: block` by default: records that do not fit stay in the
source. By default, its queue has the compression of its destination (`queue.compression`).

A route to `otlp` or `remote_write` accepts requests of telemetry exporters at an address with its
name. With `source.otlp` or `source.remote_write`, it also accepts them at the standard address,
which only one route can have.

A definition that cannot work is refused here, before the route runs. Otherwise the route would
retry forever, or every record would become a dead letter.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.config import Config, build
from penstock.config.schema import Seconds, SendQueueSettings, Size, key, section
from penstock.errors import ConfigError, InvalidRequest
from penstock.export.checks import CA_HINT, UnusableCa, ca_from_api, name_problems
from penstock.export.context import NO_TOPICS, RouteContext
from penstock.export.destinations import Destination, Target, targets
from penstock.export.kafka import KafkaCluster
from penstock.export.telemetry_request import SAMPLES, SIGNALS
from penstock.protocol.names import check_name
from penstock.queues.checks import check_group
from penstock.queues.checks import check_name as check_queue_name

log = logging.getLogger("penstock.export")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_ABOVE_0 = (
    "max_size",
    "max_bytes",
    "inmemory_blocks",
    "meta_sync_interval",
    "retry_interval",
    "memory_limit_ratio",
)
_MAX_OFFSET_DIGITS = 14  # positions have 48 bits
_SET_FOR_ALL = ("path", "enabled", "global_send_limit")  # of `exporter.queue`


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    topic: str = key("", "read this topic")
    partition: int | None = key(None, "partition of the topic; needed when it has several")
    start: str = key("earliest", "where a new route begins: earliest, latest or an offset")
    queue: str = key("", "read this queue")
    kafka: KafkaCluster = section(KafkaCluster, "read a topic of a Kafka cluster")
    group: str = key("", "of a queue or of Kafka: the consumer group; default: the route's name")
    envelope: bool = key(False, "send each message as an object with its headers and payload")
    otlp: str = key(
        "", "take OTLP/HTTP at /v1/...: all, or some of traces, metrics and logs, with commas"
    )
    remote_write: bool = key(False, "take Prometheus remote write at /api/v1/write")

    @property
    def signals(self) -> frozenset[str]:
        """Return the signals that it accepts at the standard addresses of telemetry."""
        named = {word.strip() for word in self.otlp.split(",")} - {""}
        samples = {SAMPLES} if self.remote_write else set()
        return frozenset((set(SIGNALS) if named == {"all"} else named) | samples)

    @property
    def kind(self) -> str:
        """Return topic, queue, kafka, or "" if records or telemetry are pushed to the route."""
        kinds = {"topic": self.topic, "queue": self.queue, "kafka": self.kafka.topic}
        return next((kind for kind, name in kinds.items() if name), "")

    @property
    def name(self) -> str:
        return self.topic or self.queue or self.kafka.topic


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    records: int = key(1000, "most records in a batch")
    bytes: Size = key(1 << 20, "most bytes in a batch")
    linger: Seconds = key(0.05, "how long a batch that is not full waits for more")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The sections of a definition that are the same for all destinations."""

    source: SourceSpec = section(SourceSpec, "where records come from")
    batch: Batching = section(Batching, "how they are put together")
    destination: dict[str, Any] = key({}, "where they go")
    queue: dict[str, Any] = key({}, "overrides of exporter.queue")


@dataclass(frozen=True, slots=True)
class RouteSpec:
    name: str
    source: SourceSpec
    batch: Batching
    target: Target
    queue: SendQueueSettings
    remote: bool = False  # it was created over the API


def parse_routes(config: Config) -> dict[str, RouteSpec]:
    """Parse the routes of the configuration, and report all mistakes at once."""
    problems = [f"exporter.queue: {each}" for each in _queue_problems(config.exporter.queue)]
    specs = {}
    for name, tree in sorted(config.routes.items()):
        try:
            specs[name] = parse_route(name, tree, config.exporter.queue)
            check_signals(specs[name], specs)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return specs


def check_signals(spec: RouteSpec, others: Mapping[str, RouteSpec]) -> None:
    """Refuse a route that accepts a signal of another route at the same address."""
    for other in others.values():
        if other.name != spec.name and (both := spec.source.signals & other.source.signals):
            raise ConfigError(
                f"route {spec.name}: {', '.join(sorted(both))} are taken by route {other.name}; "
                "leave them out of source, and let exporters use the address with the route's name"
            )


def parse_route(name: str, tree: Any, defaults: SendQueueSettings) -> RouteSpec:
    """Check a definition."""
    origin = f"route {name}"
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a route name: letters, digits, '.', '_' and '-' only, at most 100"
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
    if not isinstance(kind, str) or kind not in targets():
        raise ConfigError(
            f"{origin}: destination.type must be one of {', '.join(targets())}, not {kind!r}"
        )
    target: Target = build(targets()[kind], parts.destination, f"{origin}, destination")
    target = target.with_source(parts.source.topic or parts.source.kafka.topic, parts.source.queue)
    queue = _queue_settings(parts, target, defaults, origin)
    problems = _source_problems(parts.source, tree) + _telemetry_problems(parts.source, target)
    problems += [f"destination.{problem}" for problem in target.problems()]
    if getattr(target, "header_prefix", "") and not parts.source.envelope:
        problems.append(
            "destination.header_prefix needs source.envelope: true, which brings headers"
        )
    if target.fills() in (("topic", parts.source.topic), ("queue", parts.source.queue)):
        problems.append("the destination is the source, so the route would feed itself")
    if not parts.batch.records or not parts.batch.bytes:
        problems.append("batch.records and batch.bytes must be at least 1")
    problems += [
        f"queue.{word} is set for all routes, in exporter.queue"
        for word in _SET_FOR_ALL
        if word in parts.queue
    ]
    problems += _queue_problems(queue)
    if queue.type == "memory" and parts.source.topic:
        problems.append("a queue of type memory cannot remember how far it read a topic; use disk")
    if problems:
        raise ConfigError("\n".join(f"{origin}: {problem}" for problem in problems))
    has_group = parts.source.kind in ("queue", "kafka")
    group = (parts.source.group or name) if has_group else ""
    return RouteSpec(name, replace(parts.source, group=group), parts.batch, target, queue)


def parse_remote(
    name: str, tree: Any, defaults: SendQueueSettings, certificates: Path, *, stored: bool = False
) -> RouteSpec:
    """Check a definition of the API. `stored`: accepted before, perhaps by an older version."""
    spec = parse_route(name, tree, defaults)
    cluster = spec.source.kafka
    try:
        target = spec.target.from_api(certificates, stored=stored)
        cluster = replace(cluster, ca=ca_from_api(cluster.ca, certificates, stored=stored))
    except ConfigError as error:
        raise ConfigError(f"route {name}: {error}") from error
    return replace(spec, source=replace(spec.source, kafka=cluster), target=target, remote=True)


def _source_problems(source: SourceSpec, tree: Mapping[str, Any]) -> list[str]:
    problems = []
    if sum(map(bool, (source.topic, source.queue, source.kafka.brokers))) > 1:
        problems.append("a source is one of topic, queue and kafka")
    elif "source" in tree and not source.kind and not source.signals:
        problems.append("source names no topic, queue, kafka, otlp or remote_write")
    if source.kafka.topic:
        problems += [f"source.kafka.{problem}" for problem in source.kafka.cluster_problems()]
        if source.start.isdecimal():
            problems.append("source.start is earliest or latest for a topic of Kafka")
    if source.partition is not None and (not source.topic or source.partition < 0):
        problems.append("source.partition is a partition of source.topic, 0 or more")
    if source.start not in ("earliest", "latest") and not source.start.isdecimal():
        problems.append(f"source.start is earliest, latest or an offset, not {source.start[:40]!r}")
    elif len(source.start) > _MAX_OFFSET_DIGITS:
        problems.append("source.start is larger than any offset")
    if source.envelope and not source.queue:
        problems.append("source.envelope is for messages of a queue, which have headers")
    names = []
    if source.topic:
        names += name_problems(check_name, "topic", source.topic)
    if source.queue:
        names += name_problems(check_queue_name, "queue", "queue", source.queue)
        names += name_problems(check_group, "group", source.group)
    return problems + [f"source.{problem}" for problem in names]


def _telemetry_problems(source: SourceSpec, target: Target) -> list[str]:
    problems = []
    if unknown := sorted(source.signals.difference((*SIGNALS, SAMPLES))):
        problems.append(f"source.otlp is all, or some of {', '.join(SIGNALS)}, not {unknown[0]!r}")
    wanted = {"otlp": bool(source.otlp), "remote_write": source.remote_write}
    for name, is_wanted in wanted.items():
        if is_wanted and target.takes != name:
            problems.append(f"source.{name} needs a destination of type {name}")
    if target.takes and source.kind:
        problems.append(
            f"a destination of type {target.type} takes requests of exporters, not records of a "
            f"{source.kind}: use source.{target.takes}, or no source"
        )
    return problems


def telemetry_defaults(takes: str) -> dict[str, Any]:
    """Return the settings of the send queue of a route that accepts telemetry.

    If the queue is full, exporters must get an answer before their own timeout (10 s in
    OpenTelemetry). Receivers of remote write refuse samples that are older than the last one of
    their series, so one worker sends the oldest first.
    """
    if not takes:
        return {}
    defaults: dict[str, Any] = {"full_behavior": "block", "block_timeout": 5.0}
    if takes == "remote_write":
        off = {"enabled": False}
        defaults |= {"workers": 1, "adaptive_workers": off, "pipeline_split": off}
        defaults["drain_order"] = "fifo"
    return defaults


def _queue_settings(
    parts: _Parts, target: Target, defaults: SendQueueSettings, origin: str
) -> SendQueueSettings:
    derived = telemetry_defaults(target.takes)
    if parts.source.kind:
        derived["full_behavior"] = "block"
    wanted = getattr(target, "compression", "none")
    if wanted != "none":
        derived["compression"] = wanted
    return build(SendQueueSettings, {**derived, **parts.queue}, f"{origin}, queue", defaults)


def _queue_problems(queue: SendQueueSettings) -> list[str]:
    problems = []
    if not queue.always_queue:
        problems.append(
            "always_queue: false is not supported: without the queue, a batch would be lost when "
            "its destination is down"
        )
    problems += [f"{word} must be above 0" for word in _ABOVE_0 if getattr(queue, word) <= 0]
    if queue.backoff.multiplier < 1:
        problems.append("backoff.multiplier must be at least 1")
    if queue.catchup_rate < 0:
        problems.append("catchup_rate must not be negative")
    breaker, workers = queue.circuit_breaker, queue.adaptive_workers
    if breaker.enabled and (breaker.threshold < 1 or breaker.reset_timeout <= 0):
        problems.append(
            "circuit_breaker.threshold and reset_timeout must be above 0; enabled: false is off"
        )
    if workers.enabled and workers.max_workers and workers.max_workers < workers.min_workers:
        problems.append("adaptive_workers.max_workers is below min_workers")
    return problems


def make_destination(spec: RouteSpec, context: RouteContext) -> Destination:
    if context.topics is None and spec.source.topic:
        raise ConfigError(f"route {spec.name}: {NO_TOPICS}")
    try:
        return spec.target.make(context)
    except UnusableCa as error:
        if not spec.remote:
            raise ConfigError(f"route {spec.name}: ca: {error}") from error
        log.warning("route %s: %s", spec.name, error)
        raise ConfigError(f"route {spec.name}: {CA_HINT}") from None
    except ConfigError as error:
        raise ConfigError(f"route {spec.name}: {error}") from error
    except (InvalidRequest, OSError, ValueError) as error:  # such as an invalid header
        raise ConfigError(f"route {spec.name}: its destination cannot be made: {error}") from error
