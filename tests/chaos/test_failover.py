"""PostgreSQL really stopped, killed and frozen under load: nothing lost, nothing twice, order kept,
no client error.
"""

import asyncio
import json
import os
import time
from functools import partial
from pathlib import Path

import asyncpg
import pytest

from penstock.errors import StorageFull, Unavailable
from penstock.queues.types import PopRequest
from tests.support.buffers import (
    Producers,
    crash,
    delivered,
    freeze,
    items,
    names,
    real,
    replayed,
    thaw,
)
from tests.support.disk import small_disk
from tests.support.form import SOAK
from tests.support.wait import Stopwatch, eventually

pytestmark = pytest.mark.xdist_group("failover")  # they share a server, one after the other

watched = partial(real, acquire_timeout=2.0)  # a database that is frozen is soon down


def fsync_latency(directory: Path, share: float = 0.99) -> float:
    """What the disk itself needs for a small append and fsync at this moment."""
    collected = []
    with (directory / "probe").open("wb", buffering=0) as file:
        for _ in range(100):
            began = time.monotonic()
            file.write(b"x" * 200)
            os.fdatasync(file.fileno())
            collected.append(time.monotonic() - began)
    return sorted(collected)[int(share * len(collected))]


async def outage(buffer, queues, take_down, bring_back, *, enough=300) -> Producers:
    """Producers at work before, during and after; checked when everything is in the database."""
    producers = Producers(buffer.push)
    await producers.more(enough)
    await asyncio.to_thread(take_down)
    await eventually(lambda: not queues.database.healthy)
    down = time.monotonic()
    await producers.more(enough * 3)
    await eventually(lambda: time.monotonic() - down > 0.5)
    worst = producers.worst(down + 0.1, time.monotonic())
    disk = await asyncio.to_thread(fsync_latency, buffer.directory)
    await asyncio.to_thread(bring_back)
    await eventually(lambda: queues.database.healthy)
    queued = producers.statuses["queued"]
    await eventually(lambda: producers.statuses["queued"] > queued + enough)
    await producers.finish()
    await replayed(buffer)
    producers.check(await delivered(queues, "orders"))
    assert producers.errors == []
    assert producers.statuses["buffered"] >= enough * 3
    # 20 ms, unless the disk is too busy with others for anybody to be that fast; on a machine that
    # does other work as well there is only the difference to waiting for the database
    limit = max(0.020, 4 * disk) if SOAK else 5.0
    assert worst < limit, (
        f"p99 while down: {worst * 1000:.1f} ms, of the disk alone {disk * 1000:.1f} ms"
    )
    assert names(buffer.directory) == []
    return producers


async def test_stopped_under_load_and_started_again(server, url, scratch, soak):
    async with watched(url, scratch) as (buffer, queues):
        for _ in range(5 if soak else 1):
            await outage(buffer, queues, server.stop, server.start)
            await queues.admin.delete("orders")


async def test_killed_under_load_and_started_again(server, url, scratch):
    async with watched(url, scratch) as (buffer, queues):
        await outage(buffer, queues, lambda: crash(server), server.start)


async def test_frozen_under_load_and_thawed(server, url, scratch):
    frozen = []
    try:
        async with watched(url, scratch) as (buffer, queues):
            await outage(
                buffer, queues, lambda: frozen.extend(freeze(server)), lambda: thaw(frozen)
            )
    finally:
        thaw(frozen)


async def test_a_database_that_takes_no_writes_counts_as_down(server, url, scratch):
    async def read_only(switch):
        connection = await asyncpg.connect(
            url, server_settings={"default_transaction_read_only": "off"}
        )
        await connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {switch}")
        await connection.execute("SELECT pg_reload_conf()")
        await connection.close()

    def switch(to):
        asyncio.run(read_only(to))

    try:
        async with watched(url, scratch) as (buffer, queues):
            await outage(buffer, queues, lambda: switch("on"), lambda: switch("off"))
    finally:
        await read_only("off")


async def test_a_database_that_comes_and_goes_gets_everything_once_and_in_order(
    server, url, scratch, soak
):
    frozen = []
    async with watched(url, scratch, events_per_file=200) as (buffer, queues):

        async def push(pushed):
            sequence = int(pushed[0].payload)
            if sequence % 3:
                return await buffer.push(pushed)
            return await buffer.push(pushed, buffer_ms=sequence % 50, buffer_max=1 + sequence % 7)

        producers = Producers(push)
        for _ in range(10 if soak else 1):
            await producers.more(60)
            await asyncio.to_thread(server.stop, "immediate")
            await producers.more(60)
            await asyncio.to_thread(server.start)
            await producers.more(60)
            await asyncio.to_thread(crash, server)
            await asyncio.to_thread(server.start)  # perhaps before anybody noticed
            await producers.more(60)
            frozen.extend(await asyncio.to_thread(freeze, server))
            await producers.more(30)
            thaw(frozen)
            frozen.clear()
        await producers.finish()
        await replayed(buffer, queues.database)
        producers.check(await delivered(queues, "orders"))
        assert producers.errors == []


