"""The coordinator of groups of Kafka's clients: members that come, go, freeze, come twice and lie."""

import asyncio
import random
import struct
import time
from typing import Any

import pytest

from penstock.metrics import Metrics
from penstock.protocol.partitions import assigned_partitions
from penstock.topics.assigned_groups import (
    AssignedGroups,
    GroupState,
    Joined,
    Joining,
    MemberRefused,
    Membership,
    Refusal,
)
from tests.support.wait import eventually


def groups(**options: Any) -> AssignedGroups:
    return AssignedGroups(lambda group: group == "leased", Metrics(), **options)


def joining(member: str = "", **changes: Any) -> Joining:
    given = Joining(
        member, None, "client", "127.0.0.1", 10.0, 10.0, "consumer", {"range": b"m"}, False
    )
    return given._replace(**changes)


async def refused(awaitable: Any) -> Refusal:
    with pytest.raises(MemberRefused) as caught:
        await awaitable
    return caught.value.refusal


def refusal_of(call: Any, *args: Any) -> Refusal:
    with pytest.raises(MemberRefused) as caught:
        call(*args)
    return caught.value.refusal


def who(joined: Joined, **changes: Any) -> Membership:
    return Membership(joined.member, joined.generation)._replace(**changes)


async def two_members(all_groups: AssignedGroups, **changes: Any) -> tuple[Joined, Joined]:
    """The leader first; the group is stable."""
    first, second = await asyncio.gather(
        all_groups.join("g", joining(**changes)), all_groups.join("g", joining(**changes))
    )
    leader, follower = (first, second) if first.members else (second, first)
    assignments = {leader.member: b"L", follower.member: b"F"}
    await asyncio.gather(
        all_groups.sync("g", who(follower), {}), all_groups.sync("g", who(leader), assignments)
    )
    return leader, follower


async def test_members_that_join_together_get_one_generation_and_the_leaders_assignment():
    all_groups = groups()
    leader, follower = await two_members(all_groups)
    assert leader.generation == follower.generation == 1
    assert leader.leader == follower.leader == leader.member
    assert {one[0] for one in leader.members} == {leader.member, follower.member}
    assert follower.members == []
    assert await all_groups.sync("g", who(follower), {}) == ("consumer", "range", b"F")
    all_groups.heartbeat("g", who(leader))
    all_groups.stop()


async def test_a_rebalance_ends_also_when_its_timer_is_a_little_early():
    """The clock of a timer may be ahead of the one that is asked, by less than a millisecond."""
    late = AssignedGroups(
        lambda _: False, Metrics(), lambda: time.monotonic() - 0.002 * random.random()
    )
    async with asyncio.timeout(60):
        joins = [late.join(f"g{number}", joining()) for number in range(200)]
        assert {one.generation for one in await asyncio.gather(*joins)} == {1}
    late.stop()


async def test_a_member_that_vanishes_is_removed_after_its_session():
    all_groups = groups()
    leader, follower = await two_members(all_groups, session_timeout=1.0)

    async def beat() -> bool:
        try:
            all_groups.heartbeat("g", who(leader))
        except MemberRefused as error:
            return error.refusal is Refusal.REBALANCE_IN_PROGRESS
        return False

    await eventually(beat)
    again = await all_groups.join("g", joining(leader.member, session_timeout=1.0))
    assert again.generation == 2
    assert [one[0] for one in again.members] == [leader.member]
    assert refusal_of(all_groups.heartbeat, "g", who(follower)) is Refusal.UNKNOWN_MEMBER_ID
    all_groups.stop()


async def test_a_broker_that_stood_still_reads_heartbeats_before_it_removes_members():
    all_groups = groups()
    leader, follower = await two_members(all_groups, session_timeout=1.0)
    time.sleep(2)  # noqa: ASYNC251 - the event loop stands still
    for _ in range(3):  # its timers are over, and then it reads
        await asyncio.sleep(0.01)
    all_groups.heartbeat("g", who(leader))
    all_groups.heartbeat("g", who(follower))
    group = all_groups.get("g")
    assert group is not None
    assert group.state is GroupState.STABLE
    await eventually(lambda: all_groups.get("g") is None)  # nothing more is heard of them
    all_groups.stop()


