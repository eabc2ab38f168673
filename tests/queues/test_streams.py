"""State, output and acknowledgement in one transaction."""

import asyncio
import json
from typing import Any

import pytest

from penstock.errors import Conflict, InvalidRequest, NotFound, PenstockError
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Delivered, Item, Queues
from penstock.queues.streams import Cycle, CycleAck
from tests.queues.support import expire_leases, pop, push, running, values

GROUP = "streams.totals"
NOWHERE = "00000000-0000-7000-8000-000000000000"


async def registered(queues: Queues, config_hash: str = "v1", **options: Any) -> str:
    done = await queues.streams.register("totals", "in", "out", config_hash, **options)
    return done.query_id


def cycle(
    query: str, message: Delivered, state: dict[str, Any] | None = None, **more: Any
) -> Cycle:
    """A cycle that acknowledges up to this message."""
    texts = {
        key: None if value is None else json.dumps(value).encode()
        for key, value in (state or {}).items()
    }
    more.setdefault("ack", CycleAck(message.transaction_id, message.lease_id))
    return Cycle(
        query_id=query,
        partition_id=message.partition_id,
        group=GROUP,
        state=texts,
        items=more.pop("items", []),
        **more,
    )


async def state_of(
    queues: Queues, query: str, message: Delivered, **filters: Any
) -> dict[str, Any]:
    rows = await queues.streams.state(
        query, message.partition_id, filters.pop("keys", []), **filters
    )
    return {row.key: json.loads(row.value) for row in rows}


async def test_a_cycle_commits_state_output_and_acknowledgement(database_url: str) -> None:
    async with running(database_url) as queues:
        await push(queues, "in", 1, 2, 3)
        query = await registered(queues)
        popped = await pop(queues, "in", group=GROUP)
        done = await queues.streams.commit(
            cycle(query, popped.messages[-1], {"sum": 6, "n": 3}, items=[Item("out", b"6")])
        )
        assert (done.acked, done.released, done.dead) == (3, True, False)
        assert await state_of(queues, query, popped.messages[0]) == {"n": 3, "sum": 6}
        assert values(await pop(queues, "out")) == [6]
        assert (await pop(queues, "in", group=GROUP)).messages == []
        # without an acknowledgement, as for a window that ended
        await queues.streams.commit(
            cycle(query, popped.messages[0], {"n": None, "sum": 7}, ack=None)
        )
        assert await state_of(queues, query, popped.messages[0]) == {"sum": 7}


async def test_a_cycle_that_cannot_be_applied_changes_nothing(database_url: str) -> None:
    async with running(database_url) as queues:
        await push(queues, "in", 1, 2)
        await queues.admin.configure("tiny", QueueOptions(max_size=1))
        await push(queues, "tiny", 0)
        query = await registered(queues)
        first, second = (await pop(queues, "in", group=GROUP)).messages
        lease, transaction = first.lease_id, first.transaction_id
        out = [Item("out", b"1")]
        wrong: list[tuple[Cycle, type[PenstockError], str]] = [
            (cycle(query, first, {"a": 1}, items=[*out, Item("tiny", b"1")]), Conflict, "is full"),
            (cycle(query, first, ack=CycleAck("nope", lease), items=out), Conflict, "not found"),
            (
                cycle(query, first, ack=CycleAck(transaction, NOWHERE), items=out),
                Conflict,
                "lease",
            ),
            (cycle(query, first, ack=CycleAck(transaction, "x"), items=out), Conflict, "lease"),
            (
                cycle(query, first, ack=CycleAck(transaction, lease, "maybe"), items=out),
                InvalidRequest,
                "Unknown ack.status: maybe",
            ),
            (cycle(NOWHERE, first, items=out), NotFound, "query_id"),
            (cycle("x", first, items=out), NotFound, "query_id"),
            (cycle(query, first, {"a": "\0"}, items=out), InvalidRequest, "cannot be stored"),
            (cycle(query, first, {"": 1}, items=out), InvalidRequest, "key"),
            (cycle(query, first, {"k" * 600: 1}, items=out), InvalidRequest, "key"),
            (cycle(query, first, config_hash="v0", items=out), Conflict, "config_hash"),
        ]
        for one, error, text in wrong:
            with pytest.raises(error, match=text):
                await queues.streams.commit(one)
        other = cycle(query, first, items=out)
        other.partition_id = "nope"
        with pytest.raises(NotFound, match="partition_id"):
            await queues.streams.commit(other)
        other.partition_id, other.group = first.partition_id, "another"
        with pytest.raises(Conflict, match="lease"):
            await queues.streams.commit(other)
        assert await state_of(queues, query, first) == {}
        assert (await pop(queues, "out")).messages == []
        await queues.streams.commit(cycle(query, second, {"a": 1}))  # the lease is still there


