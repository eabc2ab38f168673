"""The outbox on the connections that applications have."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from penstock import outbox
from penstock.errors import InvalidRequest
from penstock.outbox import sync as sync_outbox
from tests.outbox.support import leased, rows
from tests.queues.support import pop, push, running, values

DEAD = "SELECT d.error FROM dead_letters d JOIN queues q ON q.id = d.queue_id WHERE q.name = $1"
EFFECT = "INSERT INTO effects VALUES ('{queue}', '{work}')"


@asynccontextmanager
async def with_asyncpg(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    async with connection.transaction():
        yield connection
    await connection.close()


@asynccontextmanager
async def with_asyncpg_pool(url: str) -> AsyncIterator[Any]:
    async with (
        asyncpg.create_pool(url, min_size=1, max_size=1) as pool,
        pool.acquire() as connection,
        connection.transaction(),
    ):
        yield connection


@asynccontextmanager
async def with_psycopg(url: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(url, row_factory=dict_row) as connection:
        yield connection


@asynccontextmanager
async def with_sqlalchemy(url: str) -> AsyncIterator[Any]:
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(url), poolclass=NullPool
    )
    async with engine.begin() as connection:
        yield connection


@asynccontextmanager
async def with_sqlalchemy_session(url: str) -> AsyncIterator[Any]:
    engine = create_async_engine(
        "postgresql+psycopg://",
        async_creator=lambda: psycopg.AsyncConnection.connect(url),
        poolclass=NullPool,
    )
    async with AsyncSession(engine) as session, session.begin():
        yield session


@contextmanager
def with_sync_psycopg(url: str) -> Iterator[Any]:
    with psycopg.connect(url, row_factory=dict_row) as connection:
        yield connection


def _engine(url: str) -> Any:
    return create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(url), poolclass=NullPool
    )


@contextmanager
def with_sync_sqlalchemy(url: str) -> Iterator[Any]:
    with _engine(url).begin() as connection:
        yield connection


@contextmanager
def with_sync_sqlalchemy_session(url: str) -> Iterator[Any]:
    with Session(_engine(url)) as session, session.begin():
        yield session


ASYNC = [with_asyncpg, with_asyncpg_pool, with_psycopg, with_sqlalchemy, with_sqlalchemy_session]
SYNC = [with_sync_psycopg, with_sync_sqlalchemy, with_sync_sqlalchemy_session]


def statement(connection: Any, sql: str) -> Any:
    return text(sql) if "sqlalchemy" in type(connection).__module__ else sql


class Stop(Exception):
    pass


@pytest.mark.parametrize("opened", ASYNC)
async def test_a_message_and_an_ack_share_the_fate_of_an_asynchronous_transaction(
    database_url: str, queue: str, opened: Callable[[str], Any]
) -> None:
    async with running(database_url) as queues:
        with pytest.raises(Stop):
            async with opened(database_url) as connection:
                await outbox.push(connection, queue, {"n": 0})
                raise Stop
        assert await rows(queues, "SELECT 1 FROM queues WHERE name = $1", queue) == []
        async with opened(database_url) as connection:
            first = await outbox.push(connection, queue, {"n": 1}, partition="p")
            both = await outbox.push_many(connection, queue, ["é", None], partition="p")
            assert (await pop(queues, queue)).messages == []
        popped = await pop(queues, queue)
        assert values(popped) == [{"n": 1}, "é", None]
        assert [message.transaction_id for message in popped.messages] == [first, *both]
        messages = [leased(message) for message in popped.messages]
        with pytest.raises(Stop):
            async with opened(database_url) as connection:
                await outbox.ack(connection, messages[0])
                raise Stop
        async with opened(database_url) as connection:
            await connection.execute(statement(connection, EFFECT.format(queue=queue, work="one")))
            await outbox.ack(connection, messages[0])
            await outbox.retry(connection, messages[1])
            await outbox.dead_letter(connection, messages[2], "no use")
        with pytest.raises(outbox.LeaseLost, match="is lost"):
            async with opened(database_url) as connection:
                await outbox.ack(connection, messages[0])
        assert values(await pop(queues, queue)) == ["é"]
        assert await rows(queues, "SELECT work FROM public.effects WHERE queue = $1", queue) == [
            ("one",)
        ]
        assert await rows(queues, DEAD, queue) == [("no use",)]


@pytest.mark.parametrize("opened", SYNC)
async def test_a_message_and_an_ack_share_the_fate_of_a_blocking_transaction(
    database_url: str, queue: str, opened: Callable[[str], Any]
) -> None:
    def produce() -> list[str]:
        with pytest.raises(Stop), opened(database_url) as connection:
            sync_outbox.push(connection, queue, {"n": 0})
            raise Stop
        with opened(database_url) as connection:
            return [
                sync_outbox.push(connection, queue, {"n": 1}),
                *sync_outbox.push_many(connection, queue, [2, 3]),
            ]

    def consume(messages: list[Any]) -> None:
        with opened(database_url) as connection:
            connection.execute(statement(connection, EFFECT.format(queue=queue, work="two")))
            sync_outbox.ack(connection, messages[0])
            sync_outbox.retry(connection, messages[1])
            sync_outbox.dead_letter(connection, messages[2], "no use")
        with pytest.raises(sync_outbox.LeaseLost), opened(database_url) as connection:
            sync_outbox.ack(connection, messages[0])

    async with running(database_url) as queues:
        pushed = await asyncio.to_thread(produce)
        popped = await pop(queues, queue)
        assert [message.transaction_id for message in popped.messages] == pushed
        await asyncio.to_thread(consume, [leased(message) for message in popped.messages])
        assert values(await pop(queues, queue)) == [2]
        assert await rows(queues, "SELECT work FROM public.effects WHERE queue = $1", queue) == [
            ("two",)
        ]


async def test_what_cannot_work_is_refused_with_what_to_do(database_url: str, queue: str) -> None:
    async with running(database_url) as queues:
        await push(queues, queue, 1)
        (message,) = (await pop(queues, queue, auto_ack=True)).messages
        connection = await asyncpg.connect(database_url)
        blocking = psycopg.connect(database_url, autocommit=True)
        for call, problem in (
            (lambda: outbox.push(connection, queue, 1), "open transaction"),
            (lambda: outbox.push(blocking, queue, 1), "penstock.outbox.sync"),
            (lambda: outbox.push(object(), queue, 1), "outbox_push"),
            (lambda: outbox.ack(connection, leased(message)), "auto_ack"),
        ):
            with pytest.raises(InvalidRequest, match=problem):
                await call()
        with pytest.raises(InvalidRequest, match="open transaction"):
            sync_outbox.push(blocking, queue, 1)
        with pytest.raises(InvalidRequest, match=r"use penstock\.outbox"):
            sync_outbox.push(connection, queue, 1)
        blocking.close()
        for payload, problem in ((float("nan"), "nan"), (b"x", "bytes")):
            with pytest.raises(InvalidRequest, match=problem):
                async with connection.transaction():
                    await outbox.push(connection, queue, payload)
        for name in ("", "x" * 513):
            with pytest.raises(InvalidRequest, match="1 to 512"):
                async with connection.transaction():
                    await outbox.push(connection, name, 1)
        await connection.close()
