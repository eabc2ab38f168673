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

    source: int  # which of the pop's requests it is for
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


@dataclass(slots=True)
class TakeBatch:
    """The takes of one call of `take`, and what each of them got."""

    takes: list[Take]  # in the order in which they are sent
    hints: dict[int, DueHint]  # of all groups; of limited number
    memory: LeaseMemory
    began: float = field(init=False, default=0.0)  # the call (monotonic)
    since: dict[int, datetime | None] = field(init=False, default_factory=dict)  # by group

    def arguments(self, max_bytes: int, *, hand_off: bool = False) -> TakeArguments:
        """Return the arguments of `take`. The call begins now."""
        self.began = time.monotonic()
        self.takes.sort(key=lambda take: (not take.from_any_partition, take.group_id))
        for group in {take.group_id for take in self.takes}:
            hint = self.hints.get(group)
            if hint is None:
                hint = DueHint()
                remember(self.hints, group, hint)
            if self.began < hint.full_scan_at:
                self.since[group] = hint.since
            else:
                self.since[group] = None
                hint.full_scan_at = self.began + FULL_SCAN_SECONDS
        simple = all(take.from_any_partition for take in self.takes)
        return TakeArguments(
            groups=[take.group_id for take in self.takes],
            batches=[take.batch for take in self.takes],
            leases=[take.lease for take in self.takes],
            since=[self.since[take.group_id] for take in self.takes],
            partitions=None if simple else [take.partition for take in self.takes],
            spans=None if simple else [take.partitions for take in self.takes],
            max_bytes=max_bytes,
            hand_off=hand_off,
        )

    def results(self, rows: list[Row], catalog: QueueCatalog) -> dict[int, Taken]:
        """Return what each take got, by its identity. Its rows are together, and the last one has
        an outcome. Leases that can be completed as a whole are remembered.
        """
        cost = FULL_SCAN_SHARE * (time.monotonic() - self.began)
        if cost > FULL_SCAN_SECONDS:
            for group, since in self.since.items():
                if since is None and group in self.hints:
                    pause = min(cost, MAX_FULL_SCAN_SECONDS)
                    self.hints[group].full_scan_at = self.began + pause
        results: dict[int, Taken] = {}
        begin = 0
        for end, row in enumerate(rows, 1):
            if row["outcome"] is None:
                continue
            take = self.takes[row["request"] - 1]
            messages = [one for one in rows[begin:end] if one["partition_id"] is not None]
            results[id(take)] = Taken(take, messages, row["outcome"], row["wait"])
            begin = end
            hint = self.hints.get(take.group_id)
            if take.partition is None and row["due_at"] is not None and hint is not None:
                floor, since = row["due_at"] - SLACK, self.since[take.group_id]
                hint.since = floor if since is None else max(floor, since)
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
                self.memory.add(take.lease_id, lease)
        return results
