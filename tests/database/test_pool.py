"""The pool of connections: who waits gets one in turn, and a connection that cannot be used is not
handed on.
"""

import asyncio
from typing import Any

import asyncpg
import pytest

from penstock.database import pool as pools
from penstock.database.pool import Pool
from tests.support.wait import eventually


async def test_connections_are_shared_in_turn_and_no_more_are_opened(database_url: str) -> None:
    opened = 0

    async def connect() -> Any:
        nonlocal opened
        opened += 1
        return await asyncpg.connect(database_url)

    pool = Pool(connect, 2, timeout=30)
    order: list[int] = []

    async def use(number: int) -> None:
        connection = await pool.acquire()
        assert await connection.fetchval("SELECT $1::int", number) == number
        order.append(number)
        pool.release(connection, usable=True)

    first, second = await pool.acquire(), await pool.acquire()
    waiting = [asyncio.create_task(use(number)) for number in range(5)]
    await asyncio.sleep(0)
    pool.release(first, usable=True)
    await asyncio.gather(*waiting)
    pool.release(second, usable=True)
    assert (order, opened, pool.size, pool.idle) == ([0, 1, 2, 3, 4], 2, 2, 2)
    await pool.close()
    assert first.is_closed()


async def test_a_connection_that_cannot_be_used_is_not_handed_on(database_url: str) -> None:
    pool = Pool(lambda: asyncpg.connect(database_url), 1, timeout=30)
    closed = await pool.acquire()
    pool.release(closed, usable=True)
    await closed.close()  # as a server does that restarts
    failed = await pool.acquire()
    assert failed is not closed
    pool.release(failed, usable=False)
    halfway = await pool.acquire()
    assert halfway is not failed
    await halfway.execute("BEGIN")
    pool.release(halfway, usable=True)
    clean = await pool.acquire()
    assert not clean.is_in_transaction()
    pool.release(clean, usable=True)
    await pool.close()


class Idle:
    """A connection on which nothing happens."""

    def is_closed(self) -> bool:
        return False

    def is_in_transaction(self) -> bool:
        return False

    async def close(self, timeout: float) -> None: ...

    def terminate(self) -> None: ...


async def test_a_wait_has_a_limit_and_a_failed_connect_takes_no_room() -> None:
    fails = True

    async def connect() -> Idle:
        if fails:
            raise ConnectionRefusedError
        return Idle()

    pool = Pool(connect, 1, timeout=0.05)
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            await pool.acquire()
    fails = False
    connection = await pool.acquire()
    with pytest.raises(TimeoutError):
        await pool.acquire()
    pool.release(connection, usable=True)
    assert await pool.acquire() is connection
    pool.release(connection, usable=True)
    await pool.close()


async def test_connections_that_nobody_uses_are_closed(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "IDLE_SECONDS", 0.05)
    pool = Pool(lambda: asyncpg.connect(database_url), 3, timeout=30)
    connections = [await pool.acquire() for _ in range(3)]
    for connection in connections:
        pool.release(connection, usable=True)
    await eventually(lambda: pool.size == 0)
    assert all(connection.is_closed() for connection in connections)
    await pool.close()
