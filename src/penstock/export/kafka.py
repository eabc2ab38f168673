"""A Kafka cluster that routes read from and write to, with confluent-kafka (librdkafka).

The package is optional: `pip install 'penstock[kafka]'`.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from penstock.config.schema import Secret, key
from penstock.errors import ConfigError, InvalidRequest
from penstock.export.checks import UnusableCa
from penstock.net.tls import ca_text

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):\d{1,5}")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
# Errors of librdkafka that mean that this is not allowed.
DENIED_ERRORS = (
    "_AUTHENTICATION",
    "SASL_AUTHENTICATION_FAILED",
    "TOPIC_AUTHORIZATION_FAILED",
    "GROUP_AUTHORIZATION_FAILED",
    "CLUSTER_AUTHORIZATION_FAILED",
)


@dataclass(frozen=True, kw_only=True)
class KafkaCluster:
    """The address and credentials of a cluster."""

    brokers: str = key("", "addresses of brokers, host:port, several with commas")
    topic: str = key("", "topic there")
    username: str = key("", "user name for SASL; empty = no SASL")
    password: Secret = key("", "password for SASL; of a Penstock broker, a token")
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = key("PLAIN", "of SASL")
    tls: bool = key(False, "connect with TLS")
    ca: str = key("", "with tls: certificate authority to trust: a PEM file, or its text")

    def cluster_problems(self) -> list[str]:
        problems = [
            f"brokers contains {address.strip()[:80]!r}, which is not host:port"
            for address in self.brokers.split(",")
            if not _ADDRESS.fullmatch(address.strip())
        ]
        if not _TOPIC.fullmatch(self.topic):
            problems.append(f"topic {self.topic[:80]!r} is not a topic name in Kafka")
        if bool(self.username) != bool(self.password):
            problems.append("username and password are given together")
        if self.ca and not self.tls:
            problems.append("ca needs tls: true")
        return problems

    def settings(self) -> dict[str, Any]:
        """Return the settings of a librdkafka client."""
        protocol = ("SASL_" if self.username else "") + ("SSL" if self.tls else "PLAINTEXT")
        settings: dict[str, Any] = {
            "bootstrap.servers": self.brokers,
            "client.id": "penstock",
            "security.protocol": protocol,
            "log_level": 0,  # errors go to `error_cb`
        }
        if self.username:
            settings |= {
                "sasl.mechanism": self.mechanism,
                "sasl.username": self.username,
                "sasl.password": self.password,
            }
        try:
            authority = ca_text(self.ca or None) if self.tls else None
        except InvalidRequest as error:
            raise UnusableCa(str(error)) from error
        if authority is not None:
            settings["ssl.ca.pem"] = authority
        return settings


def confluent_kafka() -> Any:
    """Return the library, which only these routes need."""
    try:
        import confluent_kafka
    except ImportError:
        raise ConfigError(
            "a route from or to Kafka needs the package confluent-kafka: "
            "pip install 'penstock[kafka]'"
        ) from None
    return confluent_kafka
