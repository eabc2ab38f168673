"""Consumer groups: committed offsets that last, ranges that members share."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import Conflict, InvalidOffset, InvalidRequest, NotFound
from penstock.metrics import Metrics
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from tests.support.form import pick
from tests.support.topics import Clock, castagnoli, running


@asynccontextmanager
async def groups_of(store: TopicStore, clock: Clock) -> AsyncIterator[Groups]:
    with ThreadPoolExecutor(1) as pool:
        groups = Groups(
            store.directory / ".penstock" / "groups",
            store,
            pool=pool,
            metrics=Metrics(),
            clock=clock,
        )
        await groups.start()
        yield groups
        await groups.stop()


async def test_a_committed_offset_outlives_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        await (await store.create("orders")).append([b"x"] * 100)
        assert groups.committed("billing", "orders") is None
        assert groups.lag("billing", "orders") == 100
        await groups.commit("billing", "orders", 40)
    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        assert groups.committed("billing", "orders") == 40
        assert groups.lag("billing", "orders") == 60
        assert groups.names() == groups.names("orders") == ["billing"]
        await groups.delete("billing")
        assert groups.names() == []
    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        assert groups.committed("billing", "orders") is None
        with pytest.raises(NotFound):
            await groups.delete("billing")


async def test_a_commit_outside_the_log_or_with_a_bad_name_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        await (await store.create("t")).append([b"x"])
        with pytest.raises(InvalidOffset):
            await groups.commit("g", "t", 2)
        with pytest.raises(InvalidRequest):
            await groups.commit("g/h", "t", 1)
        with pytest.raises(NotFound):
            await groups.commit("g", "nowhere", 0)


async def test_members_get_disjoint_ranges_and_the_commit_follows_the_completed_prefix(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        await (await store.create("t")).append([b"x"] * 25)
        a, b, c = (groups.lease("g", "t", name, 10) for name in "abc")
        assert a
        assert b
        assert c
        assert [(r.start, r.end) for r in (a, b, c)] == [(0, 10), (10, 20), (20, 25)]
        assert groups.lease("g", "t", "d", 10) is None
        assert await groups.complete(b.lease_id) == 0
        assert await groups.complete(a.lease_id) == 20
        assert await groups.complete(c.lease_id) == 25
        with pytest.raises(Conflict):
            await groups.complete(c.lease_id)


async def test_an_expired_lease_goes_to_the_next_member_and_its_holder_has_lost_it(
    tmp_path: Path,
) -> None:
    clock = Clock()
    async with running(tmp_path, lease_time=30) as store, groups_of(store, clock) as groups:
        await (await store.create("t")).append([b"x"] * 30)
        slow = groups.lease("g", "t", "slow", 20)
        assert slow
        clock.now += 29
        groups.renew(slow.lease_id)
        clock.now += 29
        other = groups.lease("g", "t", "quick", 20)
        assert other
        assert (other.start, other.end) == (20, 30)
        clock.now += 2
        again = groups.lease("g", "t", "quick", 15)
        assert again
        assert (again.start, again.end) == (0, 15)
        rest = groups.lease("g", "t", "quick", 15)
        assert rest
        assert (rest.start, rest.end) == (15, 20)
        with pytest.raises(Conflict):
            await groups.complete(slow.lease_id)
        with pytest.raises(Conflict):
            groups.renew(slow.lease_id)
        assert groups.leave("g", "t", "quick") == 3
        assert groups.details("g")[0].leases == []


async def test_a_lease_completed_late_counts_when_nobody_took_it_over(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, lease_time=30) as store, groups_of(store, clock) as groups:
        await (await store.create("t")).append([b"x"] * 3)
        leased = groups.lease("g", "t", "m", 10)
        assert leased
        clock.now += 1000
        assert await groups.complete(leased.lease_id) == 3


async def test_leases_are_forgotten_at_a_restart_but_not_what_was_committed(tmp_path: Path) -> None:
    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        await (await store.create("t")).append([b"x"] * 30)
        first, second, third = (groups.lease("g", "t", "m", 10) for _ in range(3))
        assert first
        assert second
        assert third
        await groups.complete(first.lease_id)
        await groups.complete(third.lease_id)
    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        again = groups.lease("g", "t", "m", 100)
        assert again
        assert (again.start, again.end) == (10, 30)


async def test_a_group_of_a_deleted_topic_does_not_carry_over_to_the_next_of_that_name(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        await (await store.create("t")).append([b"x"] * 5)
        await groups.commit("g", "t", 5)
        await store.delete("t")
        await (await store.create("t")).append([b"y"] * 5)
        assert groups.committed("g", "t") is None
        leased = groups.lease("g", "t", "m", 10)
        assert leased
        assert leased.start == 0


async def test_a_group_that_starts_at_the_end_stays_there_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        await (await store.create("t")).append([b"x"] * 5)
        assert groups.lease("g", "t", "m", 10, start="latest") is None
    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        assert groups.committed("g", "t") == 5


async def test_damaged_lines_of_the_journal_are_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = tmp_path / ".penstock" / "groups" / "offsets.log"

    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        await (await store.create("t")).append([b"x"] * 9)
        for offset in (3, 6, 9):
            await groups.commit("g", "t", offset)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + lines[1] + lines[2].replace(b",9]", b",8]") + b"torn")
    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        assert groups.committed("g", "t") == 6
        assert "2 damaged lines were skipped" in caplog.text
        await groups.commit("g", "t", 7)
    caplog.clear()
    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        assert groups.committed("g", "t") == 7
    assert "damaged" not in caplog.text


async def test_golden_line_of_the_journal(tmp_path: Path) -> None:
    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        topic = await store.create("t é")
        await topic.append([b"x"] * 9)
        await groups.commit("g", "t é", 7)
        event = f'["commit","g","t é","{topic.incarnation}",7]'.encode()
        await groups.delete("g", "t é")
    gone = '["delete","g","t é"]'.encode()
    wanted = b"%08x %b\n%08x %b\n" % (castagnoli(event), event, castagnoli(gone), gone)
    assert (tmp_path / ".penstock" / "groups" / "offsets.log").read_bytes() == wanted


@settings(max_examples=pick(short=20, usual=60, soak=600), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["lease", "complete", "release", "wait"]), st.integers(1, 7)),
        max_size=60,
    )
)
async def test_no_record_is_committed_before_it_was_completed_and_none_is_leased_twice(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    clock = Clock()
    directory = tmp_path_factory.mktemp("groups")
    async with (
        running(directory, lease_time=30, fsync="never") as store,
        groups_of(store, clock) as groups,
    ):
        await (await store.create("t")).append([b"x"] * 40)
        held: dict[str, tuple[range, float]] = {}
        completed: set[int] = set()
        for step, number in steps:
            if step == "wait":
                clock.now += number * 6
            elif step == "lease":
                leased = groups.lease("g", "t", "m", number)
                held = {k: v for k, v in held.items() if v[1] > clock.now}
                if leased is not None:
                    piece = range(leased.start, leased.end)
                    taken = {offset for other, _ in held.values() for offset in other}
                    assert not taken & set(piece)
                    assert not completed & set(piece)
                    held[leased.lease_id] = (piece, leased.expires)
            elif held:
                lease_id = sorted(held)[number % len(held)]
                piece, _ = held.pop(lease_id)
                if step == "complete":
                    try:
                        await groups.complete(lease_id)
                    except Conflict:
                        continue
                    completed.update(piece)
                else:
                    try:
                        groups.release(lease_id)
                    except Conflict:
                        continue
            prefix = next(i for i in range(41) if i not in completed)
            assert (groups.committed("g", "t") or 0) == prefix


async def test_a_group_has_an_offset_for_each_partition_that_outlives_a_restart(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        await store.create("orders", form="kafka", partitions=3)
        for number in range(3):
            await store.partition("orders", number).append([b"x"] * (10 * number + 10))
        lease = groups.lease("billing", "orders/1", "member", 5)
        assert lease is not None
        assert (lease.start, lease.end) == (0, 5)
        await groups.complete(lease.lease_id)
        await groups.commit("billing", "orders/2", 30)
    async with running(tmp_path) as store, groups_of(store, Clock()) as groups:
        labels = ["orders", "orders/1", "orders/2"]
        assert [groups.committed("billing", label) for label in labels] == [None, 5, 30]
        assert [groups.lag("billing", label) for label in labels] == [10, 15, 0]
