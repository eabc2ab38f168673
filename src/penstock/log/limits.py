"""What a topic keeps and takes, where that is its own and not the broker's: the file `limits`.

The file is the JSON of `TopicLimits`, with a checksum (`penstock.log.layout`).
"""

import msgspec

from penstock.log.layout import pack_checked, parse_checked


class TopicLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """None: as the broker's settings say. Retention of 0: it deletes nothing for this reason."""

    retention_age: float | None = None  # seconds
    retention_bytes: int | None = None
    max_record: int | None = None  # bytes of a record, or of a batch of Kafka's clients
    start: int = 0  # records before this offset were deleted by hand

    def pack(self) -> bytes:
        return pack_checked(msgspec.json.encode(self).decode())

    @classmethod
    def parse(cls, data: bytes) -> "TopicLimits | None":
        """None: the file is damaged."""
        text = parse_checked(data)
        try:
            return None if text is None else msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError:
            return None


KEEP_ALL = TopicLimits(retention_age=0.0, retention_bytes=0)  # when the file cannot be read