async def test_connections_killed_under_load_cost_nothing(server, url, scratch):
    async with watched(url, scratch) as (buffer, queues):
        producers = Producers(buffer.push)
        for _ in range(10):
            await producers.more(60)
            await queues.database.fetch(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                "AND application_name = 'penstock'"
            )
        await producers.finish()
        await replayed(buffer)
        producers.check(await delivered(queues, "orders"))
        assert producers.errors == []


async def test_pops_and_acks_say_unavailable_while_it_is_down_and_work_again_afterwards(
    server, url, scratch
):
    async with watched(url, scratch) as (buffer, queues):
        await asyncio.to_thread(server.stop)
        await buffer.push(items(1))
        with pytest.raises(Unavailable):
            await queues.pop(PopRequest(queue="q"))
        await asyncio.to_thread(server.start)
        await replayed(buffer, queues.database)
        assert [m.payload for m in (await queues.pop(PopRequest(queue="q"))).messages] == [b"1"]


async def test_a_poison_event_among_ten_thousand_is_alone_in_failed_with_its_reason(
    server, url, scratch
):
    async with watched(url, scratch) as (buffer, queues):
        await queues.database.fetch(
            # 7777
            "ALTER TABLE messages ADD CONSTRAINT no_poison CHECK (payload <> '\\x37373737'::bytea)"
        )
        await asyncio.to_thread(server.stop)
        for start in range(0, 10_000, 500):
            await buffer.push(items(*range(start, start + 500)))
        await asyncio.to_thread(server.start)
        await eventually(lambda: buffer.failed.events == 1)
        await replayed(buffer)
        got = await delivered(queues, "q")
        assert [int(payload) for payload in got["Default"]] == [
            n for n in range(10_000) if n != 7777
        ]
        [name, reason] = names(buffer.directory / "failed")
        assert json.loads((buffer.directory / "failed" / name).read_text())["payload"] == 7777
        assert "refused" in json.loads((buffer.directory / "failed" / reason).read_text())["error"]
        await queues.database.fetch("ALTER TABLE messages DROP CONSTRAINT no_poison")
        await buffer.retry_failed(now=True)
        assert (await delivered(queues, "q"))["Default"] == [b"7777"]


async def test_ten_thousand_events_are_recovered_at_start_within_two_seconds(server, url, scratch):
    async with watched(url, scratch) as (buffer, queues):
        await asyncio.to_thread(server.stop)
        for start in range(0, 10_000, 1000):
            await buffer.push(items(*range(start, start + 1000)))
    await asyncio.to_thread(server.start)
    watch = Stopwatch()
    async with watched(url, scratch) as (buffer, queues):
        took = watch.seconds
        got = await delivered(queues, "q")
        assert [int(payload) for payload in got["Default"]] == list(range(10_000))
    assert took < 2.0


async def test_a_full_disk_refuses_clearly_loses_nothing_and_recovers_by_itself(
    server, url, scratch
):
    settings = {"free_space_reserve": 64 << 10, "events_per_file": 100}
    with small_disk(scratch / "buffers", "1m") as disk:
        async with watched(url, scratch, **settings) as (buffer, queues):
            await asyncio.to_thread(server.stop)
            accepted, refused = [], []
            for n in range(600):
                try:
                    await buffer.push(items(f'"{"x" * 2000}{n:06d}"'))
                    accepted.append(n)
                except StorageFull as error:
                    refused.append(str(error))
            assert all("full" in text for text in refused)
            assert refused
            assert len(accepted) > 300
            assert buffer.status.report().failover.bytes < 1 << 20
            await asyncio.to_thread(server.start)
            await replayed(buffer)
            got = await delivered(queues, "q")
            assert [int(payload[-7:-1]) for payload in got["Default"]] == accepted
            await eventually(lambda: names(disk) == [])
            await asyncio.to_thread(server.stop)
            assert (await buffer.push(items(1)))[0].status == "buffered"  # room again, without help
            await asyncio.to_thread(server.start)
            await replayed(buffer)
