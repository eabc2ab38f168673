"""Groups whose members divide partitions among themselves, as Kafka's clients do.

The coordinator is independent of topics. Members join with the protocols that they support. When
all have joined, a generation begins, with one protocol and one leader. The leader gets the metadata
of all members, and sends the assignment, which the others receive when they sync.

    EMPTY        no members
    PREPARING    a rebalance: members join again. It ends when all have joined, or after the longest
                 rebalance timeout of a member; members that have not joined by then are removed
    COMPLETING   a generation has begun; the leader's assignment is missing. A leader that does not
                 send it within the longest rebalance timeout is removed
    STABLE       all members work and send heartbeats

A member is removed if it sends nothing during its session timeout. While its join or sync waits for
others, it counts as alive. A static member (with an instance id) that returns during its session
gets a new id without a rebalance, and its former id is fenced.

All state is in memory: after a restart members are unknown and join again. Committed offsets are in
`penstock.topics.groups`.
"""

import asyncio
import secrets
import time
from collections import Counter as Votes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeVar

from penstock.errors import Conflict
from penstock.metrics import Metrics

T = TypeVar("T")

MIN_SESSION, MAX_SESSION = 1.0, 1800.0  # seconds
MAX_LATE = 0.5  # seconds that a timer may be late before the broker has stood still
MAX_REBALANCE = 1800.0  # seconds that a member may take to join again
FIRST_JOINS = 0.25  # seconds that an empty group waits for more members
MAX_MEMBERS = 1000  # of a group
MAX_METADATA = 1 << 20  # bytes of a member's protocols, or of its assignment


class GroupState(Enum):
    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


class Refusal(Enum):
    """Why a member is refused, by Kafka's names."""

    ILLEGAL_GENERATION = "the generation is over"
    INCONSISTENT_GROUP_PROTOCOL = "no protocol is common to all members"
    UNKNOWN_MEMBER_ID = "the group has no such member"
    INVALID_SESSION_TIMEOUT = f"a session timeout is {MIN_SESSION} to {MAX_SESSION} seconds"
    REBALANCE_IN_PROGRESS = "the group rebalances"
    MEMBER_ID_REQUIRED = "join again with the id in this answer"
    GROUP_MAX_SIZE_REACHED = f"a group has at most {MAX_MEMBERS} members"
    FENCED_INSTANCE_ID = "another member has this instance id"
    INVALID_REQUEST = "the request is too large"


class MemberRefused(Conflict):
    def __init__(self, refusal: Refusal, member: str = "") -> None:
        super().__init__(refusal.value)
        self.refusal = refusal
        self.member = member  # the id to join with, for MEMBER_ID_REQUIRED


class Joining(NamedTuple):
    """A member's request to join."""

    member: str  # "": it has no id yet
    instance: str | None
    client: str
    host: str
    session_timeout: float
    rebalance_timeout: float
    kind: str  # of protocols: "consumer"
    protocols: Mapping[str, bytes]  # metadata by name, in the order of preference
    needs_id: bool  # it must get its id before it joins


class Joined(NamedTuple):
    """A generation as one member sees it."""

    generation: int
    kind: str
    protocol: str
    leader: str
    member: str
    members: list[tuple[str, str | None, bytes]]  # id, instance, metadata; for the leader only


@dataclass(slots=True)
class Member:
    id: str
    instance: str | None
    client: str = ""
    host: str = ""
    session_timeout: float = 0.0
    rebalance_timeout: float = 0.0
    protocols: Mapping[str, bytes] = field(default_factory=dict)
    deadline: float = 0.0  # of its session, on the groups' clock; ignored while it waits
    assignment: bytes = b""
    join: "asyncio.Future[Joined] | None" = None
    sync: "asyncio.Future[bytes] | None" = None

    @property
    def waits(self) -> bool:
        return self.join is not None or self.sync is not None


