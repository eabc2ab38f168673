"""Listens for Kafka's clients."""

from penstock.config.schema import KafkaServerSettings as Settings
from penstock.metrics import Metrics
from penstock.monitor.audit import Record
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from penstock.wire.auth import Verifier
from penstock.wire.framed_server import FramedServer
from penstock.wire.kafka.connection import KafkaConnection
from penstock.wire.kafka.requests import KafkaRequests
from penstock.wire.request_memory import RequestMemory
from penstock.wire.tls import Certificate


class KafkaServer(FramedServer):
    name = "Kafka"

    def __init__(
        self,
        settings: Settings,
        topics: TopicStore,
        groups: Groups,
        metrics: Metrics,
        verifier: Verifier | None = None,
        certificate: Certificate | None = None,
        memory: RequestMemory | None = None,
    ) -> None:
        """`verifier`: connections must begin with SASL and a token it accepts; None: they need
        not.
        """
        super().__init__(settings, metrics, verifier, certificate, memory)
        self._requests = KafkaRequests(settings, topics, groups, metrics, verifier)
        self._nodes = topics.shared.nodes if topics.shared is not None else None

    async def start(self) -> None:
        await super().start()
        if self._nodes is not None:
            await self._nodes.start(
                *self._requests.node.reachable_at(self._settings.host, self.port)
            )

    def connect(self) -> KafkaConnection:
        return KafkaConnection(self, self._requests.run, self._requests.first_frame)

    def record_changes(self, record: Record) -> None:
        """Write changes to the audit log with `record`."""
        self._requests.access.record = record