async def test_a_cycle_that_is_sent_twice_is_applied_once(database_url: str) -> None:
    async with running(database_url) as queues:
        await push(queues, "in", 1)
        query = await registered(queues)
        [message] = (await pop(queues, "in", group=GROUP)).messages
        once = cycle(query, message, {"n": 1}, items=[Item("out", b"1")])
        await queues.streams.commit(once)
        with pytest.raises(Conflict, match="Invalid or expired lease"):
            await queues.streams.commit(once)
        assert len((await pop(queues, "out")).messages) == 1


async def test_a_consumer_that_lost_its_lease_cannot_overwrite_the_state(database_url: str) -> None:
    async with running(database_url) as queues:
        await push(queues, "in", 1)
        query = await registered(queues)
        [late] = (await pop(queues, "in", group=GROUP)).messages
        await expire_leases(queues)
        [again] = (await pop(queues, "in", group=GROUP)).messages
        with pytest.raises(Conflict, match="Invalid or expired lease"):
            await queues.streams.commit(cycle(query, late, {"by": "late"}))
        await queues.streams.commit(cycle(query, again, {"by": "new"}))
        with pytest.raises(Conflict, match="Invalid or expired lease"):
            await queues.streams.commit(cycle(query, late, {"by": "late"}))
        assert await state_of(queues, query, again) == {"by": "new"}


async def test_a_lease_stays_with_the_messages_that_a_cycle_leaves(database_url: str) -> None:
    """As often as a gate wants: its expiry is not an attempt, and nothing becomes a dead letter."""
    async with running(database_url) as queues:
        await queues.admin.configure("in", QueueOptions(retry_limit=1))
        await push(queues, "in", *range(8))
        query = await registered(queues)
        for first in range(5):
            messages = (await pop(queues, "in", group=GROUP)).messages
            assert [json.loads(m.payload) for m in messages] == list(range(first, 8))
            done = await queues.streams.commit(
                cycle(query, messages[0], {"n": first}, release=False)
            )
            assert (done.acked, done.released) == (1, False)
            assert (await pop(queues, "in", group=GROUP)).messages == []
            await expire_leases(queues)
        messages = (await pop(queues, "in", group=GROUP)).messages
        await queues.streams.commit(cycle(query, messages[0], release=False))
        await queues.streams.commit(cycle(query, messages[2]))  # goes on under the same lease
        assert (await queues.status.queue("in")).counts.dead_letters == 0


async def test_a_query_that_takes_nothing_has_its_messages_again(database_url: str) -> None:
    """A gate that refuses all sends no cycle; its group is named after the query."""
    async with running(database_url) as queues:
        await queues.admin.configure("in", QueueOptions(retry_limit=1))
        await push(queues, "in", 1, 2)
        await registered(queues)
        for _ in range(4):
            assert values(await pop(queues, "in", group=GROUP)) == [1, 2]
            await expire_leases(queues)
        for _ in range(2):  # another group of the queue
            assert values(await pop(queues, "in", group="streams.other")) == [1, 2]
            await expire_leases(queues)
        assert (await pop(queues, "in", group="streams.other")).messages == []


async def test_what_a_released_lease_did_not_acknowledge_comes_at_once(database_url: str) -> None:
    async with running(database_url) as queues:
        await push(queues, "in", 1, 2, 3)
        query = await registered(queues)
        messages = (await pop(queues, "in", group=GROUP)).messages
        done = await queues.streams.commit(cycle(query, messages[0]))
        assert (done.acked, done.released) == (1, True)
        assert values(await pop(queues, "in", group=GROUP)) == [2, 3]


async def test_a_failed_message_becomes_a_dead_letter_and_the_rest_comes_again(
    database_url: str,
) -> None:
    async with running(database_url) as queues:
        await push(queues, "in", 1, 2, 3)
        query = await registered(queues)
        messages = (await pop(queues, "in", group=GROUP)).messages
        failed = CycleAck(messages[1].transaction_id, messages[1].lease_id, "failed", "no such day")
        done = await queues.streams.commit(
            cycle(query, messages[1], {"sum": 1}, ack=failed, release=False)
        )
        assert (done.acked, done.released, done.dead) == (2, True, True)
        assert values(await pop(queues, "in", group=GROUP)) == [3]
        [letter] = await queues.database.fetch("SELECT payload, error FROM dead_letters")
        assert tuple(letter) == (b"2", "no such day")


