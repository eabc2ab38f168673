"""The one node of the cluster that Kafka's clients see: this broker."""

from typing import Any

from penstock.config.schema import KafkaServerSettings as Settings
from penstock.errors import ConfigError
from penstock.wire.kafka.connection import KafkaConnection

NODE_ID = 1
CLUSTER_ID = "penstock"


class Node:
    def __init__(self, settings: Settings) -> None:
        self._advertised = _parse(settings.advertised) if settings.advertised else None

    def address(self, connection: KafkaConnection) -> tuple[str, int]:
        """Where the client is to connect to: what is configured, or where it has connected."""
        return self._advertised or connection.local_address

    def describe(self, connection: KafkaConnection) -> dict[str, Any]:
        """As the answers about the cluster have it."""
        host, port = self.address(connection)
        return {"node_id": NODE_ID, "broker_id": NODE_ID, "host": host, "port": port}


def _parse(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"kafka_server.advertised is host:port, not {text!r}")
    return host.strip("[]"), int(port)
