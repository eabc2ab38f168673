"""Answer requests about topics and the cluster. Topics that Kafka clients create store record
batches. Topics whose names Kafka does not allow are hidden.
"""

import re
from collections.abc import Awaitable, Sequence
from typing import Any

from kio.schema.errors import ErrorCode as Code

from penstock.errors import Conflict, InvalidRequest, NotFound
from penstock.log.batches.format import BATCHES
from penstock.protocol.roles import Role
from penstock.topics.store import AnyLog
from penstock.wire.kafka.codec import Values
from penstock.wire.kafka.configs import PLACEMENT, check_configs, set_configs
from penstock.wire.kafka.connection import KafkaConnection, KafkaRequest
from penstock.wire.kafka.errors import Refused, code_of, each_partition, each_topic, with_code
from penstock.wire.kafka.log_requests import LEADER_EPOCH, leader_epoch
from penstock.wire.kafka.node import CLUSTER_ID, KafkaHandlers

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise Refused(Code.invalid_topic_exception, f"{name!r} is not a topic name in Kafka")
    return name


class TopicRequests(KafkaHandlers):
    # Metadata

    def metadata(
        self, connection: KafkaConnection, request: KafkaRequest
    ) -> Values | Awaitable[Values]:
        body = request.body
        everything = body.topics is None or (not request.head.version and not body.topics)
        names = self._shown() if everything else [topic.name for topic in body.topics]
        create = not everything and getattr(body, "allow_auto_topic_creation", True)
        missing = [name for name in names if not self._topics.partitions(name)]
        if missing and create and self._settings.create_topics:
            return self._create_missing(connection, names, missing)
        return self._metadata(connection, names, {})

    def _shown(self) -> list[str]:
        return [name for name in self._topics.names() if _NAME.fullmatch(name)]

    async def _create_missing(
        self, connection: KafkaConnection, names: Sequence[str], missing: Sequence[str]
    ) -> Values:
        failures: dict[str, Code] = {}
        for name in missing:
            try:
                unknown = Code.unknown_topic_or_partition
                self._access.require(connection, Role.READ_WRITE, unknown)
                _check_name(name)
                await self._topics.create(
                    name, form=BATCHES.name, partitions=self._settings.partitions
                )
            except Exception as error:  # noqa: BLE001 - answered for this topic
                failures[name] = code_of(error)
        return self._metadata(connection, names, failures)

    def _metadata(
        self, connection: KafkaConnection, names: Sequence[str], failures: dict[str, Code]
    ) -> Values:
        described = []
        for name in names:
            code = failures.get(name, Code.none)
            try:
                self._access.require(connection, Role.READ_ONLY)
                _check_name(name)
                if not code and not self._topics.partitions(name):
                    code = Code.unknown_topic_or_partition
            except Refused as error:
                code = code_of(error)
            partitions = [] if code else self._partitions(name)
            described.append({"error_code": code, "name": name, "partitions": partitions})
        return {
            "brokers": self._node.describe_all(connection),
            "cluster_id": CLUSTER_ID,
            "controller_id": self._node.id,
            "topics": described,
        }

    def _partitions(self, name: str) -> list[dict[str, Any]]:
        partitions = []
        for number in range(self._topics.partitions(name)):
            epoch = LEADER_EPOCH
            try:
                topic = self._topics.partition(name, number)
                code, leader = Code.none, self._node.leader(topic)
                epoch = leader_epoch(self._topics, topic)
            except NotFound:  # the partition could not be opened
                code, leader = Code.leader_not_available, -1
            replica = self._node.id if leader < 0 else leader
            partitions.append(
                {
                    "error_code": code,
                    "partition_index": number,
                    "leader_id": leader,
                    "leader_epoch": epoch,
                    "replica_nodes": [replica],
                    "isr_nodes": [replica],
                }
            )
        return partitions

    def describe_cluster(self, connection: KafkaConnection, _: KafkaRequest) -> Values:
        return {
            "cluster_id": CLUSTER_ID,
            "controller_id": self._node.id,
            "brokers": self._node.describe_all(connection),
            "endpoint_type": 1,
        }

    @with_code
    async def describe_log_dirs(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        self._access.require(connection, Role.READ_ONLY, Code.cluster_authorization_failed)
        asked = request.body.topics
        wanted = (
            [(name, range(self._topics.partitions(name))) for name in self._shown()]
            if asked is None
            else [(one.topic, one.partitions) for one in asked]
        )
        described = []
        for name, numbers in wanted:
            partitions = [
                {"partition_index": number, "partition_size": topic.local_bytes}
                for number in numbers
                if (topic := self._find(name, number)) is not None
            ]
            described.append({"name": name, "partitions": partitions})
        return {"results": [{"log_dir": "topics", "topics": described}]}

    def _find(self, name: str, number: int) -> AnyLog | None:
        try:
            return self._topics.partition(name, number)
        except NotFound:
            return None

    # Changes

    async def create_topics(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        async def create(asked: Any) -> dict[str, Any]:
            self._access.require(connection, Role.READ_WRITE)
            name = _check_name(asked.name)
            count = len(asked.assignments) or asked.num_partitions
            if count == -1:
                count = self._settings.partitions
            if count < 1:
                raise Refused(Code.invalid_partitions, f"{count} partitions cannot be created")
            if asked.replication_factor not in (-1, 1):
                raise Refused(Code.invalid_replication_factor, "there is one replica")
            configs = {one.name: one.value for one in asked.configs}
            check_configs(self._topics.settings, configs)
            if self._topics.partitions(name):
                raise Refused(Code.topic_already_exists, f"topic {name!r} exists")
            if not request.body.validate_only:
                await self._topics.create(
                    name,
                    form=BATCHES.name,
                    partitions=count,
                    placement=configs.get(PLACEMENT),
                )
                await set_configs(self._topics, name, configs)
            return {"num_partitions": count, "replication_factor": 1, "configs": []}

        return {"topics": await each_topic(request.body.topics, create)}

    async def delete_topics(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        async def delete(name: str) -> dict[str, Any]:
            self._access.require(connection, Role.ADMIN)
            await self._topics.delete(name)
            await self._access.note(connection, "topic.delete", name)
            return {}

        return {"responses": await each_topic(request.body.topic_names, delete)}

    async def create_partitions(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        async def create(asked: Any) -> dict[str, Any]:
            self._access.require(connection, Role.READ_WRITE)
            now = self._topics.partitions(asked.name)
            if now and asked.count <= now:
                raise Refused(
                    Code.invalid_partitions,
                    f"topic {asked.name!r} has {now} partitions already",
                )
            if not request.body.validate_only:
                try:
                    await self._topics.add_partitions(asked.name, asked.count)
                except (Conflict, InvalidRequest) as error:
                    raise Refused(Code.invalid_partitions, str(error)) from None
            return {}

        return {"results": await each_topic(request.body.topics, create)}

    async def delete_records(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        async def delete(name: str, asked: Any) -> dict[str, Any]:
            self._access.require(connection, Role.ADMIN)
            topic = self._topics.partition(name, asked.partition_index)
            end = topic.next_offset if asked.offset == -1 else asked.offset
            await self._topics.delete_before(topic, end)
            thing = f"{topic.name} before {asked.offset}"
            await self._access.note(connection, "topic.delete-records", thing)
            return {"low_watermark": topic.first_offset}

        return {"topics": await each_partition(request.body.topics, delete)}
