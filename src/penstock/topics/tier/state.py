"""The state of a broker beside its segments: groups, sinks, and the end of each topic."""

from typing import NamedTuple

import msgspec

from penstock.errors import Conflict, NotFound
from penstock.object_store import ObjectStore, Version, pack_document, parse_document
from penstock.topics.offsets_journal import CommittedOffset
from penstock.topics.tier.owner import Ownership

STATE = "state.json"


class TopicEnd(NamedTuple):
    name: str
    next_offset: int


class TierState(msgspec.Struct, kw_only=True):
    broker: str
    written_at: float  # seconds since 1970
    clean: bool = False  # the broker had stopped, so nothing was appended after this state
    topics: dict[str, TopicEnd] = {}  # by incarnation
    groups: list[CommittedOffset] = []
    sinks: bytes = b""  # the contents of `sinks.log`, see `penstock.topics.write_claims`

    def pack(self) -> bytes:
        return pack_document(self)

    @classmethod
    def parse(cls, data: bytes) -> "TierState":
        return parse_document(data, cls, STATE)


class StateObject:
    """The state in the store. The owner writes it when it has changed. Blocks."""

    def __init__(self, store: ObjectStore, ownership: Ownership) -> None:
        self._store = store
        self._ownership = ownership
        self._written = TierState(broker="", written_at=0.0)
        self._version: Version | None = None
        self._version_read = False

    def read_again(self) -> None:
        """Read the version again before the next write: another broker may have written it."""
        self._version_read = False

    def write(self, state: TierState) -> None:
        if msgspec.structs.replace(state, written_at=self._written.written_at) == self._written:
            return
        for attempt in (1, 2):
            if not self._version_read:
                self._ownership.check()
                try:
                    _, self._version = self._store.get(STATE)
                except NotFound:
                    self._version = None
                self._version_read = True
            try:
                self._version = self._store.put_if(STATE, state.pack(), self._version)
                break
            except Conflict:  # an answer of ours was lost, or there is another owner
                self._version_read = False
                if attempt == 2:
                    raise
        self._written = state
