"""`penstock.Client` while brokers are killed (kill -9) and started again on their ports."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest

from penstock import Client
from penstock.errors import AckRefused, Conflict, Unavailable
from penstock.wire.http.messages import EMPTY, Request, Response
from penstock.wire.http.routes import HttpRoute
from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess
from tests.support.http import serving
from tests.support.wait import eventually

pytestmark = pytest.mark.xdist_group("queue-restart")


@pytest.fixture(scope="module")
def brokers(postgres, tmp_path_factory) -> Iterator[list[BrokerProcess]]:
    """Two of them on one database."""
    url, directory = fresh_database(postgres), tmp_path_factory.mktemp("restart")
    made = [BrokerProcess(directory / name, database_url=url) for name in ("one", "two")]
    with made[0], made[1]:
        yield made


async def restart(broker: BrokerProcess) -> None:
    await asyncio.to_thread(broker.kill)
    await asyncio.to_thread(broker.start)


async def test_taking_pushing_and_acknowledging_go_on_through_restarts(brokers):
    """One address, and no error reaches the loops but a lease that ended meanwhile."""
    broker = brokers[0]

    taken: dict[str, list[int]] = {"acks": [], "auto": []}

    async def take(client: Client, group: str) -> None:
        async for message in client.take(f"taken@{group}", batch=3, auto_ack=group == "auto"):
            taken[group].append(message.data)
            if group == "acks":
                with suppress(AckRefused):
                    await client.ack(message)

    async with (
        Client(broker.url, retry_for=60) as client,
        Client(broker.url, retry_for=60) as other,
    ):
        await client.configure("taken", lease_time=2, retry_delay=0, retry_limit=100)
        taking = [asyncio.create_task(take(client, group)) for group in taken]

        async def arrived(count: int) -> None:
            await eventually(
                lambda: all(set(seen) == set(range(count)) for seen in taken.values()), 30
            )

        for number in range(7):
            await other.push("taken", number)
        await arrived(7)
        await restart(broker)  # while both wait for more: nothing is in the broker's hands
        for number in range(7, 14):
            await other.push("taken", number)
        await arrived(14)
        await asyncio.to_thread(broker.kill)
        pushes = (other.push("taken", number) for number in range(14, 20))  # these wait for it
        await asyncio.gather(asyncio.to_thread(broker.start), *pushes)
        await arrived(20)
        for seen in taken.values():
            assert list(dict.fromkeys(seen))[:14] == list(range(14))
        assert len(taken["auto"]) == 20
        await eventually(lambda: lag_is(other, "taken", 0), 30)
        assert not any(task.done() for task in taking)
        for task in taking:
            task.cancel()
        await asyncio.gather(*taking, return_exceptions=True)


async def lag_is(client: Client, queue: str, lag: int) -> bool:
    return {row.waiting for row in await client.admin.groups() if row.queue == queue} == {lag}


async def test_transactions_move_each_message_once_though_brokers_die_one_after_the_other(brokers):
    """Two addresses. A transaction whose answer was lost raises; its message comes again only if it
    was not done.
    """
    one, two = brokers

    urls = [one.url, two.url]
    attempts: Counter[int] = Counter()
    unknown = 0
    async with Client(urls, retry_for=60) as client:
        await client.configure("in", lease_time=1, retry_delay=0, retry_limit=100, ordering="none")
        await client.push_many("in", range(60))

        async def move() -> None:
            nonlocal unknown
            async with Client(urls, retry_for=60) as mine:
                async for message in mine.take("in", batch=2):
                    attempts[message.data] += 1
                    try:
                        async with mine.transaction() as tx:
                            tx.ack(message).push("out", message.data)
                    except (Unavailable, Conflict, AckRefused):
                        unknown += 1  # or the lease had ended meanwhile

        moving = [asyncio.create_task(move()) for _ in range(4)]
        await eventually(lambda: len(attempts) > 5, 30)
        await asyncio.to_thread(one.kill)
        await eventually(lambda: len(attempts) > 25, 60)
        await asyncio.to_thread(one.start)
        await asyncio.to_thread(two.kill)
        await eventually(lambda: len(attempts) == 60, 60)

        async def all_moved() -> bool:
            rows = [row for row in await client.admin.queues() if row.name == "out"]
            return bool(rows) and rows[0].stored >= 60

        await eventually(all_moved, 60)
        assert not any(task.done() for task in moving)
        for task in moving:
            task.cancel()
        await asyncio.gather(*moving, return_exceptions=True)
        await eventually(lambda: lag_is(client, "in", 0), 30)
        out = [message.data async for message in client.take("out@check", batch=100, idle=0)]
        assert Counter(out) == Counter(range(60))
        await asyncio.to_thread(two.start)


async def test_a_long_poll_uses_up_no_patience():
    """A broker that restarts after it was polled in vain for longer than the client's patience is
    waited for.
    """

    polls = 0

    async def pop(_: Request) -> Response:
        nonlocal polls
        polls += 1
        if polls == 1:
            await asyncio.Event().wait()  # until it is cut
        return EMPTY

    route = HttpRoute("GET", "/api/v1/pop/queue/{queue}", pop)
    async with serving(route) as server:
        port = server.port
        client = Client(server.url, retry_for=0.6)
        polling = asyncio.create_task(client.pop("q", wait=5))
        await eventually(lambda: polls == 1)
        await asyncio.sleep(0.65)
        await server.stop(0)  # cuts the poll
        assert not polling.done()
    async with serving(route, port=port):
        assert await polling == []
    assert polls >= 2
    await client.close()
