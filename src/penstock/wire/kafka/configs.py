"""The configuration of topics under Kafka's names: what we have of it.

A topic can have its own `cleanup.policy`, retention and `max.message.bytes`; without, and in
everything else, it has the broker's settings.
"""

from collections.abc import Mapping
from typing import Any

from kio.schema.errors import ErrorCode as Code
from msgspec.structs import replace

from penstock.config.schema import TopicsSettings as Settings
from penstock.errors import InvalidRequest
from penstock.log.layout import COMPACT, DELETE
from penstock.protocol.roles import Role
from penstock.topics.shared.log import SharedLog
from penstock.topics.store import LOCAL, PLACEMENTS, SHARED, AnyLog, TopicStore
from penstock.wire.kafka.codec import Values
from penstock.wire.kafka.connection import KafkaConnection, KafkaRequest
from penstock.wire.kafka.errors import Refused, failed
from penstock.wire.kafka.node import KafkaHandlers

POLICY = "cleanup.policy"
PLACEMENT = "penstock.placement"  # local or shared, of a topic that is created
TOPIC, BROKER = 2, 4  # types of resources
TOPIC_SOURCE, STATIC_SOURCE = 1, 4  # where a value comes from: the topic, or the broker's settings
# A topic's own, by the field of `Limits` that has it.
LIMITS = {
    "retention.ms": "retention_age",
    "retention.bytes": "retention_bytes",
    "max.message.bytes": "max_record",
}
STRING, INT, LONG = 2, 3, 5  # types of values
SET, DELETE_OPERATION = 0, 1


class InvalidConfig(Refused):
    def __init__(self, text: str) -> None:
        super().__init__(Code.invalid_config, text)


def broker_configs(settings: Settings) -> dict[str, tuple[str, int]]:
    """Return the settings that all topics share, with the type of each value."""
    return {
        "compression.type": ("producer", STRING),
        "max.message.bytes": (str(settings.max_record), INT),
        "message.timestamp.type": ("CreateTime", STRING),
        "min.insync.replicas": ("1", INT),
        "retention.bytes": (str(settings.retention_bytes or -1), LONG),
        "retention.ms": (str(int(settings.retention_age * 1000) or -1), LONG),
        "segment.bytes": (str(settings.segment_bytes), INT),
    }


def own_configs(topic: AnyLog) -> dict[str, str]:
    """Return the settings of one topic."""
    limits, own = topic.limits, {POLICY: topic.policy or DELETE}
    own[PLACEMENT] = SHARED if isinstance(topic, SharedLog) else LOCAL
    if limits.retention_age is not None:
        own["retention.ms"] = str(round(limits.retention_age * 1000) or -1)
    if limits.retention_bytes is not None:
        own["retention.bytes"] = str(limits.retention_bytes or -1)
    if limits.max_record is not None:
        own["max.message.bytes"] = str(limits.max_record)
    return own


def check_configs(settings: Settings, configs: Mapping[str, str | None]) -> None:
    """Refuse what cannot be set for one topic, unless it is what all topics have."""
    same = broker_configs(settings)
    for name, value in configs.items():
        if name == POLICY:
            if value not in (DELETE, COMPACT, None):
                raise InvalidConfig(f"{POLICY} is {DELETE} or {COMPACT}, not {value}")
        elif name == PLACEMENT:
            if value not in PLACEMENTS:
                raise InvalidConfig(f"{PLACEMENT} is {' or '.join(PLACEMENTS)}, not {value}")
        elif name in LIMITS:
            _parse_limit(settings, name, value)
        elif name not in same:
            raise InvalidConfig(f"unknown configuration {name}")
        elif value not in (same[name][0], None):
            raise InvalidConfig(f"{name} is {same[name][0]} for all topics of this broker")


