"""What an operator asks the client for: typed answers of a real broker."""

import socket
import time
from datetime import UTC, datetime, timedelta

import pytest

from penstock import Client, SyncClient
from penstock.errors import InvalidRequest, NotFound, Unavailable
from penstock.types import QueueOptions
from tests.support.wait import eventually


async def test_configure_keeps_the_options_that_it_does_not_name_unless_it_resets_them(
    broker, queue
):
    async with Client(broker.url) as client:
        await client.configure(queue, lease_time=30, task="billing")
        assert await client.configure(queue, retry_limit=9) == QueueOptions(
            lease_time=30, retry_limit=9
        )
        assert (await client.configure(queue, task="other", ttl=5)).lease_time == 30
        (about,) = [one for one in await client.admin.queues() if one.name == queue]
        assert about.task == "other"
        assert await client.configure(queue, ttl=6, reset=True) == QueueOptions(ttl=6)
        with pytest.raises(InvalidRequest, match="leaseTime"):
            await client.configure(queue, lease_time=-1)


async def test_queues_groups_and_dead_letters_are_structs(broker, queue):
    async with Client(broker.url) as client:
        made = await client.configure(queue, task="billing", lease_time=30, ordering="none")
        assert made == QueueOptions(lease_time=30, ordering="none")
        await client.push_many(queue, [1, 2, 3], partition="p", headers={"tenant": "a"})
        first, second, _ = await client.pop(f"{queue}@g", batch=3, partitions=3)
        await first.ack()
        await second.dead_letter("no good")
        about = await client.admin.describe(queue)
        assert (about.options.lease_time, about.stored) == (30, 3)
        assert [(one.name, one.completed, one.dead_letters) for one in about.groups] == [
            ("g", 1, 1)
        ]
        partitions = await client.admin.partitions(queue, group="g")
        assert {one.name: one.stored for one in partitions}["p"] == 3
        (summary,) = [one for one in await client.admin.queues() if one.name == queue]
        assert (summary.task, summary.stored) == ("billing", 3)
        (group,) = [one for one in await client.admin.groups() if one.queue == queue]
        assert (group.name, group.completed, group.dead_letters) == ("g", 1, 1)
        assert [one.partition for one in await client.admin.group("g") if one.queue == queue and
                one.consumed] == ["p"]  # fmt: skip
        (letter,) = (await client.admin.dead_letters(queue, group="g", limit=1)).messages
        assert (letter.data, letter.error, letter.headers) == (
            2, "no good", {"tenant": "a"},
        )  # fmt: skip
        late = datetime.now(UTC) + timedelta(days=1)
        assert (await client.admin.dead_letters(queue, since=late)).total == 0
        assert await client.admin.requeue(queue, id=letter.number) == 1
        assert await client.admin.purge(queue) == 0
        preview = await client.admin.seek(queue, "g", "beginning", dry_run=True)
        assert (preview.dry_run, preview.redelivered) == (True, 1)
        assert await client.admin.delete_group("g", queue) > 0
        (message,) = await client.pop(f"{queue}@h")
        await message.dead_letter("of a group that goes")
        assert await client.admin.delete_group("h", queue) > 0
        (letter,) = (await client.admin.dead_letters(queue)).messages
        assert letter.group is None
        assert await client.admin.clear(queue) == 3
        assert await client.admin.delete_queue(queue)
        assert not await client.admin.delete_queue(queue)


async def test_messages_for_later_are_listed_and_cancelled(broker, queue):
    async with Client(broker.url) as client:
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        pushed = await client.push(queue, 1, deliver_at=tomorrow)
        assert pushed.status == "scheduled"
        await client.push(queue, 2, delay=timedelta(hours=1))
        await client.push(queue, 3, delay=0.3)
        (soon,) = await client.pop(queue, wait=30)
        assert soon.data == 3
        waiting = (await client.admin.scheduled(queue)).messages
        assert [one.transaction_id for one in waiting][-1] == pushed.transaction_id
        assert abs(waiting[-1].deliver_at - tomorrow) < timedelta(seconds=1)
        assert await client.cancel(queue, pushed.transaction_id)
        assert not await client.cancel(queue, pushed.transaction_id)
        assert len((await client.admin.scheduled(queue)).messages) == 1
        with pytest.raises(InvalidRequest, match="no time zone"):
            await client.push(queue, 4, deliver_at=datetime(2030, 1, 1))
        with pytest.raises(InvalidRequest, match="not both"):
            await client.push(queue, 4, delay=1, deliver_at=tomorrow)
        with pytest.raises(InvalidRequest, match="0 or more seconds"):
            await client.push(queue, 4, delay=-1)


async def test_schedules_and_routes_by_their_names(broker, queue):
    async with Client(broker.url) as client:
        made = await client.schedules.create(
            queue, cron="0 3 * * *", queue=queue, payload={"id": 7}, timezone="Europe/Rome"
        )
        assert (made.cron, made.timezone, made.catch_up) == ("0 3 * * *", "Europe/Rome", "one")
        assert len(made.next_runs) > 1
        assert (await client.schedules.pause(queue)).paused
        assert not (await client.schedules.resume(queue)).paused
        ran = await client.schedules.run(queue)
        assert (ran.result, ran.manual) == ("queued", True)
        assert [one.data for one in await client.pop(queue, wait=30)] == [{"id": 7}]
        assert queue in [one.name for one in await client.schedules.list()]
        await client.schedules.delete(queue)
        with pytest.raises(NotFound):
            await client.schedules.get(queue)

        destination = {"type": "queue", "queue": f"{queue}-copy"}
        route = await client.routes.create(queue, destination=destination)
        assert (route.name, route.state) == (queue, "running")
        assert (await client.routes.push(queue, [{"id": 1}])).accepted == 1

        async def copied() -> bool:
            return bool(await client.pop(f"{queue}-copy@look"))

        await eventually(copied, 30)
        assert (await client.routes.pause(queue)).state == "paused"
        assert queue in [one.name for one in await client.routes.list()]
        await client.routes.delete(queue, force=True)
        status = await client.status()
        assert (status.status, status.database) == ("healthy", "connected")


def test_a_client_by_the_environment_alone(broker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_TIMEOUT", "0.2")
    monkeypatch.setenv("PENSTOCK_RETRY_FOR", "0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PENSTOCK_URL", "http://{}:{}".format(*silent.getsockname()))
        began = time.monotonic()
        with SyncClient.from_env() as client, pytest.raises(Unavailable):
            client.push("q", 1)
        assert time.monotonic() - began < 10
    monkeypatch.setenv("PENSTOCK_URL", broker.url)
    monkeypatch.setenv("PENSTOCK_TIMEOUT", "7")
    monkeypatch.setenv("PENSTOCK_RETRY_FOR", "3")
    with SyncClient.from_env() as client:
        assert client.status().version
        assert client.routes.list() is not None
        assert client.schedules.list() is not None
    monkeypatch.setenv("PENSTOCK_TIMEOUT", "soon")
    with pytest.raises(InvalidRequest, match="PENSTOCK_TIMEOUT is a number of seconds"):
        SyncClient.from_env()