@dataclass(slots=True)
class AssignedGroup:
    name: str
    state: GroupState = GroupState.EMPTY
    generation: int = 0
    kind: str = ""  # of protocols
    protocol: str = ""
    leader: str = ""
    members: dict[str, Member] = field(default_factory=dict)
    pending: dict[str, float] = field(default_factory=dict)  # assigned ids, and when they expire
    deadline: float = 0.0  # PREPARING: for members to join; COMPLETING: for the leader to assign
    not_before: float = 0.0  # when a rebalance may end at the earliest
    timer: asyncio.TimerHandle | None = None

    def static(self, instance: str) -> Member | None:
        return next((one for one in self.members.values() if one.instance == instance), None)

    def add(self, member: str, joining: Joining) -> Member:
        added = self.members[member] = Member(member, joining.instance)
        return added

    @property
    def rebalance_end(self) -> float:
        """Return when a rebalance ends, if nothing changes until then."""
        everyone = all(one.join is not None for one in self.members.values())
        if everyone and not self.pending:
            return self.not_before
        return max(self.deadline, self.not_before)

    @property
    def slowest(self) -> float:
        """Return the longest rebalance timeout of a member."""
        return max((one.rebalance_timeout for one in self.members.values()), default=0.0)

    def joined(self, member: Member, leader: str | None = None) -> Joined:
        members = (
            [(one.id, one.instance, one.protocols[self.protocol]) for one in self.members.values()]
            if member.id == self.leader and leader is None
            else []
        )
        return Joined(
            self.generation, self.kind, self.protocol, leader or self.leader, member.id, members
        )