def _parse_limit(settings: Settings, name: str, value: str | None) -> float | int | None:
    """Return a field of `Limits`; None: the broker's setting applies."""
    if value is None:
        return None
    try:
        number = int(value)
    except ValueError:
        raise InvalidConfig(f"{name} is a number, not {value[:40]!r}") from None
    if name == "max.message.bytes":
        if not 0 < number <= settings.max_record:
            raise InvalidConfig(f"{name} is 1 to {settings.max_record} (topics.max_record)")
        return number
    if not -1 <= number < 1 << 63:
        raise InvalidConfig(f"{name} is -1 (no limit) or more, not {number}")
    if name == "retention.ms":
        return 0.0 if number == -1 else max(1, number) / 1000
    return 0 if number == -1 else max(1, number)


async def set_configs(topics: TopicStore, name: str, configs: Mapping[str, str | None]) -> None:
    """Change what `configs` names, in all partitions; a value of None goes back to the default."""
    changes = {
        LIMITS[key]: _parse_limit(topics.settings, key, value)
        for key, value in configs.items()
        if key in LIMITS
    }
    for number in range(topics.partitions(name)):
        topic = topics.partition(name, number)
        if POLICY in configs:
            await topic.set_policy(configs[POLICY] or DELETE)
        if changes:
            await topic.set_limits(replace(topic.limits, **changes))


class ConfigRequests(KafkaHandlers):
    def describe_configs(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        results = []
        for asked in request.body.resources:
            answer = _named(asked)
            try:
                self._access.require(connection, Role.READ_ONLY)
                every = self._describe(asked)
                keys = asked.configuration_keys
                answer["configs"] = [one for one in every if not keys or one["name"] in keys]
            except Exception as error:  # noqa: BLE001 - answered for this resource
                answer |= failed(error)
            results.append(answer)
        return {"results": results}

    def _describe(self, asked: Any) -> list[dict[str, Any]]:
        configs, own = broker_configs(self._topics.settings), dict[str, str]()
        if asked.resource_type != BROKER or asked.resource_name not in ("", str(self._node.id)):
            own = own_configs(self._require_topic(asked))
            configs = {POLICY: (DELETE, STRING), PLACEMENT: (LOCAL, STRING), **configs}
        return [
            {
                "name": name,
                "value": own.get(name, value),
                "config_source": TOPIC_SOURCE if name in own else STATIC_SOURCE,
                "config_type": kind,
                "read_only": not own or (name != POLICY and name not in LIMITS),
            }
            for name, (value, kind) in configs.items()
        ]

    def _require_topic(self, asked: Any) -> AnyLog:
        if asked.resource_type != TOPIC:
            raise InvalidRequest(f"resources of type {asked.resource_type} have no configuration")
        return self._topics.partition(asked.resource_name, 0)

    async def alter_configs(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        def wanted(asked: Any) -> dict[str, str | None]:
            defaults = dict.fromkeys((POLICY, *LIMITS))
            return {**defaults, **{one.name: one.value for one in asked.configs}}

        return await self._alter(connection, request, wanted)

    async def incremental_alter_configs(
        self, connection: KafkaConnection, request: KafkaRequest
    ) -> Values:
        def wanted(asked: Any) -> dict[str, str | None]:
            changes: dict[str, str | None] = {}
            for one in asked.configs:
                if one.config_operation == SET:
                    changes[one.name] = one.value
                elif one.config_operation == DELETE_OPERATION:
                    changes[one.name] = None
                else:
                    raise InvalidConfig(f"{one.name} is not a list")
            return changes

        return await self._alter(connection, request, wanted)

    async def _alter(
        self, connection: KafkaConnection, request: KafkaRequest, wanted: Any
    ) -> Values:
        responses = []
        for asked in request.body.resources:
            answer = _named(asked)
            try:
                self._access.require(connection, Role.ADMIN)
                topic = self._require_topic(asked)
                changes = wanted(asked)
                check_configs(self._topics.settings, changes)
                if not request.body.validate_only:
                    await set_configs(self._topics, topic.topic, changes)
                    await self._access.note(connection, "topic.configure", topic.topic)
            except Exception as error:  # noqa: BLE001 - answered for this resource
                answer |= failed(error)
            responses.append(answer)
        return {"responses": responses}


def _named(asked: Any) -> dict[str, Any]:
    return {"resource_type": asked.resource_type, "resource_name": asked.resource_name}
