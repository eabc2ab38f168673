"""Name the nodes that Kafka clients see: this broker, and the others on the same database. Also the
base class of the handlers.
"""

import socket
from typing import Any

from penstock.config.schema import KafkaServerSettings as Settings
from penstock.errors import ConfigError
from penstock.topics.groups import Groups
from penstock.topics.shared.log import SharedLog
from penstock.topics.shared.nodes import BEFORE_FIRST, SharedNodes
from penstock.topics.store import AnyLog, TopicStore
from penstock.wire.kafka.access import Access
from penstock.wire.kafka.connection import KafkaConnection

CLUSTER_ID = "penstock"


class Node:
    def __init__(self, settings: Settings, nodes: SharedNodes | None) -> None:
        self._advertised = _parse(settings.advertised) if settings.advertised else None
        self.nodes = nodes  # None: without a database no other broker is known

    @property
    def id(self) -> int:
        return self.nodes.own if self.nodes is not None else BEFORE_FIRST

    def reachable_at(self, host: str, port: int) -> tuple[str, int]:
        """Return the address to which other brokers send clients, when this one listens there."""
        if self._advertised is not None:
            return self._advertised
        return (socket.gethostname() if host in ("", "0.0.0.0", "::") else host), port

    def describe_all(self, connection: KafkaConnection) -> list[dict[str, Any]]:
        """Describe all brokers that live, this one first: at the configured address, or at the one
        that the client used.
        """
        others = self.nodes.others if self.nodes is not None else []
        address = self._advertised or connection.local_address
        return [_described(*node) for node in ((self.id, *address), *others)]

    def describe_one(self, connection: KafkaConnection, node_id: int) -> dict[str, Any]:
        """Describe the broker with this number, or this one if that is not known."""
        every = self.describe_all(connection)
        return next((one for one in every if one["node_id"] == node_id), every[0])

    def leader(self, topic: AnyLog) -> int:
        """Return this broker for the logs that it owns; shared ones are spread over all brokers."""
        if self.nodes is None or not isinstance(topic, SharedLog):
            return self.id
        return self.nodes.suggest(topic.name)


class KafkaHandlers:
    """The base of classes with a method for each request."""

    def __init__(
        self, settings: Settings, topics: TopicStore, groups: Groups, access: Access, node: Node
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._groups = groups
        self._access = access
        self._node = node


def _described(node_id: int, host: str, port: int) -> dict[str, Any]:
    return {"node_id": node_id, "broker_id": node_id, "host": host, "port": port}


def _parse(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"kafka_server.advertised is host:port, not {text!r}")
    return host.strip("[]"), int(port)