async def test_a_member_that_freezes_in_a_rebalance_stops_the_others_no_longer_than_its_timeout():
    all_groups = groups()
    leader, follower = await two_members(all_groups, session_timeout=60.0, rebalance_timeout=0.5)
    third = asyncio.create_task(all_groups.join("g", joining()))
    back = await all_groups.join("g", joining(leader.member))
    joined = await third
    assert back.generation == joined.generation == 2
    assert {one[0] for one in back.members} == {leader.member, joined.member}
    assert refusal_of(all_groups.heartbeat, "g", who(follower)) is Refusal.UNKNOWN_MEMBER_ID
    all_groups.stop()


async def test_a_leader_that_never_assigns_is_replaced():
    all_groups = groups()
    first, second = await asyncio.gather(
        all_groups.join("g", joining(session_timeout=1.0)),
        all_groups.join("g", joining(session_timeout=60.0)),
    )
    leader, follower = (first, second) if first.members else (second, first)
    assert leader is first  # members lead in the order of their joins
    assert await refused(all_groups.sync("g", who(follower), {})) is Refusal.REBALANCE_IN_PROGRESS
    alone = await all_groups.join("g", joining(follower.member))
    assert alone.leader == follower.member
    all_groups.stop()


async def test_a_leader_that_sends_heartbeats_but_never_assigns_is_replaced():
    all_groups = groups()
    leader, follower = await asyncio.gather(
        all_groups.join("g", joining(rebalance_timeout=0.5)),
        all_groups.join("g", joining(rebalance_timeout=0.5)),
    )
    waiting = asyncio.create_task(refused(all_groups.sync("g", who(follower), {})))

    def beat() -> bool:
        if not waiting.done():
            all_groups.heartbeat("g", who(leader))
        return waiting.done()

    await eventually(beat)
    assert await waiting is Refusal.REBALANCE_IN_PROGRESS
    assert refusal_of(all_groups.heartbeat, "g", who(leader)) is Refusal.UNKNOWN_MEMBER_ID
    alone = await all_groups.join("g", joining(follower.member))
    assert alone.leader == follower.member
    all_groups.stop()


async def test_a_member_that_syncs_twice_is_answered_twice():
    all_groups = groups()
    leader, follower = await asyncio.gather(
        all_groups.join("g", joining()), all_groups.join("g", joining())
    )
    earlier = asyncio.create_task(refused(all_groups.sync("g", who(follower), {})))
    await asyncio.sleep(0)
    later = asyncio.create_task(all_groups.sync("g", who(follower), {}))
    assert await earlier is Refusal.UNKNOWN_MEMBER_ID
    await all_groups.sync("g", who(leader), {follower.member: b"mine"})
    assert (await later)[2] == b"mine"
    all_groups.stop()


async def test_a_member_that_nobody_knows_makes_no_group():
    all_groups = groups()
    assert await refused(all_groups.join("g", joining("made up"))) is Refusal.UNKNOWN_MEMBER_ID
    assert all_groups.names() == []


async def test_a_member_that_leaves_starts_a_rebalance_at_once():
    all_groups = groups()
    leader, follower = await two_members(all_groups)
    all_groups.leave("g", leader.member, None)
    assert refusal_of(all_groups.heartbeat, "g", who(follower)) is Refusal.REBALANCE_IN_PROGRESS
    alone = await all_groups.join("g", joining(follower.member))
    assert (alone.generation, alone.leader) == (2, follower.member)
    all_groups.leave("g", follower.member, None)
    assert not all_groups.has_members("g")
    assert all_groups.names() == []
    all_groups.stop()


async def test_a_client_that_goes_away_while_it_joins_does_not_hold_the_group():
    all_groups = groups()
    leader, follower = await two_members(all_groups, session_timeout=1.0, rebalance_timeout=60.0)
    gone = asyncio.create_task(all_groups.join("g", joining(leader.member, session_timeout=1.0)))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    alone = await all_groups.join("g", joining(follower.member, session_timeout=60.0))
    assert [one[0] for one in alone.members] == [follower.member]
    all_groups.stop()


