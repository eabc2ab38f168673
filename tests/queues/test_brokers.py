"""Many producers and consumers, several brokers: nothing is lost, nothing doubled."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Queues
from penstock.queues.waiting import WaitingPop
from tests.queues.ledger import Ledger, work
from tests.queues.support import complete, pop, push, running, values
from tests.support.form import pick
from tests.support.wait import Stopwatch, eventually


async def test_a_broker_that_is_alone_notifies_nobody_and_two_find_each_other(
    database_url: str,
) -> None:
    async with running(database_url, poll_interval=60.0) as one:
        await eventually(lambda: one.waiting.sent > 0)  # that it is there
        await push(one, "q", 0)
        await complete(one, await pop(one, "q"))
        sent = one.waiting.sent
        for number in range(3):
            await push(one, "q", number)
            await complete(one, await pop(one, "q"))
        assert (one.waiting.sent, one.waiting.alone) == (sent, True)
        async with running(database_url, poll_interval=60.0) as two:
            waiting = asyncio.create_task(pop(two, "q", wait=True, timeout=60))
            await eventually(lambda: not one.waiting.alone and not two.waiting.alone)
            await push(one, "q", "heard")
            assert values(await asyncio.wait_for(waiting, 30)) == ["heard"]


async def test_pops_are_woken_when_a_broker_that_took_itself_for_alone_hears_of_theirs(
    database_url: str,
) -> None:
    """So it does in its first moments, and after a freeze: what it pushed it announced to nobody."""

    async with running(database_url) as one, running(database_url) as two:
        await eventually(lambda: not one.waiting.alone and not two.waiting.alone)
        await eventually(lambda: one.waiting.heard > 1)  # it answers what it has heard
        pop: WaitingPop = WaitingPop()
        one.waiting.register(pop, [("q", "group")])
        woken = asyncio.create_task(pop.park(60, lambda _: None))
        await eventually(lambda: one.waiting.parked == 1)
        # As after a freeze: nothing public makes one of two brokers of a process lose time.
        two.waiting._others_until = 0.0
        assert two.waiting.alone
        one.waiting.announce_delayed(1e12)  # any notice says that it is there
        await eventually(woken.done)


@pytest.mark.parametrize("ordering", ["partition", "none"])
async def test_every_queued_message_of_one_busy_partition_is_delivered_once(
    database_url: str, ordering: str
) -> None:
    async with running(database_url) as queues:
        await queues.admin.configure("q", QueueOptions(ordering=ordering))
        ledger = Ledger()
        await work(ledger, [queues], pick(short=0.4, usual=2, soak=10), 8, 4, 1)
        ledger.check()
        assert set(ledger.settled.values()) == {1}
        if ordering == "partition":
            seqs = [seq for seq, _ in ledger.order["p0"]]
            assert seqs == sorted(seqs)
        assert await queues.groups.lag("q", "__QUEUE_MODE__") == 0


async def test_several_brokers_share_one_database(database_url: str) -> None:
    async def _lease_time(broker: Queues) -> bool:
        return bool((await broker.admin.describe("q")).options.lease_time == 77)

    async with AsyncExitStack() as stack:
        brokers = [
            await stack.enter_async_context(running(database_url, poll_interval=30))
            for _ in range(3)
        ]
        ledger = Ledger()
        await work(ledger, brokers, pick(short=0.4, usual=2, soak=10), 6, 6, 3)
        ledger.check()
        assert set(ledger.settled.values()) == {1}
        for broker in brokers:
            await broker.upkeep.roll_up()
        assert await brokers[0].groups.lag("q", "__QUEUE_MODE__") == 0
        # A pop waiting at one broker is woken by a push, and by a release, at another: not by
        # its poll.
        waiting = asyncio.create_task(pop(brokers[0], "q", wait=True, timeout=20))
        await eventually(lambda: brokers[0].waiting.parked)
        watch = Stopwatch()
        await push(brokers[1], "q", "hello", partition="p0")
        held = await waiting
        assert values(held) == ["hello"]
        await push(brokers[1], "q", "next", partition="p0")
        waiting = asyncio.create_task(pop(brokers[0], "q", wait=True, timeout=20))
        await eventually(lambda: brokers[0].waiting.parked)
        await complete(brokers[2], held)
        assert values(await waiting) == ["next"]
        assert watch.seconds < 10
        # What one changes, the others follow.
        await brokers[0].admin.delete("q")
        await push(brokers[1], "q", "anew", partition="p0")
        assert values(await pop(brokers[2], "q")) == ["anew"]
        await brokers[0].admin.configure("q", QueueOptions(lease_time=77))
        await eventually(lambda: _lease_time(brokers[1]))


async def test_brokers_encrypt_as_soon_as_any_of_them_was_told_to(database_url: str) -> None:
    async with (
        running(database_url, encryption_key="33" * 32) as one,
        running(database_url, encryption_key="33" * 32) as two,
    ):
        await push(two, "q", "clear")
        await one.admin.configure("q", QueueOptions(encryption_enabled=True))
        await push(two, "q", "secret")
        rows = await one.database.fetch("SELECT payload FROM messages ORDER BY seq")
        assert rows[0]["payload"] == b'"clear"'
        assert b"secret" not in rows[1]["payload"]


async def test_a_stop_that_meets_a_notification_ends(database_url: str) -> None:
    """A task that is woken and cancelled in the same turn of the loop ends."""

    for turns in range(4):
        async with running(database_url) as queues, asyncio.timeout(60):
            await eventually(lambda: queues.waiting.sent > 0)
            queues.waiting.announce_delayed(1e12)
            await turn(turns)
            await queues.waiting.stop()
            queues.waiting.on_delayed(0.0)
            await turn(turns)
            await queues.delayed.stop()
    for turns in range(4):
        async with running(database_url) as queues, asyncio.timeout(60):
            await queues.database.listen("another", lambda _: None)
            await turn(turns)


async def turn(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)
