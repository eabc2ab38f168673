"""The limits of one topic that override the broker's settings.

The file `limits` is the JSON of `TopicLimits` with a checksum (`penstock.log.layout`).
"""

import msgspec

from penstock.config.schema import TopicsSettings
from penstock.log.layout import pack_checked, parse_checked


class TopicLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """A topic's own limits. None means the broker's setting. Retention of 0 deletes nothing."""

    retention_age: float | None = None  # seconds
    retention_bytes: int | None = None
    max_record: int | None = None  # bytes of a record, or of a batch of Kafka's clients
    start: int = 0  # an operator has deleted the records before this offset

    def retention(self, settings: TopicsSettings) -> tuple[float, int]:
        """Return the limits of age (seconds) and size (bytes) in force; 0: unlimited."""
        return (
            settings.retention_age if self.retention_age is None else self.retention_age,
            settings.retention_bytes if self.retention_bytes is None else self.retention_bytes,
        )

    def pack(self) -> bytes:
        return pack_checked(msgspec.json.encode(self).decode())

    @classmethod
    def parse(cls, data: bytes) -> "TopicLimits | None":
        """Decode the file. Return None if it is damaged."""
        text = parse_checked(data)
        try:
            return None if text is None else msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError:
            return None


KEEP_ALL = TopicLimits(retention_age=0.0, retention_bytes=0)  # used if the file cannot be read
