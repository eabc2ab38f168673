"""A broker that is frozen (a suspended machine, a stopped process) is not gone: its connections
stay. What it holds in the database must not hold up others for long, and it must wake up well.
"""

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import asyncpg
import httpx
import pytest

from tests.support.broker import BrokerProcess
from tests.support.postgres import Postgres
from tests.support.wait import until

IDLE = """SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
             AND application_name = 'penstock' AND state = 'idle in transaction'
             AND backend_xid IS NOT NULL"""


def _open_transactions(url: str) -> int:
    async def ask() -> int:
        connection = await asyncpg.connect(url)
        try:
            return int(await connection.fetchval(IDLE))
        finally:
            await connection.close()

    return asyncio.run(ask())


@pytest.mark.timeout(300)
def test_a_broker_frozen_in_a_transaction_does_not_hold_up_the_others(
    tmp_path: Path, database_url: str
) -> None:
    with (
        BrokerProcess(tmp_path / "one", database_url=database_url) as frozen,
        BrokerProcess(tmp_path / "two", database_url=database_url) as other,
        httpx.Client(base_url=other.url, timeout=100) as client,
    ):
        assert frozen.process is not None
        committed: list[int] = []
        statuses: set[int] = set()
        ended = threading.Event()

        def transact() -> None:
            number = 0
            with httpx.Client(base_url=frozen.url, timeout=200) as busy:
                while not ended.is_set():
                    number += 1
                    items = [{"queue": "q", "payload": number}]
                    body = {"operations": [{"type": "push", "items": items}]}
                    answer = busy.post("/api/v1/transaction", json=body)
                    statuses.add(answer.status_code)
                    if answer.status_code < 300:
                        assert answer.json()["success"]
                        committed.append(number)

        worker = threading.Thread(target=transact)
        worker.start()

        def frozen_in_a_transaction() -> bool:
            frozen.process.send_signal(signal.SIGSTOP)
            if _open_transactions(database_url):
                return True
            frozen.process.send_signal(signal.SIGCONT)
            return False

        until(lambda: len(committed) > 3)
        try:
            until(frozen_in_a_transaction, 120)
            item = {"queue": "q", "payload": "from the other"}
            pushed = client.post("/api/v1/push", json={"items": [item]})
            assert pushed.json()[0]["status"] == "queued"
            until(lambda: not _open_transactions(database_url))
        finally:
            frozen.process.send_signal(signal.SIGCONT)
        enough = len(committed) + 3
        until(lambda: len(committed) > enough)
        ended.set()
        worker.join()
        assert statuses <= {200, 503}
        stored = []
        pop = "/api/v1/pop/queue/q?batch=1000&autoAck=true"
        while (popped := client.get(pop)).status_code == 200:
            stored += [message["data"] for message in popped.json()["messages"]]
        assert "from the other" in stored
        assert len(stored) == len(set(stored))
        assert set(committed) <= set(stored)


# A broker's connection that asks for 2 GB.
READER = """
import asyncio, sys
from pathlib import Path
from penstock.config import schema
from penstock.database import Database
from penstock.metrics import Metrics
from penstock.queues.schema import SCHEMA

async def main():
    database = Database(schema.DatabaseSettings(url=sys.argv[1]), Path("/nonexistent"), Metrics(), SCHEMA)
    await database.start()
    await database.fetch("SELECT repeat('x', 1000) FROM generate_series(1, 2000000)")

asyncio.run(main())
"""
BLOCKED = """SELECT count(*) FROM pg_stat_activity
              WHERE application_name = 'penstock' AND wait_event = 'ClientWrite'"""


@pytest.mark.timeout(300)
def test_what_a_frozen_broker_takes_no_answer_of_comes_to_an_end() -> None:
    """Over TCP, as brokers on other machines are. The limit of a statement does not count while the
    server waits for its client."""
    with Postgres("alone") as server:
        reader = subprocess.Popen([sys.executable, "-c", READER, server.url])

        def frozen_while_it_reads() -> bool:
            reader.send_signal(signal.SIGSTOP)
            if server.sql(BLOCKED):
                return True
            reader.send_signal(signal.SIGCONT)
            assert reader.poll() is None
            return False

        try:
            until(frozen_while_it_reads, 120)
            until(lambda: not server.sql(BLOCKED), 120)
        finally:
            reader.kill()
            reader.wait()
