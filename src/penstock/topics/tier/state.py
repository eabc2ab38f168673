"""What a broker is made of beside its segments: groups, sinks, and how far each topic had come."""

from typing import NamedTuple

import msgspec

from penstock.object_store import pack_document, parse_document
from penstock.topics.offsets_journal import CommittedOffset

STATE = "state.json"


class TopicEnd(NamedTuple):
    name: str
    next_offset: int


class State(msgspec.Struct, kw_only=True):
    broker: str
    written_at: float  # seconds since 1970
    clean: bool = False  # the broker had stopped: nothing was appended after it
    topics: dict[str, TopicEnd] = {}  # by incarnation
    groups: list[CommittedOffset] = []
    sinks: bytes = b""  # the contents of `sinks.log`, see `penstock.topics.write_claims`

    def pack(self) -> bytes:
        return pack_document(self)

    @classmethod
    def parse(cls, data: bytes) -> "State":
        return parse_document(data, cls, STATE)
