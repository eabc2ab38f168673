"""Routes into a queue and out of one: the same doors as every client, the order of what waits,
leases after a kill.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.queue_options import QueueOptions
from penstock.queues.types import Item, PopRequest
from tests.export.making import exports, http_route, status_of
from tests.export.scripted import ScriptedDestination, record
from tests.support.buffers import Store, buffering, items, real
from tests.support.wait import eventually

INTO: dict[str, Any] = {
    "destination": {"type": "queue", "queue": "q"},
    "batch": {"records": 10},
    "queue": {"workers": 1, "retry_interval": "10ms", "max_retry_delay": "50ms"},
}


def records(count: int, first: int = 0) -> list[bytes]:
    return [record(number) for number in range(first, first + count)]


async def test_while_the_database_is_down_a_route_delivers_into_the_buffer_behind_what_waits_there(
    tmp_path: Path,
):
    store = Store()
    async with (
        buffering(tmp_path / "b", store) as buffer,
        exports(tmp_path / "x", {"r": INTO}, queues=store, buffer=buffer) as routes,
    ):
        route = routes.get("r")
        store.go(False)
        await buffer.push(items('"first"'))
        await route.push(records(15))
        await eventually(lambda: route.queue.books.delivered == 15)
        assert store.payloads() == []
        await buffer.push(items('"last"'))
        store.go(True)
        await eventually(lambda: len(store.payloads()) == 17)
        assert store.payloads() == [b'"first"', *records(15), b'"last"']


async def test_a_route_does_not_overtake_qos0_events_nor_a_backlog_that_is_being_replayed(
    tmp_path: Path,
):
    store = Store()
    async with (
        buffering(tmp_path / "b", store) as buffer,
        exports(tmp_path / "x", {"r": INTO}, queues=store, buffer=buffer) as routes,
    ):
        route = routes.get("r")
        await buffer.push(items('"qos0"'), buffer_ms=60_000)  # waits for its batch
        await route.push(records(1))
        await eventually(lambda: route.queue.books.delivered == 1)
        await eventually(lambda: store.payloads() == [b'"qos0"', *records(1)])

        store.go(False)
        await buffer.push(items(*range(100)))
        may_go_on = asyncio.Event()

        async def hold(_: list[Item]) -> None:
            await may_go_on.wait()

        store.before = hold
        store.go(True)  # the replay has begun, and stands
        await route.push(records(5, 1))
        await eventually(lambda: route.delivery.inflight or route.queue.books.delivered == 6)
        may_go_on.set()
        await eventually(lambda: len(store.payloads()) == 107)
        assert store.payloads()[2:] == [
            *(str(number).encode() for number in range(100)),
            *records(5, 1),
        ]


async def test_maintenance_holds_for_routes_too(tmp_path: Path, database_url: str):
    async with (
        real(database_url, tmp_path) as (buffer, queues),
        ScriptedDestination() as destination,
    ):
        out = http_route(destination.url) | {"source": {"queue": "orders"}}
        async with exports(
            tmp_path, {"into": INTO, "out": out}, queues=queues, buffer=buffer
        ) as routes:
            into = routes.get("into")
            await buffer.maintenance.switch(push=True, pop=True)
            await into.push(records(3))
            await queues.push([Item("orders", record(7))])
            await eventually(lambda: into.queue.books.delivered == 3)
            assert (await queues.pop(PopRequest(queue="q", batch=10))).messages == []
            assert destination.ids == [], "pops are switched off"
            await buffer.maintenance.switch(push=False, pop=False)
            await eventually(lambda: destination.ids == [7])
            popped = await queues.pop(PopRequest(queue="q", batch=10, wait=True, timeout=10))
            assert [message.payload for message in popped.messages] == records(3)


async def test_a_full_queue_is_tried_again_and_nothing_is_doubled(tmp_path: Path):
    store = Store()
    store.full = lambda item: len(store.payloads()) >= 4
    async with (
        buffering(tmp_path / "b", store) as buffer,
        exports(tmp_path / "x", {"r": INTO}, queues=store, buffer=buffer) as routes,
    ):
        route = routes.get("r")
        await route.push(records(10))
        await eventually(lambda: route.delivery.last_error == "queue q is full")
        assert len(store.payloads()) == 4
        store.full = lambda item: False
        await eventually(lambda: route.queue.books.delivered == 10)
        assert store.payloads() == records(10)


async def test_real_queues_are_read_and_written_by_routes(tmp_path: Path, database_url: str):
    async with (
        real(database_url, tmp_path) as (buffer, queues),
        ScriptedDestination() as destination,
    ):
        await queues.push([Item("orders", record(number)) for number in range(60)])
        out = http_route(destination.url) | {"source": {"queue": "orders", "group": "lake"}}
        async with exports(
            tmp_path, {"out": out, "into": INTO}, queues=queues, buffer=buffer
        ) as routes:
            await eventually(lambda: len(set(destination.ids)) == 60)
            await routes.get("into").push(records(25))
            await eventually(lambda: routes.get("into").queue.count == 0)
            assert sorted(set(destination.ids)) == list(range(60))
            left = await queues.pop(PopRequest(queue="orders", group="lake", batch=100))
            assert left.messages == [], "everything was acknowledged"
            copies = await queues.pop(PopRequest(queue="q", batch=100))
            assert [json.loads(message.payload)["id"] for message in copies.messages] == list(
                range(25)
            )
            await routes.get("out").drain()
            await queues.push([Item("orders", record(number)) for number in range(7)])
            await routes.get("out").refresh()
            assert status_of(routes.get("out"))["lag"] == 7


async def test_a_lease_lives_while_its_messages_wait_for_room_and_ends_with_a_drain(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("penstock.export.sources.RENEW_AFTER_SECONDS", 0.05)

    async with (
        real(database_url, tmp_path) as (buffer, queues),
        ScriptedDestination() as destination,
    ):
        await queues.admin.configure("orders", QueueOptions(lease_time=30))
        await queues.push([Item("orders", record(number, 900)) for number in range(10)])
        spec = http_route(destination.url, batch={"records": 10, "bytes": 1000}, max_size=4)
        out = spec | {"source": {"queue": "orders"}}
        async with exports(tmp_path, {"out": out}, queues=queues, buffer=buffer) as routes:
            route = routes.get("out")
            await route.pause()
            left = "SELECT extract(epoch FROM expires_at - clock_timestamp()) AS left FROM leases"

            async def renewed() -> bool:
                return [row["left"] > 40 for row in await queues.database.fetch(left)] == [True]

            await eventually(renewed)
            assert route.queue.count == 4
            await route.resume()
            await eventually(lambda: destination.ids == list(range(10)))

            await route.pause()
            await queues.push([Item("orders", record(number, 900)) for number in range(10, 20)])
            await eventually(lambda: route.queue.count == 4)
            await route.drain()
            popped = await queues.pop(PopRequest(queue="orders", group="out", batch=10))
            assert popped.messages, "other consumers of the group need not wait for the lease"


async def test_a_route_from_queue_to_queue_keeps_the_headers(tmp_path: Path, database_url: str):
    """With and without `envelope`; a payload that looks like an envelope stays a payload."""
    alike = b'{"transactionId":"t","partition":"p","headers":{"a":"b"},"payload":1}'

    async with real(database_url, tmp_path) as (buffer, queues):
        source = {"queue": "orders"}
        into: dict[str, Any] = {
            "plain": INTO | {"source": source},
            "wrapped": INTO | {"source": source | {"envelope": True}},
        }
        for name in into:
            into[name] = into[name] | {"destination": {"type": "queue", "queue": name}}
        async with exports(tmp_path, into, queues=queues, buffer=buffer) as routes:
            headers = b'{"tenant":"a"}'
            sent = [(record(1), headers), (record(2), None), (alike, None), (alike, headers)]
            await queues.push([Item("orders", one, headers=head) for one, head in sent])
            pushed = [
                b'{"transactionId":1}',
                b'{"transactionId":"t","partition":"p","headers":{" ":""},"payload":1}',
            ]  # to the route itself, and no envelopes
            for name in into:
                await eventually(lambda n=name: routes.get(n).queue.books.delivered == 4)
                await routes.get(name).push(pushed)
                await eventually(lambda n=name: routes.get(n).queue.books.delivered == 6)
                popped = await queues.pop(PopRequest(queue=name, batch=10))
                got = [(one.payload, one.headers) for one in popped.messages]
                assert got == [*sent, *((one, None) for one in pushed)]


async def test_headers_leave_in_an_envelope_or_as_those_of_the_request(
    tmp_path: Path, database_url: str
):
    async with (
        real(database_url, tmp_path) as (buffer, queues),
        ScriptedDestination() as whole,
        ScriptedDestination() as apart,
    ):
        source = {"source": {"queue": "orders", "envelope": True}}
        raw = {"format": "raw", "header_prefix": "X-Message-", "compression": "gzip"}
        each = {
            "whole": http_route(whole.url) | source,
            "apart": http_route(apart.url, target=raw) | source,
        }
        whole.field = "payload"
        async with exports(tmp_path, each, queues=queues, buffer=buffer):
            headers = b'{"Tenant":"a","text":"\\u00e9 \\"%\\n"}'
            items = [Item("orders", record(1), transaction_id="t", headers=headers)]
            await queues.push([*items, Item("orders", record(2))])
            await eventually(lambda: sorted(whole.ids) == sorted(apart.ids) == [1, 2])
        records = [json.loads(line) for each in whole.ledger for line in each.body.splitlines()]
        assert [one["headers"] for one in records] == [{"Tenant": "a", "text": 'é "%\n'}, {}]
        assert (records[0]["transactionId"], records[0]["partition"]) == ("t", "Default")
        first, second = (one.headers for one in apart.ledger)
        assert first["x-message-tenant"] == "a"
        assert first["x-message-text"] == "%C3%A9%20%22%25%0A"
        assert not [name for name in second if name.startswith("x-message-")]