async def test_state_is_filtered_by_keys_prefix_and_the_end_of_a_window(database_url: str) -> None:
    async with running(database_url) as queues:
        await push(queues, "in", 1)
        await push(queues, "in", 1, partition="other")
        query = await registered(queues)
        [message] = (await pop(queues, "in", group=GROUP, partition="Default")).messages
        rows = {
            "w:1": {"windowEnd": 10},
            "w:2": {"windowEnd": 20.5},
            "w%": {"windowEnd": "5"},
            "x": [1],
        }
        await queues.streams.commit(cycle(query, message, rows))
        found = [
            await state_of(queues, query, message, **filters)
            for filters in (
                {},
                {"keys": ["x", "w:2", "nope"]},
                {"prefix": "w:"},
                {"prefix": "w%"},
                {"ended_by": 20},
                {"ended_by": 21, "prefix": "w:", "keys": ["w:2", "x"]},
            )
        ]
        assert found[0] == rows
        assert [list(one) for one in found[1:]] == [
            ["w:2", "x"], ["w:1", "w:2"], ["w%"], ["w:1"], ["w:2"]
        ]  # fmt: skip
        [other] = (await pop(queues, "in", group=GROUP)).messages
        assert await state_of(queues, query, other) == {}


async def test_another_version_needs_a_reset_which_deletes_the_state(database_url: str) -> None:
    async with running(database_url) as queues:
        await push(queues, "in", 1, 2)
        first = await queues.streams.register("totals", "in", None, "v1")
        again = await queues.streams.register("totals", "in", None, "v1", reset=True)
        assert (first.fresh, first.reset) == (True, False)
        assert (again.query_id, again.fresh, again.reset) == (first.query_id, False, False)
        messages = (await pop(queues, "in", group=GROUP)).messages
        await queues.streams.commit(cycle(first.query_id, messages[0], {"n": 1}, release=False))
        with pytest.raises(Conflict, match="config_hash mismatch"):
            await queues.streams.register("totals", "in", None, "v2")
        assert await state_of(queues, first.query_id, messages[0]) == {"n": 1}
        other = await queues.streams.register("totals", "in", None, "v2", reset=True)
        assert (other.query_id, other.fresh, other.reset) == (first.query_id, False, True)
        assert await state_of(queues, first.query_id, messages[0]) == {}
        with pytest.raises(Conflict, match="config_hash mismatch"):  # the old program still runs
            await queues.streams.commit(
                cycle(first.query_id, messages[1], {"n": 2}, config_hash="v1")
            )
        for name, source, config_hash in (("", "in", "v"), ("n", "", "v"), ("n", "in", "")):
            with pytest.raises(InvalidRequest):
                await queues.streams.register(name, source, None, config_hash)


async def test_queries_that_register_at_once_are_one(database_url: str) -> None:
    async with running(database_url) as queues:
        done = await asyncio.gather(
            *(queues.streams.register("totals", "in", None, "v1") for _ in range(8))
        )
        assert len({one.query_id for one in done}) == 1
        assert [one.fresh for one in done].count(True) == 1


async def test_a_queue_whose_partitions_are_shared_keeps_no_state(database_url: str) -> None:
    async with running(database_url) as queues:
        await queues.admin.configure("in", QueueOptions(ordering="none"))
        await push(queues, "in", 1)
        query = await registered(queues)
        [message] = (await pop(queues, "in", group=GROUP)).messages
        with pytest.raises(Conflict, match="ordering none"):
            await queues.streams.commit(cycle(query, message, {"n": 1}))


async def test_a_partition_with_state_is_not_removed_but_goes_with_its_queue(
    database_url: str,
) -> None:
    async with running(database_url) as queues:
        query = await registered(queues)
        for partition in "ab":
            await push(queues, "in", 1, partition=partition)
        kept, other = [
            (await pop(queues, "in", group=GROUP, partition=name)).messages[0] for name in "ab"
        ]
        await queues.streams.commit(cycle(query, kept, {"n": 1}))
        await queues.streams.commit(cycle(query, other, {}))
        await queues.admin.clear("in")
        await queues.database.fetch("UPDATE partitions SET emptied_at = now() - interval '1 year'")
        await queues.database.fetch("UPDATE cursors SET consumed_at = NULL, due_at = NULL")
        await queues.database.fetch("SELECT queue_tidy(now(), 100)")
        rows = await queues.database.fetch("SELECT name FROM partitions ORDER BY name")
        assert [row["name"] for row in rows] == ["a"]
        assert await state_of(queues, query, kept) == {"n": 1}
        await queues.admin.delete("in")
        while (await queues.database.fetch("SELECT queue_purge(100)"))[0][0]:
            pass
        assert await queues.database.fetch("SELECT * FROM stream_state") == []
