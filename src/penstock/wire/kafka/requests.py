"""Run a client's requests: find the method of an API key, and check the client's token.

A method gets the connection and the request, and returns the fields of the answer, or an awaitable
of them. It never raises for what a client did: every answer of Kafka has a place for an error.

Produce is offered from version 0, although only versions from 3 on get an answer: otherwise, old
librdkafka does not compress. The highest versions are the last ones without topic ids and without
requests for several groups. Metadata ends at version 8. librdkafka reserves four times the bytes of
the answer for the decoded form. If many topics have short names and one replica, the compact answer
of version 9 is too short for that, and the client never sees a topic.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from kio.schema.errors import ErrorCode as Code

from penstock.config.schema import KafkaServerSettings as Settings
from penstock.metrics import Metrics
from penstock.protocol.status import UnknownCommand
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from penstock.wire.auth import Verifier
from penstock.wire.kafka.access import MAX_FIRST_FRAME, Access, SaslRequests
from penstock.wire.kafka.codec import API_VERSIONS, KafkaHead, Values, read_request
from penstock.wire.kafka.configs import ConfigRequests
from penstock.wire.kafka.connection import Answer, KafkaConnection, KafkaRequest
from penstock.wire.kafka.group_requests import GroupRequests
from penstock.wire.kafka.log_requests import LogRequests
from penstock.wire.kafka.node import Node
from penstock.wire.kafka.topic_requests import TopicRequests

Handler = Callable[[KafkaConnection, KafkaRequest], Answer]


class KafkaApi(NamedTuple):
    name: str  # of the method that handles it, and in the metrics
    low: int
    high: int
    lowest_read: int = 0  # the first version that can be read, where it is not `low`


APIS: dict[int, KafkaApi] = {
    0: KafkaApi("produce", 0, 9, 3),
    1: KafkaApi("fetch", 4, 12),
    2: KafkaApi("list_offsets", 1, 7),
    3: KafkaApi("metadata", 0, 8),
    8: KafkaApi("offset_commit", 2, 8),
    9: KafkaApi("offset_fetch", 1, 7),
    10: KafkaApi("find_coordinator", 0, 3),
    11: KafkaApi("join_group", 0, 7),
    12: KafkaApi("heartbeat", 0, 4),
    13: KafkaApi("leave_group", 0, 4),
    14: KafkaApi("sync_group", 0, 5),
    15: KafkaApi("describe_groups", 0, 5),
    16: KafkaApi("list_groups", 0, 4),
    17: KafkaApi("sasl_handshake", 0, 1),
    18: KafkaApi("api_versions", 0, 4),
    19: KafkaApi("create_topics", 2, 6),
    20: KafkaApi("delete_topics", 1, 5),
    21: KafkaApi("delete_records", 0, 2),
    22: KafkaApi("init_producer_id", 0, 4),
    23: KafkaApi("offset_for_leader_epoch", 2, 4),
    32: KafkaApi("describe_configs", 1, 4),
    33: KafkaApi("alter_configs", 0, 2),
    35: KafkaApi("describe_log_dirs", 1, 4),
    36: KafkaApi("sasl_authenticate", 0, 2),
    37: KafkaApi("create_partitions", 0, 3),
    42: KafkaApi("delete_groups", 0, 2),
    44: KafkaApi("incremental_alter_configs", 0, 1),
    47: KafkaApi("offset_delete", 0, 0),
    60: KafkaApi("describe_cluster", 0, 1),
}
BEFORE_AUTHENTICATION = ("api_versions", "sasl_handshake", "sasl_authenticate")


class KafkaRequests:
    def __init__(
        self,
        settings: Settings,
        topics: TopicStore,
        groups: Groups,
        metrics: Metrics,
        verifier: Verifier | None,
    ) -> None:
        shared = topics.shared
        self.node = node = Node(settings, shared.nodes if shared is not None else None)
        self.access = Access(verifier)
        self.first_frame = settings.max_frame if verifier is None else MAX_FIRST_FRAME
        handlers: list[Any] = [
            self,
            SaslRequests(self.access, settings.max_frame),
            *(
                kind(settings, topics, groups, self.access, node)
                for kind in (LogRequests, TopicRequests, ConfigRequests, GroupRequests)
            ),
        ]
        self._handlers: dict[int, Handler] = {
            key: next(getattr(one, api.name) for one in handlers if hasattr(one, api.name))
            for key, api in APIS.items()
        }
        self._count = metrics.counter(
            "penstock_kafka_requests_total", "Requests of Kafka clients, by API", "api"
        ).add
        self._refused = metrics.counter(
            "penstock_kafka_requests_refused_total",
            "Requests of Kafka clients that were refused with a closed connection, by reason",
            "reason",
        ).add

    def run(self, connection: KafkaConnection, head: KafkaHead, frame: memoryview) -> Answer:
        api = APIS.get(head.key)
        if api is None or not max(api.low, api.lowest_read) <= head.version <= api.high:
            if head.key == API_VERSIONS:
                self._tell_versions(connection, head)
                return None
            self._refused(1, "version")
            raise UnknownCommand(f"API {head.key} version {head.version} is not served")
        if api.name not in BEFORE_AUTHENTICATION:
            try:
                self.access.check_known(connection)
            except Exception:
                self._refused(1, "authentication")
                raise
        try:
            client, body = read_request(head, frame)
        except Exception:
            self._refused(1, "malformed")
            raise
        self._count(1, api.name)
        return self._handlers[head.key](connection, KafkaRequest(head, client, body))

    def _tell_versions(self, connection: KafkaConnection, head: KafkaHead) -> None:
        """Answer with our versions in the oldest form, which every client can read."""
        oldest = KafkaHead(API_VERSIONS, 0, head.correlation)
        connection.reply(oldest, {**_VERSIONS, "error_code": Code.unsupported_version})

    def api_versions(self, _: KafkaConnection, _request: KafkaRequest) -> Values:
        return _VERSIONS


_VERSIONS: Values = {
    "api_keys": [
        {"api_key": key, "min_version": api.low, "max_version": api.high}
        for key, api in APIS.items()
    ]
}