class AssignedGroups:
    """The groups of Kafka's clients. Runs on the event loop. `is_leased` returns whether members of
    a group lease ranges; such a group cannot be joined.
    """

    def __init__(
        self,
        is_leased: Callable[[str], bool],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_leased = is_leased
        self._clock = clock
        self._groups: dict[str, AssignedGroup] = {}
        self._rebalances = metrics.counter(
            "penstock_kafka_rebalances_total", "Rebalances of groups of Kafka clients", "group"
        )
        self._expired = metrics.counter(
            "penstock_kafka_members_expired_total",
            "Members of Kafka groups that were removed because they sent no heartbeat",
            "group",
        )
        metrics.gauge(
            "penstock_kafka_group_members",
            "Members of groups of Kafka clients",
            "group",
            read=lambda: {(one.name,): len(one.members) for one in self._groups.values()},
        )

    def get(self, name: str) -> AssignedGroup | None:
        """Return the group if it has members, or expects some."""
        return self._groups.get(name)

    def names(self) -> list[str]:
        return list(self._groups)

    def has_members(self, name: str) -> bool:
        group = self._groups.get(name)
        return group is not None and bool(group.members)

    def drop(self, name: str) -> None:
        """Refuse waiting requests of this group: another broker coordinates it now."""
        group = self._groups.pop(name, None)
        if group is not None:
            _stop_timer(group)
            for member in group.members.values():
                _refuse(member, Refusal.REBALANCE_IN_PROGRESS)

    def stop(self) -> None:
        """Refuse waiting requests. The members join again, here or at another broker."""
        for name in self.names():
            self.drop(name)

    # Requests of members

    async def join(self, name: str, joining: Joining) -> Joined:
        """Join the group's next generation, or the present one if nothing changes."""
        if not MIN_SESSION <= joining.session_timeout <= MAX_SESSION:
            raise MemberRefused(Refusal.INVALID_SESSION_TIMEOUT)
        if sum(map(len, joining.protocols.values())) > MAX_METADATA:
            raise MemberRefused(Refusal.INVALID_REQUEST)
        group = self._groups.get(name)
        if group is None:
            if joining.member:
                raise MemberRefused(Refusal.UNKNOWN_MEMBER_ID)
            group = AssignedGroup(name)
        self._check_protocols(group, joining)
        self._groups[name] = group
        member = group.members.get(joining.member)
        if not joining.member:
            former = group.static(joining.instance) if joining.instance is not None else None
            if former is not None:
                return await self._replace(group, former, joining)
            member = self._add_new(group, joining)
        elif member is None:
            member = self._add_known(group, joining)
        elif joining.instance != member.instance:
            raise MemberRefused(Refusal.FENCED_INSTANCE_ID)
        same = member.protocols == joining.protocols
        self._update(member, joining)
        if group.state is GroupState.COMPLETING and same:
            return group.joined(member)
        if group.state is GroupState.STABLE and same and member.id != group.leader:
            return group.joined(member)
        return await self._wait_for_generation(group, member)

    async def sync(
        self, name: str, who: "Membership", assignments: Mapping[str, bytes]
    ) -> tuple[str, str, bytes]:
        """Return the kind and name of the protocol, and the member's assignment."""
        group, member = self._find(name, who)
        if group.state is GroupState.PREPARING:
            raise MemberRefused(Refusal.REBALANCE_IN_PROGRESS)
        if sum(map(len, assignments.values())) > MAX_METADATA * max(1, len(group.members)):
            raise MemberRefused(Refusal.INVALID_REQUEST)
        self._touch(group, member)
        if group.state is GroupState.COMPLETING:
            if member.id != group.leader:
                _refuse(
                    member, Refusal.UNKNOWN_MEMBER_ID
                )  # replaces an earlier request of the member
                waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
                member.sync = waiting
                try:
                    await waiting
                finally:
                    self._stopped_waiting(group, member, waiting)
            else:
                self._assign(group, assignments)
        return group.kind, group.protocol, member.assignment

    def heartbeat(self, name: str, who: "Membership") -> None:
        group, member = self._find(name, who)
        self._touch(group, member)
        if group.state is GroupState.PREPARING:
            raise MemberRefused(Refusal.REBALANCE_IN_PROGRESS)

    def leave(self, name: str, member_id: str, instance: str | None) -> None:
        group = self._groups.get(name)
        if group is None:
            raise MemberRefused(Refusal.UNKNOWN_MEMBER_ID)
        if group.pending.pop(member_id, None) is not None:
            self._go_on(group)
            return
        member = group.members.get(member_id)
        if instance is not None:
            member = group.static(instance)
            if member is not None and member_id not in ("", member.id):
                raise MemberRefused(Refusal.FENCED_INSTANCE_ID)
        if member is None:
            raise MemberRefused(Refusal.UNKNOWN_MEMBER_ID)
        self._remove(group, [member])

    def check_commit(self, name: str, who: "Membership") -> None:
        """Refuse a commit of a client that is not a member of the present generation."""
        group = self._groups.get(name)
        if who.generation < 0 and not who.member:
            if group is not None and group.members:
                raise MemberRefused(Refusal.UNKNOWN_MEMBER_ID)
            return
        group, member = self._find(name, who)
        self._touch(group, member)
        if group.state is GroupState.COMPLETING:
            raise MemberRefused(Refusal.REBALANCE_IN_PROGRESS)

    # Members

    def _check_protocols(self, group: AssignedGroup, joining: Joining) -> None:
        refused = MemberRefused(Refusal.INCONSISTENT_GROUP_PROTOCOL)
        if not joining.protocols or not joining.kind or self._is_leased(group.name):
            raise refused
        others = [one for one in group.members.values() if one.id != joining.member]
        if others and (
            joining.kind != group.kind
            or not set(joining.protocols).intersection(*(one.protocols for one in others))
        ):
            raise refused
        group.kind = joining.kind

    def _add_new(self, group: AssignedGroup, joining: Joining) -> Member:
        if len(group.members) + len(group.pending) >= MAX_MEMBERS:
            raise MemberRefused(Refusal.GROUP_MAX_SIZE_REACHED)
        given = f"{joining.instance or joining.client or 'member'}-{secrets.token_hex(16)}"
        if joining.needs_id and joining.instance is None:
            group.pending[given] = self._clock() + joining.session_timeout
            self._watch(group)
            raise MemberRefused(Refusal.MEMBER_ID_REQUIRED, given)
        return group.add(given, joining)

    def _add_known(self, group: AssignedGroup, joining: Joining) -> Member:
        if joining.instance is not None and group.static(joining.instance) is not None:
            raise MemberRefused(Refusal.FENCED_INSTANCE_ID)
        if group.pending.pop(joining.member, None) is None:
            raise MemberRefused(Refusal.UNKNOWN_MEMBER_ID)
        return group.add(joining.member, joining)

    def _update(self, member: Member, joining: Joining) -> None:
        member.client, member.host = joining.client, joining.host
        member.session_timeout = joining.session_timeout
        member.rebalance_timeout = min(joining.rebalance_timeout, MAX_REBALANCE)
        member.protocols = dict(joining.protocols)
        member.deadline = self._clock() + joining.session_timeout

    async def _replace(self, group: AssignedGroup, former: Member, joining: Joining) -> Joined:
        """Give a static member that has returned a new id, and fence its former id."""
        _refuse(former, Refusal.FENCED_INSTANCE_ID)
        given = f"{joining.instance}-{secrets.token_hex(16)}"
        same = former.protocols == joining.protocols
        # Keep its place: leaders assign by the order of members.
        former_id, former.id = former.id, given
        group.members = {one.id: one for one in group.members.values()}
        self._update(former, joining)
        was_leader = group.leader == former_id
        if was_leader:
            group.leader = given
        if group.state is GroupState.STABLE and same:
            self._watch(group)
            # A former leader has nothing to assign, so its answer names another leader.
            return group.joined(former, leader=former_id if was_leader else group.leader)
        return await self._wait_for_generation(group, former)

    def _find(self, name: str, who: "Membership") -> tuple[AssignedGroup, Member]:
        group = self._groups.get(name)
        if group is None:
            raise MemberRefused(Refusal.UNKNOWN_MEMBER_ID)
        if who.instance is not None:
            static = group.static(who.instance)
            if static is None:
                raise MemberRefused(Refusal.UNKNOWN_MEMBER_ID)
            if static.id != who.member:
                raise MemberRefused(Refusal.FENCED_INSTANCE_ID)
        member = group.members.get(who.member)
        if member is None:
            raise MemberRefused(Refusal.UNKNOWN_MEMBER_ID)
        if who.generation != group.generation:
            raise MemberRefused(Refusal.ILLEGAL_GENERATION)
        return group, member

    def _touch(self, group: AssignedGroup, member: Member) -> None:
        member.deadline = self._clock() + member.session_timeout
        if group.timer is None:
            self._watch(group)

    def _remove(self, group: AssignedGroup, members: Sequence[Member]) -> None:
        for member in members:
            del group.members[member.id]
            _refuse(member, Refusal.UNKNOWN_MEMBER_ID)
        if group.state in (GroupState.STABLE, GroupState.COMPLETING):
            self._prepare(group)
        self._go_on(group)

    # Rebalances

    async def _wait_for_generation(self, group: AssignedGroup, member: Member) -> Joined:
        if member.join is not None:  # an earlier request, on a connection that may be lost
            _refuse(member, Refusal.UNKNOWN_MEMBER_ID)
        waiting: asyncio.Future[Joined] = asyncio.get_running_loop().create_future()
        member.join = waiting
        if group.state is GroupState.EMPTY:
            group.not_before = self._clock() + FIRST_JOINS
        if group.state is not GroupState.PREPARING:
            self._prepare(group)
        self._go_on(group)
        try:
            return await waiting
        finally:
            self._stopped_waiting(group, member, waiting)

    def _stopped_waiting(
        self, group: AssignedGroup, member: Member, waiting: "asyncio.Future[T]"
    ) -> None:
        """End a wait, with an answer or because the client disconnected. Restart the session."""
        if member.join is waiting:
            member.join = None
        if member.sync is waiting:
            member.sync = None
        member.deadline = self._clock() + member.session_timeout
        self._watch(group)

    def _prepare(self, group: AssignedGroup) -> None:
        """Begin a rebalance: all members must join again."""
        group.state = GroupState.PREPARING
        group.deadline = self._clock() + group.slowest
        for member in group.members.values():
            if member.sync is not None and not member.sync.done():
                member.sync.set_exception(MemberRefused(Refusal.REBALANCE_IN_PROGRESS))
                member.sync = None

    def _go_on(self, group: AssignedGroup) -> None:
        """End the rebalance if possible, and set the timer for the next event."""
        if group.state is GroupState.PREPARING and self._clock() >= group.rebalance_end:
            self._begin_generation(group)
        if not (group.members or group.pending):
            self._groups.pop(group.name, None)
        self._watch(group)

    def _begin_generation(self, group: AssignedGroup) -> None:
        here = [one.id for one in group.members.values() if one.join is not None]
        for member in list(group.members.values()):
            # A static member keeps its place while its session lasts.
            if member.join is None and member.instance is None:
                del group.members[member.id]
                self._expired.add(1, group.name)
        if group.members and not here:
            group.deadline = self._clock() + MAX_REBALANCE  # their sessions end before that
            return
        group.generation += 1
        self._rebalances.add(1, group.name)
        if not group.members:
            group.state, group.leader, group.protocol = GroupState.EMPTY, "", ""
            return
        group.state = GroupState.COMPLETING
        group.deadline = self._clock() + group.slowest
        if group.leader not in here:
            group.leader = here[0]
        offered = [one.protocols for one in group.members.values()]
        common = set(offered[0]).intersection(*offered)
        votes = Votes(next(name for name in one if name in common) for one in offered)
        group.protocol = votes.most_common(1)[0][0]
        for member in group.members.values():
            member.assignment = b""
            member.deadline = self._clock() + member.session_timeout
            if member.join is not None and not member.join.done():
                member.join.set_result(group.joined(member))
            member.join = None

    def _assign(self, group: AssignedGroup, assignments: Mapping[str, bytes]) -> None:
        group.state = GroupState.STABLE
        for member in group.members.values():
            member.assignment = assignments.get(member.id, b"")
            if member.sync is not None and not member.sync.done():
                member.sync.set_result(member.assignment)
            member.sync = None

    # Time

    def _watch(self, group: AssignedGroup) -> None:
        """Set the group's timer to the next deadline."""
        _stop_timer(group)
        if self._groups.get(group.name) is not group:
            return
        moments = [one.deadline for one in group.members.values() if not one.waits]
        moments += group.pending.values()
        if group.state is GroupState.PREPARING:
            moments.append(group.rebalance_end)
        elif group.state is GroupState.COMPLETING:
            moments.append(group.deadline)
        if moments:
            self._check_at(group, min(moments))

    def _check_at(self, group: AssignedGroup, due: float) -> None:
        delay = max(0.0, due - self._clock())
        group.timer = asyncio.get_running_loop().call_later(delay, self._check, group, due)

    def _check(self, group: AssignedGroup, due: float) -> None:
        group.timer = None
        now = self._clock()
        if now - due > MAX_LATE:  # first read what members have sent while the broker stood still
            self._check_at(group, now + MAX_LATE)
            return
        for given in [one for one, until in group.pending.items() if until <= now]:
            del group.pending[given]
        late = (
            group.leader if group.state is GroupState.COMPLETING and group.deadline <= now else ""
        )
        silent = [
            one
            for one in group.members.values()
            if one.id == late or (not one.waits and one.deadline <= now)
        ]
        if silent:
            self._expired.add(len(silent), group.name)
            self._remove(group, silent)
        else:
            self._go_on(group)


class Membership(NamedTuple):
    """The member that a request claims to come from."""

    member: str
    generation: int
    instance: str | None = None


def _refuse(member: Member, refusal: Refusal) -> None:
    """End the member's waiting requests with an error."""
    for waiting in (member.join, member.sync):
        if waiting is not None and not waiting.done():
            waiting.set_exception(MemberRefused(refusal))
    member.join = member.sync = None


def _stop_timer(group: AssignedGroup) -> None:
    if group.timer is not None:
        group.timer.cancel()
        group.timer = None
