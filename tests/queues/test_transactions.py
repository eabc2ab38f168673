"""Push and acknowledge together, and beside others."""

import asyncio
import contextlib
import time
from typing import Any

import asyncpg

from penstock.errors import Busy
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Ack, Item, PopRequest, Queues
from penstock.queues.schema import SCHEMA
from tests.queues.support import expire_leases, pop, push, running, values
from tests.support.form import pick


def _ack(message: Any) -> Ack:
    return Ack(message.transaction_id, message.partition_id, message.lease_id, group=message.group)


async def test_a_transaction_is_all_or_nothing(queues: Queues) -> None:
    await push(queues, "in", 1, 2, 3)
    popped = await pop(queues, "in")
    first, second, third = popped.messages
    done = await queues.transaction(
        [Item("out", b"10"), Ack(first.transaction_id, first.partition_id), Item("out", b"11")],
        [popped.lease_id],
    )
    assert done.success
    assert [type(result).__name__ for result in done.results] == [
        "ItemOutcome",
        "AckOutcome",
        "ItemOutcome",
    ]
    failures: list[tuple[list[Item | Ack], list[str], str]] = [
        ([Item("out", b"12"), Ack("nope", first.partition_id)], [], "Message not found"),
        (
            [
                Item("out", b"12", transaction_id="x"),
                Item("out", b"13", transaction_id="x"),
                _ack(second),
            ],
            [],
            "duplicate",
        ),
        (
            [Item("out", b"12"), _ack(second)],
            ["00000000-0000-7000-8000-000000000000"],
            "required lease",
        ),
        (
            [
                Item("out", b"12"),
                Ack(second.transaction_id, second.partition_id, status="maybe"),
            ],
            [],
            "Unknown",
        ),
    ]
    for operations, leases, word in failures:
        failed = await queues.transaction(operations, leases)
        assert not failed.success
        assert word in (failed.error or "")
    await expire_leases(queues)
    stale = await queues.transaction([Item("out", b"12"), _ack(second)])
    assert "Invalid or expired lease" in (stale.error or "")
    assert values(await pop(queues, "out")) == [10, 11]
    assert values(await pop(queues, "in")) == [2, 3]
    assert third.seq == 3


async def test_a_transaction_needs_one_connection_even_when_all_was_forgotten(
    database_url: str,
) -> None:
    """A second one might wait for somebody who waits for the locks of the first: no database finds
    such a deadlock.
    """

    async def body(queues: Queues) -> None:
        await push(queues, "in", *range(20), partition="p")
        taken = (await pop(queues, "in", 20)).messages

        async def forget() -> None:
            while True:
                queues.catalog.forget()
                await asyncio.sleep(0)

        forgetting = asyncio.create_task(forget())
        moves = [
            queues.transaction(
                [Item("out", m.payload, str(n)), Ack(m.transaction_id, m.partition_id)]
            )
            for n, m in enumerate(taken)
        ]
        async with asyncio.timeout(30):
            assert all(result.success for result in await asyncio.gather(*moves))
        forgetting.cancel()
        assert sorted(values(await pop(queues, "out", partitions=100))) == list(range(20))

    async with running(database_url, {"pool_size": 1, "acquire_timeout": 20.0}) as queues:
        await body(queues)


async def test_pushes_acks_and_transactions_over_the_same_partitions_never_deadlock(
    database_url: str,
) -> None:
    async with running(database_url) as one, running(database_url) as two:
        await one.admin.configure(
            "q", QueueOptions(ordering="none", retry_delay=0, retry_limit=1000)
        )
        partitions = [f"p{n}" for n in range(6)]
        await one.push([Item("q", b"{}", p) for p in partitions])
        until = time.monotonic() + pick(short=0.7, usual=2, soak=20)

        async def worker(queues: Queues, seed: int) -> None:
            turn = seed
            while time.monotonic() < until:
                turn += 1
                order = partitions[turn % 6 :] + partitions[: turn % 6]
                await queues.push(
                    [Item("q", b"{}", p) for p in (order if turn % 2 else reversed(order))]
                )
                popped = await queues.pop(PopRequest(queue="q", batch=12, partitions=6))
                acks = [
                    Ack(
                        m.transaction_id,
                        m.partition_id,
                        m.lease_id,
                        ("completed", "failed", "retry")[n % 3],
                    )
                    for n, m in enumerate(popped.messages)
                ]
                if turn % 3 == 0:
                    pushes = [Item("q", b"{}", p) for p in order[:3]]
                    assert (await queues.transaction([*acks, *pushes])).success
                else:
                    await queues.ack(acks[::-1])
                if turn % 5 == 0:
                    with contextlib.suppress(Busy):  # on a machine that has no time
                        await queues.groups.listing(queue="q")
                    await queues.upkeep.roll_up()

        await asyncio.gather(*(worker(queues, seed) for seed in range(3) for queues in (one, two)))
        rows = await one.database.fetch(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
        assert rows[0]["deadlocks"] == 0


async def test_what_commits_late_is_seen_by_reads_over_transaction_ids(database_url: str) -> None:
    """What the Spark source relies on: reading up to the oldest running transaction never skips a
    message.
    """

    async with running(database_url) as queues:
        await push(queues, "q", 0)
        late = await asyncpg.connect(
            database_url, server_settings={"search_path": SCHEMA.search_path("penstock")}
        )
        transaction = late.transaction()
        await transaction.start()
        partition = await queues.catalog.partition("q", "Default")
        await queues.push([Item("q", b"{}", "other")])
        other = await queues.catalog.partition("q", "other")
        await late.fetch(
            """SELECT * FROM append(ARRAY[$1::bigint], ARRAY[0], ARRAY['late'], true,
                     ARRAY[NULL::uuid], ARRAY[NULL::text], ARRAY[NULL::text], '1'::bytea, ARRAY[1, 2])""",
            partition,
        )
        await push(queues, "q", 2, partition="other")
        read = """SELECT transaction_id FROM messages WHERE queue_id = (SELECT id FROM queues WHERE name = 'q')
                         AND xid >= $1::text::xid8 AND xid < $2::text::xid8"""
        horizon = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text"
        upto = (await queues.database.fetch(horizon))[0][0]
        first = await queues.database.fetch(read, "0", upto)
        await transaction.commit()
        await late.close()
        end = (await queues.database.fetch(horizon))[0][0]
        second = await queues.database.fetch(read, upto, end)
        ids = [row[0] for row in (*first, *second)]
        assert "late" in [row[0] for row in second]
        assert len(ids) == len(set(ids)) == 4
        assert other != partition
