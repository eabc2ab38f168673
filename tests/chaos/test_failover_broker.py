"""kill -9 of a real broker during an outage, during rotation and during recovery; two brokers on
one directory.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from penstock import Client, Message
from penstock.config.schema import DatabaseSettings as DatabaseSettings
from penstock.config.schema import QueuesSettings as QueueSettings
from penstock.database import Database
from penstock.metrics import Metrics
from penstock.queues.engine import Queues
from penstock.queues.schema import SCHEMA
from tests.support.broker import BrokerProcess
from tests.support.buffers import Producers, delivered, names
from tests.support.wait import DATABASE_TIMEOUT, eventually, until

pytestmark = pytest.mark.xdist_group("failover_broker")  # they share a server, one after the other

SETTINGS = {
    "database__acquire_timeout": 0.5,
    "buffer__events_per_file": 50,
    "buffer__free_space_reserve": 0,
}


def pusher(client: Client):
    async def push(items):
        [item] = items
        return [
            await client.push(
                item.queue,
                msgspec.Raw(item.payload),
                partition=item.partition,
                transaction_id=f"{item.partition}-{item.payload.decode()}",
            )
        ]

    return push


async def stored(url: str, scratch: Path, queue: str = "orders") -> dict[str, list[bytes]]:
    metrics = Metrics()
    database = Database(DatabaseSettings(url=url), scratch, metrics, SCHEMA)
    queues = Queues(database, QueueSettings(), metrics)
    await database.start()
    await queues.start()
    try:
        return await delivered(queues, queue)
    finally:
        await queues.stop()
        await database.stop()


def status(broker: BrokerProcess) -> dict:
    return httpx.get(f"{broker.url}/api/v1/status/buffers").json()


async def drained(broker: BrokerProcess) -> None:
    await eventually(
        lambda: status(broker)["pending"] == 0 and status(broker)["dbHealthy"], timeout=30
    )


async def test_killed_during_an_outage_during_rotation_and_during_recovery_it_loses_nothing(
    server, url, scratch, soak
):
    broker = BrokerProcess(scratch / "data", database_url=url, **SETTINGS).start()
    async with Client(broker.url, retry_for=60) as client:
        producers = Producers(pusher(client), count=4)
        try:
            for turn in range(10 if soak else 1):
                await producers.more(50)
                await asyncio.to_thread(server.stop)
                # Fifty events to a file: it rotates all the time.
                await producers.more(400 + 37 * turn, timeout=40)
                assert len(names(scratch / "data/.penstock/buffers")) > 3
                broker.kill()
                await asyncio.to_thread(
                    broker.start
                )  # with the database still down it serves at once
                report = status(broker)
                assert report["dbHealthy"] is False
                assert report["failover"]["files"] > 3
                await producers.more(100, timeout=40)
                broker.kill()
                await asyncio.to_thread(server.start)
                replayed = broker.log.count("replay complete")
                await asyncio.to_thread(broker.start, wait=False)
                await eventually(
                    lambda n=replayed: broker.log.count("replay complete") > n + 2, timeout=40
                )
                broker.kill()  # in the middle of its recovery
                await asyncio.to_thread(broker.start)
                await producers.more(100, timeout=40)
        finally:
            await producers.finish()
        await drained(broker)
        assert producers.errors == []
        assert names(scratch / "data/.penstock/buffers") == []
        assert broker.stop() == 0
    producers.check(await stored(url, scratch))
    assert producers.statuses["buffered"] >= 400


async def test_a_broker_adopts_and_replays_the_files_of_one_that_was_killed(
    server, url, scratch, spans
):
    shared = scratch / "shared"
    brokers = [
        BrokerProcess(
            scratch / f"data{n}", database_url=url, buffer__dir=shared, **SETTINGS
        ).start()
        for n in range(2)
    ]
    try:
        await asyncio.to_thread(server.stop)
        loads = []
        for number, broker in enumerate(brokers):
            async with Client(broker.url) as client:
                producers = Producers(pusher(client), count=2, queue=f"orders{number}")
                await producers.more(200, timeout=30)
                await producers.finish()
                loads.append(producers)
        with spans.tracer.start_as_current_span("POST /orders"):
            async with Client(brokers[0].url) as client:
                assert (await client.push("traced", 1)).status == "buffered"
        before = status(brokers[1])["pending"]
        assert before == loads[1].total  # while both live, each has its own
        brokers[0].kill()
        await eventually(
            lambda: status(brokers[1])["pending"] == loads[0].total + loads[1].total + 1
        )
        await asyncio.to_thread(server.start)
        await drained(brokers[1])
        assert names(shared) == []
        for number, producers in enumerate(loads):
            assert producers.errors == []
            producers.check(await stored(url, scratch, f"orders{number}"))
        async with Client(brokers[1].url) as client:

            @client.consumer("traced")
            async def handle(_: Message) -> None:
                client.stop()

            await client.run()
        # the worker goes on with the trace of a push that no database saw
        assert spans.trace_of("process traced") == spans.trace_of("POST /orders")
        [process], [send] = spans("process traced"), spans("send traced")
        assert process.parent.span_id == send.context.span_id
    finally:
        for broker in brokers:
            broker.stop()


def test_what_a_client_sees_of_an_outage(server, url, scratch):
    settings = SETTINGS | {"database__acquire_timeout": DATABASE_TIMEOUT}
    with (
        BrokerProcess(scratch / "data", database_url=url, **settings) as broker,
        httpx.Client(base_url=broker.url) as http,
    ):

        def push(n, **more):
            item = {"queue": "q", "payload": {"n": n}}
            return http.post("/api/v1/push", json={"items": [item], **more})

        answer = push(0, bufferMs=50, bufferMax=100)
        assert (answer.status_code, answer.json()) == (
            201,
            {"pushed": True, "qos0": True, "dbHealthy": True},
        )
        assert push(0, bufferMs=-1).status_code == 400
        until(lambda: status(broker)["qos0"]["flushed"] == 1)
        [stored] = push(1).json()
        assert stored["status"] == "queued"
        server.stop()
        answer = push(2)
        assert answer.status_code == 201
        [result] = answer.json()
        assert (result["index"], result["status"], result["queue"], result["partition"]) == (
            0,
            "buffered",
            "q",
            "Default",
        )
        assert push(3, bufferMs=50).json() == {"pushed": True, "qos0": True, "dbHealthy": False}
        answer = http.get("/health")
        assert (answer.status_code, answer.json()["database"]) == (503, "disconnected")
        answer = http.get("/api/v1/pop/queue/q")
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        answer = http.post(
            "/api/v1/ack",
            json={"transactionId": stored["transaction_id"], "partitionId": stored["partition_id"]},
        )
        assert answer.status_code == 503
        assert http.get("/metrics.json").json()["file_buffer"] == {
            "pending": 2, "flushed": 1, "failed": 0, "db_healthy": False,
        }  # fmt: skip
        assert 'penstock_buffer_pending{kind="failover"} 2.0' in http.get("/metrics").text
        server.start()
        until(lambda: status(broker)["pending"] == 0 and status(broker)["dbHealthy"])
        got = http.get("/api/v1/pop/queue/q?batch=10&autoAck=true").json()["messages"]
        assert [message["data"]["n"] for message in got] == [0, 1, 2, 3]
        for line in (
            "Database connection failed, switching to file buffer",
            "PostgreSQL recovery detected! Batch flush succeeded",
            "Buffered 2 events to failover_",
            "Failover replay complete, deleted file failover_",
        ):
            assert line in broker.log


def test_maintenance_modes_hold_on_every_broker_and_over_restarts(url, scratch):
    brokers = [BrokerProcess(scratch / f"data{n}", database_url=url, **SETTINGS) for n in range(2)]
    with brokers[0] as one, brokers[1] as two:

        def push(broker, n):
            items = [{"queue": "q", "payload": n}]
            answer = httpx.post(f"{broker.url}/api/v1/push", json={"items": items})
            return answer.json()[0]["status"]

        def mode(broker):
            return httpx.get(f"{broker.url}/api/v1/system/maintenance").json()

        def switch(broker, enabled, pops=""):
            path = f"{broker.url}/api/v1/system/maintenance{pops}"
            return httpx.post(path, json={"enabled": enabled})

        def pop(broker, **params):
            params = {"autoAck": "true", "batch": 10, **params}
            answer = httpx.get(f"{broker.url}/api/v1/pop/queue/q", params=params)
            if answer.status_code != 200:
                return answer.status_code
            return [m["data"] for m in answer.json()["messages"]]

        assert push(one, 1) == "queued"
        assert switch(one, "yes").status_code == 400
        assert switch(one, True).json()["maintenanceMode"] is True
        until(lambda: mode(two)["maintenanceMode"])
        assert [push(one, 2), push(one, 3)] == ["buffered", "buffered"]
        assert mode(one)["bufferedMessages"] == 2
        assert pop(two) == [1]
        one.stop()
        one.start()
        assert mode(one)["maintenanceMode"] is True
        assert mode(one)["bufferedMessages"] == 2
        assert switch(two, True, "/pop").json()["popMaintenanceMode"] is True
        assert switch(two, False).json()["maintenanceMode"] is False
        until(lambda: mode(one)["popMaintenanceMode"] and mode(one)["bufferedMessages"] == 0)
        assert pop(one) == 204
        began = time.monotonic()
        assert pop(one, wait="true", timeout=300) == 204
        assert time.monotonic() - began > 0.25
        switch(one, False, "/pop")
        until(lambda: not mode(two)["popMaintenanceMode"])
        assert pop(two) == [2, 3]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(pop, one, wait="true", timeout=30_000)
            until(lambda: "penstock_queue_waiting_pops 1.0" in httpx.get(f"{one.url}/metrics").text)
            switch(two, True, "/pop")
            assert waiting.result(20) == 204  # at once, although it had time to wait
            again = pool.submit(pop, one, wait="true", timeout=30_000)
            switch(two, False, "/pop")
            assert push(two, 4) == "queued"
            assert again.result(20) == [4]
