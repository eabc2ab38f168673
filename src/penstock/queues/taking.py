"""Group takes for `take`, and read what each of them got.

A take asks for messages for a group of a queue, under one lease. The scan for cursors that are due
begins at a hint. Cursors that were due long ago and are not any more leave dead index entries,
which vacuum cannot remove while something holds an old snapshot. So a scan begins shortly before
the last cursor that was due. At most once a second, and for at most a twentieth of the time, it
goes through all cursors.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from penstock.database.batching import SLICE
from penstock.protocol.ids import uuid7
from penstock.protocol.message_ids import lease_of
from penstock.queues.calls import Row, TakeArguments
from penstock.queues.catalog import QueueCatalog, remember
from penstock.queues.settling import AckRun, LeaseMemory

SLACK = timedelta(seconds=0.25)
FULL_SCAN_SECONDS, MAX_FULL_SCAN_SECONDS, FULL_SCAN_SHARE = 1.0, 10.0, 20


@dataclass(slots=True)
class Take:
    """Messages that a group of a queue wants under one lease."""

    queue: str
    group: str
    group_id: int
    partition: int | None  # the one that it wants; None: any
    batch: int  # how many messages at most
    partitions: int  # from how many at most
    holder: int | None
    from_any_partition: bool = field(init=False)  # and from one only
    lease: UUID = field(init=False)
    lease_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.from_any_partition = self.partition is None and self.partitions == 1
        self.renew_lease()

    def renew_lease(self) -> None:
        """Get a lease, another one each time."""
        self.lease = uuid7() if self.holder is None else lease_of(self.holder)
        self.lease_id = str(self.lease)


@dataclass(slots=True)
class Taken:
    """What a take got. Without rows `outcome` says why, and `wait` when to poll again."""

    take: Take
    rows: Sequence[Row]  # of type `taken`, with messages
    outcome: str
    wait: float | None = None


@dataclass(slots=True)
class DueHint:
    """Where the scan for due cursors of a group begins."""

    since: datetime | None = None  # no cursor that was due before is due now
    full_scan_at: float = 0.0  # (monotonic)


class DueHints:
    """The hints of all groups, of limited number."""

    def __init__(self) -> None:
        self._hints: dict[int, DueHint] = {}

    def since(self, group: int, now: float) -> datetime | None:
        """Return from which due time on to scan the cursors of a group; None: all of them."""
        hint = self._hints.get(group)
        if hint is None:
            hint = DueHint()
            remember(self._hints, group, hint)
        if now < hint.full_scan_at:
            return hint.since
        hint.full_scan_at = now + FULL_SCAN_SECONDS
        return None

    def scanned(self, group: int, since: datetime | None, due_at: datetime) -> None:
        """Begin later: a scan from `since` came upon a cursor that had become due at `due_at`."""
        hint = self._hints.get(group)
        if hint is not None:
            floor = due_at - SLACK
            hint.since = floor if since is None else max(floor, since)

    def postpone_full_scan(self, group: int, until: float) -> None:
        hint = self._hints.get(group)
        if hint is not None:
            hint.full_scan_at = until


class TakeBatch:
    """The takes of one call of `take`, and what each of them got."""

    def __init__(self, takes: list[Take], hints: DueHints, memory: LeaseMemory) -> None:
        self.takes = sorted(takes, key=lambda take: (not take.from_any_partition, take.group_id))
        self._hints, self._memory = hints, memory
        self._began = 0.0  # (monotonic)
        self._since: dict[int, datetime | None] = {}  # by group

    def arguments(self, max_bytes: int, *, hand_over: bool = False) -> TakeArguments:
        """Return the arguments of `take`. The call begins now."""
        takes, self._began = self.takes, time.monotonic()
        groups = {take.group_id for take in takes}
        self._since = {group: self._hints.since(group, self._began) for group in groups}
        simple = all(take.from_any_partition for take in takes)
        return TakeArguments(
            groups=[take.group_id for take in takes],
            batches=[take.batch for take in takes],
            leases=[take.lease for take in takes],
            since=[self._since[take.group_id] for take in takes],
            partitions=None if simple else [take.partition for take in takes],
            spans=None if simple else [take.partitions for take in takes],
            max_bytes=max_bytes,
            hand_over=hand_over,
        )

    def results(self, rows: list[Row], catalog: QueueCatalog) -> dict[int, Taken]:
        """Return what each take got, by its identity. Its rows are together, and the last one has
        an outcome. Leases that can be completed as a whole are remembered.
        """
        cost = FULL_SCAN_SHARE * (time.monotonic() - self._began)
        if cost > FULL_SCAN_SECONDS:
            for group, since in self._since.items():
                if since is None:
                    until = self._began + min(cost, MAX_FULL_SCAN_SECONDS)
                    self._hints.postpone_full_scan(group, until)
        results: dict[int, Taken] = {}
        begin = 0
        for end, row in enumerate(rows, 1):
            if row["outcome"] is None:
                continue
            take = self.takes[row["request"] - 1]
            messages = [one for one in rows[begin:end] if one["partition_id"] is not None]
            results[id(take)] = Taken(take, messages, row["outcome"], row["wait"])
            begin = end
            if take.partition is None and row["due_at"] is not None:
                self._hints.scanned(take.group_id, self._since[take.group_id], row["due_at"])
            if row["version"] is not None and len(row["seqs"]) <= SLICE:
                partition = row["partition_id"]
                lease = AckRun(
                    partition,
                    take.group,
                    take.lease,
                    row["transactions"],
                    group_id=take.group_id,
                    version=row["version"],
                    last=row["seqs"][-1],
                    times=row["times"],
                    queue=take.queue,
                    partition_name=row["partition"],
                    partition_id=catalog.partition_uuid(partition),
                )
                self._memory.add(take.lease_id, lease)
        return results
