"""The documents of a tier: `owner.json`, which a local file repeats, and `state.json`.

    <data_directory>/.penstock/topic-tier/owner.json
                            this broker's id, and the epoch that it last requested

The id is created once and is not part of a backup: a restored broker is another one. The epoch is
written to the local file before it is written to the tier. A tier whose owner has our id and a
higher epoch belongs to a copy of this data directory.

`state.json` contains what a broker needs besides its segments: groups, sinks, and the end of each
topic.
"""

import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.errors import ConfigError, Conflict, NotFound
from penstock.io.fs import DISK, Fs
from penstock.object_store import ObjectStore, Version, pack_document, parse_document
from penstock.protocol.ids import uuid7
from penstock.topics.offsets_journal import CommittedOffset

OWNER, STATE = "owner.json", "state.json"
NO_VERSION = Version('"0"', "1")  # a version that no object has ever had


class Fenced(Conflict):
    """The tier belongs to another broker, so this one does not write to it."""


class Owner(msgspec.Struct, kw_only=True):
    tier: str  # id of the tier, independent of its address
    broker: str
    epoch: int
    host: str = ""
    since: str = ""


class Ownership:
    """The ownership of one tier. Its methods block. `epoch` is 0 until the tier is ours."""

    def __init__(self, store: ObjectStore, directory: Path, fs: Fs = DISK) -> None:
        self._store = store
        self._path = directory / OWNER
        self._fs = fs
        self.broker = ""
        self.tier = ""
        self.epoch = 0

    def acquire(self) -> None:
        """Become the owner of a tier that has none, or that was ours. Raises Fenced otherwise."""
        local = self._read_local()
        remote, version = self._read_remote()
        if remote is None:
            if local.tier:
                raise Fenced(
                    f"{self._store.address} has no {OWNER}, but this broker has segments in a tier "
                    "that had one: is topics.tier the right address?"
                )
            if next(self._store.list("topics/"), None) is not None:
                raise Fenced(
                    f"{self._store.address} has topics but no {OWNER}: adopt them with an empty "
                    "data directory and topics.adopt, or run `penstock topic tier take-over`"
                )
            self._write(Owner(tier=uuid7().hex, broker=local.broker, epoch=1), None)
            return
        if remote.broker != local.broker:
            raise Fenced(_owned(self._store, remote))
        if remote.epoch > local.epoch:
            raise Fenced(
                f"{self._store.address} is written by a copy of this data directory, on "
                f"{remote.host} since {remote.since}: stop one of them, then run `penstock topic "
                "tier take-over` where the tier belongs"
            )
        self._write(Owner(tier=remote.tier, broker=local.broker, epoch=local.epoch + 1), version)

    def check(self) -> None:
        """Raise Fenced if another broker has become the owner."""
        remote, _ = self._read_remote()
        if remote is None or (remote.broker, remote.epoch) != (self.broker, self.epoch):
            self.epoch = 0
            raise Fenced(
                f"{self._store.address} has lost its {OWNER}"
                if remote is None
                else _owned(self._store, remote)
            )

    def take_over(self) -> Owner | None:
        """Become the owner in any case. Return the previous owner, if there was one."""
        local = self._read_local()
        remote, version = self._read_remote()
        tier, epoch = (remote.tier, remote.epoch) if remote is not None else (uuid7().hex, 0)
        self._write(Owner(tier=tier, broker=local.broker, epoch=epoch + 1), version)
        return remote

    def _write(self, owner: Owner, version: Version | None) -> None:
        owner.host, owner.since = socket.gethostname(), datetime.now(UTC).isoformat()
        # Store the id of a new tier only afterwards: if it cannot be created, it was not lost.
        unconfirmed = msgspec.structs.replace(owner, tier=owner.tier if version else "")
        self._fs.replace(self._path, pack_document(unconfirmed))
        data = pack_document(owner)
        self._store.put_if(OWNER, data, version)
        self._refuse_ignored_conditions(data)
        self._store.discard_interrupted()
        self._fs.replace(self._path, data)
        self.tier, self.broker, self.epoch = owner.tier, owner.broker, owner.epoch

    def _refuse_ignored_conditions(self, data: bytes) -> None:
        """Refuse a store that ignores conditions: two brokers could own it."""
        for version in (None, NO_VERSION):
            try:
                self._store.put_if(OWNER, data, version)
            except Conflict:
                continue
            raise ConfigError(
                f"{self._store.address} ignores the conditions of writes (If-None-Match, "
                "If-Match): two brokers could write to it, so it cannot be a tier"
            )

    def _read_local(self) -> Owner:
        self._fs.make_dir(self._path.parent)
        try:
            return parse_document(self._fs.read(self._path), Owner, OWNER)
        except FileNotFoundError:
            owner = Owner(tier="", broker=uuid7().hex, epoch=0)
            self._fs.replace(self._path, pack_document(owner))
            return owner

    def _read_remote(self) -> tuple[Owner | None, Version | None]:
        try:
            data, version = self._store.get(OWNER)
        except NotFound:
            return None, None
        return parse_document(data, Owner, OWNER), version


def _owned(store: ObjectStore, owner: Owner) -> str:
    return (
        f"{store.address} belongs to broker {owner.broker} on {owner.host} since {owner.since}: "
        "this broker does not write to it until `penstock topic tier take-over` is run here"
    )


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
