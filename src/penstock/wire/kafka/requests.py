"""Runs a client's requests: finds the method that an API key stands for, and asks who is there.

A method gets the connection and the request, and returns the fields of the answer, or an awaitable
of them. It never raises for what a client did: every answer of Kafka has a place for an error.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from kio.schema.errors import ErrorCode as Code

from penstock.config.schema import KafkaServerSettings as Settings
from penstock.metrics import Metrics
from penstock.protocol.status import UnknownCommand
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from penstock.wire.auth import Verifier
from penstock.wire.kafka.access import Access
from penstock.wire.kafka.apis import APIS, BEFORE_AUTHENTICATION
from penstock.wire.kafka.codec import API_VERSIONS, KafkaHead, Values, read_request
from penstock.wire.kafka.configs import ConfigRequests
from penstock.wire.kafka.connection import KafkaConnection, KafkaRequest
from penstock.wire.kafka.group_requests import GroupRequests
from penstock.wire.kafka.log_requests import LogRequests
from penstock.wire.kafka.node import Node
from penstock.wire.kafka.sasl import MAX_FIRST_FRAME, SaslRequests
from penstock.wire.kafka.topic_requests import TopicRequests

Answer = Values | Awaitable[Values] | None
Handler = Callable[[KafkaConnection, KafkaRequest], Answer]


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
        self.max_frame = settings.max_frame
        self.first_frame = settings.max_frame if verifier is None else MAX_FIRST_FRAME
        handlers: list[Any] = [
            self,
            LogRequests(topics, self.access),
            TopicRequests(settings, topics, self.access, node),
            ConfigRequests(topics, self.access, node),
            GroupRequests(topics, groups, self.access, node),
            SaslRequests(self.access, settings.max_frame),
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
