"""Topics for Kafka's clients: the listener, what each request does, and the groups they form."""

from penstock.wire.kafka.server import KafkaServer

__all__ = ["KafkaServer"]
