"""The configuration of topics under Kafka's names: what we have of it.

Retention and the largest batch are the broker's settings, for all topics; `cleanup.policy` is a
topic's own and can be changed.
"""

from collections.abc import Mapping
from typing import Any

from penstock.config.schema import Topics as Settings
from penstock.errors import InvalidRequest
from penstock.log.layout import COMPACT, DELETE
from penstock.protocol.roles import Role
from penstock.topics.store import LOCAL, PLACEMENTS, SHARED, AnyLog, TopicStore
from penstock.wire.kafka.access import Access
from penstock.wire.kafka.codec import Values
from penstock.wire.kafka.connection import KafkaConnection, KafkaRequest
from penstock.wire.kafka.errors import Code, code_of, text_of
from penstock.wire.kafka.node import Node

POLICY = "cleanup.policy"
PLACEMENT = "penstock.placement"  # local or shared, of a topic that is created
TOPIC, BROKER = 2, 4  # types of resources
TOPIC_SOURCE, STATIC_SOURCE = 1, 4  # where a value comes from: the topic, or the broker's settings
STRING, INT, LONG = 2, 3, 5  # types of values
SET, DELETE_OPERATION = 0, 1


class InvalidConfig(InvalidRequest):
    code = Code.INVALID_CONFIG


def broker_configs(settings: Settings) -> dict[str, tuple[str, int]]:
    """What all topics have, with the type of each value."""
    return {
        "compression.type": ("producer", STRING),
        "max.message.bytes": (str(settings.max_record), INT),
        "message.timestamp.type": ("CreateTime", STRING),
        "min.insync.replicas": ("1", INT),
        "retention.bytes": (str(settings.retention_bytes or -1), LONG),
        "retention.ms": (str(int(settings.retention_age * 1000) or -1), LONG),
        "segment.bytes": (str(settings.segment_bytes), INT),
    }


def check_configs(settings: Settings, configs: Mapping[str, str | None]) -> None:
    """Refuse what cannot be set for one topic, unless it is what all topics have."""
    same = broker_configs(settings)
    for name, value in configs.items():
        if name == POLICY:
            if value not in (DELETE, COMPACT):
                raise InvalidConfig(f"{POLICY} is {DELETE} or {COMPACT}, not {value}")
        elif name == PLACEMENT:
            if value not in PLACEMENTS:
                raise InvalidConfig(f"{PLACEMENT} is {' or '.join(PLACEMENTS)}, not {value}")
        elif name not in same:
            raise InvalidConfig(f"there is no configuration {name}")
        elif value != same[name][0]:
            raise InvalidConfig(f"{name} is {same[name][0]} for all topics of this broker")


async def set_configs(topics: TopicStore, topic: AnyLog, configs: Mapping[str, str | None]) -> None:
    policy = configs.get(POLICY)
    for number in range(topics.partitions(topic.topic)) if policy else ():
        await topics.partition(topic.topic, number).set_policy(str(policy))


class ConfigRequests:
    def __init__(self, topics: TopicStore, access: Access, node: Node) -> None:
        self._node = node
        self._topics = topics
        self._access = access

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
                answer |= _failed(error)
            results.append(answer)
        return {"results": results}

    def _describe(self, asked: Any) -> list[dict[str, Any]]:
        common = [
            {
                "name": name,
                "value": value,
                "config_source": STATIC_SOURCE,
                "config_type": kind,
                "read_only": True,
            }
            for name, (value, kind) in broker_configs(self._topics.settings).items()
        ]
        if asked.resource_type == BROKER and asked.resource_name in ("", str(self._node.id)):
            return common
        topic = self._require_topic(asked)
        placement = SHARED if self._topics.is_shared(topic.name) else LOCAL
        own = [
            {"name": name, "value": value, "config_source": TOPIC_SOURCE, "config_type": STRING}
            for name, value in ((POLICY, topic.policy or DELETE), (PLACEMENT, placement))
        ]
        return [*own, *common]

    def _require_topic(self, asked: Any) -> AnyLog:
        if asked.resource_type != TOPIC:
            raise InvalidRequest(f"resources of type {asked.resource_type} have no configuration")
        return self._topics.partition(asked.resource_name, 0)

    async def alter_configs(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        def wanted(asked: Any) -> dict[str, str | None]:
            return {POLICY: DELETE} | {one.name: one.value for one in asked.configs}

        return await self._alter(connection, request, wanted)

    async def incremental_alter_configs(
        self, connection: KafkaConnection, request: KafkaRequest
    ) -> Values:
        def wanted(asked: Any) -> dict[str, str | None]:
            changes: dict[str, str | None] = {}
            for one in asked.configs:
                if one.config_operation == SET:
                    changes[one.name] = one.value
                elif one.config_operation == DELETE_OPERATION and one.name == POLICY:
                    changes[POLICY] = DELETE
                elif one.config_operation != DELETE_OPERATION:
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
                    await set_configs(self._topics, topic, changes)
                    await self._access.note(connection, "topic.configure", topic.topic)
            except Exception as error:  # noqa: BLE001 - answered for this resource
                answer |= _failed(error)
            responses.append(answer)
        return {"responses": responses}


def _named(asked: Any) -> dict[str, Any]:
    return {"resource_type": asked.resource_type, "resource_name": asked.resource_name}


def _failed(error: BaseException) -> dict[str, Any]:
    code = error.code if isinstance(error, InvalidConfig) else code_of(error)
    return {"error_code": code, "error_message": text_of(error)}