async def test_who_lies_about_itself_is_refused():
    all_groups = groups()
    leader, follower = await two_members(all_groups)
    beat = all_groups.heartbeat
    assert refusal_of(beat, "g", who(leader, generation=7)) is Refusal.ILLEGAL_GENERATION
    assert refusal_of(beat, "g", who(leader, member="me")) is Refusal.UNKNOWN_MEMBER_ID
    assert refusal_of(beat, "h", who(leader)) is Refusal.UNKNOWN_MEMBER_ID
    assert await refused(all_groups.join("g", joining("made up"))) is Refusal.UNKNOWN_MEMBER_ID
    other = joining(kind="connect")
    assert await refused(all_groups.join("g", other)) is Refusal.INCONSISTENT_GROUP_PROTOCOL
    other = joining(protocols={"mine": b""})
    assert await refused(all_groups.join("g", other)) is Refusal.INCONSISTENT_GROUP_PROTOCOL
    other = joining(protocols={})
    assert await refused(all_groups.join("g", other)) is Refusal.INCONSISTENT_GROUP_PROTOCOL
    short = joining(session_timeout=0.1)
    assert await refused(all_groups.join("g", short)) is Refusal.INVALID_SESSION_TIMEOUT
    huge = joining(protocols={"range": bytes(2 << 20)})
    assert await refused(all_groups.join("g", huge)) is Refusal.INVALID_REQUEST
    commit = all_groups.check_commit
    assert refusal_of(commit, "g", Membership("", -1)) is Refusal.UNKNOWN_MEMBER_ID
    assert refusal_of(commit, "g", who(follower, generation=0)) is Refusal.ILLEGAL_GENERATION
    commit("g", who(follower))
    commit("nobody", Membership("", -1))
    all_groups.heartbeat("g", who(leader))
    group = all_groups.get("g")
    assert group is not None
    assert group.state is GroupState.STABLE
    all_groups.stop()


async def test_a_group_whose_members_lease_ranges_cannot_be_joined():
    all_groups = groups()
    why = await refused(all_groups.join("leased", joining()))
    assert why is Refusal.INCONSISTENT_GROUP_PROTOCOL


async def test_a_new_member_is_told_its_id_before_it_joins():
    all_groups = groups()
    with pytest.raises(MemberRefused) as caught:
        await all_groups.join("g", joining(needs_id=True))
    assert caught.value.refusal is Refusal.MEMBER_ID_REQUIRED
    joined = await all_groups.join("g", joining(caught.value.member, needs_id=True))
    assert joined.member == caught.value.member
    all_groups.stop()


async def test_a_static_member_comes_back_in_its_place_and_its_former_self_is_fenced():
    all_groups = groups()
    first = await all_groups.join("g", joining(instance="a"))
    await all_groups.sync("g", who(first, instance="a"), {first.member: b"all"})
    back = await all_groups.join("g", joining(instance="a"))
    assert back.generation == first.generation
    assert back.member != first.member
    assert back.leader == first.member  # it is not asked to assign
    assert (await all_groups.sync("g", who(back, instance="a"), {}))[2] == b"all"
    fenced = who(first, instance="a")
    assert refusal_of(all_groups.heartbeat, "g", fenced) is Refusal.FENCED_INSTANCE_ID
    twice = joining(first.member, instance="a")
    assert await refused(all_groups.join("g", twice)) is Refusal.FENCED_INSTANCE_ID
    all_groups.stop()


def test_an_assignment_that_is_none_assigns_nothing():
    good = struct.pack(">hih1sii", 1, 1, 1, b"t", 1, 7)
    assert assigned_partitions(good) == {"t": [7]}
    assert assigned_partitions(good[:-1]) == {}
    # a length of -6 leads back to itself, 1000 times
    assert assigned_partitions(struct.pack(">hihih", 1, 1001, 0, 0, -6)) == {}
