"""Requests that only look, however slow and however many, keep nobody from pushing and popping."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import asyncpg
import httpx

from tests.support.broker import BrokerProcess

SETTINGS = {"database__pool_size": 2, "database__browse_timeout": 4}


def test_slow_requests_that_look_leave_pushes_and_pops_alone_and_are_refused_clearly(
    database_url, scratch
):
    locked, unlock = threading.Event(), threading.Event()

    async def hold() -> None:
        """Keep everybody from reading traces, as a scan of a large table would."""
        connection = await asyncpg.connect(database_url)
        async with connection.transaction():
            await connection.execute("LOCK TABLE penstock.trace_names IN ACCESS EXCLUSIVE MODE")
            locked.set()
            await asyncio.to_thread(unlock.wait, 30)
        await connection.close()

    with (
        BrokerProcess(scratch / "data", database_url=database_url, **SETTINGS) as broker,
        ThreadPoolExecutor(9) as threads,
        httpx.Client(base_url=broker.url, timeout=30) as http,
    ):

        def push() -> str:
            answer = http.post("/api/v1/push", json={"items": [{"queue": "q", "payload": 1}]})
            return str(answer.json()[0]["status"])

        assert push() == "queued"
        holding = threads.submit(asyncio.run, hold())
        try:
            assert locked.wait(10)
            looks = [threads.submit(http.get, "/api/v1/traces/names") for _ in range(8)]
            pushed = 0
            worst = 0.0
            while wait(looks, 0.03).not_done:
                began = time.monotonic()
                assert push() == "queued"
                assert http.get("/api/v1/pop/queue/q?autoAck=true").status_code == 200
                worst = max(worst, time.monotonic() - began)
                pushed += 1
        finally:
            unlock.set()
        holding.result(10)
        answers = [look.result() for look in looks]
        assert {answer.status_code for answer in answers} == {503}
        texts = sorted(answer.json()["error"] for answer in answers)
        assert sum("2 other requests are reading" in text for text in texts) == 6
        assert sum("ask for less" in text for text in texts) == 2
        assert pushed > 20
        assert worst < 3  # two seconds would be the wait for a connection
        assert http.get("/api/v1/traces/names").status_code == 200
        assert http.get("/health").json()["status"] == "healthy"
