"""What the outbox promises: one commit, the order and deduplication of any push, and nobody waits."""

import asyncio
import json
import statistics
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

import penstock.cli.database  # noqa: F401  # adds its commands
from penstock import outbox
from penstock.cli import app
from penstock.database.migrate import migrate
from penstock.errors import InvalidRequest
from penstock.protocol.headers import decode
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Item, PopRequest
from penstock.queues.schema import SCHEMA
from tests.client.test_payloads import AsAttrs, AsDataclass, AsModel, AsStruct
from tests.conftest import create_database
from tests.outbox.support import leased, rows
from tests.queues.support import answer, pop, push, running, values
from tests.support.cli import CliRunner
from tests.support.wait import eventually

HOUR = 3600.0  # nothing is noticed by looking again


@asynccontextmanager
async def connected(url: str, role: str | None = None) -> Any:
    connection = await asyncpg.connect(url)
    if role:
        await connection.execute(f"SET ROLE {role}")
    yield connection
    await connection.close()


async def test_waiting_consumers_are_woken_by_the_commit(
    database_url: str, queue: str, soak: bool
) -> None:
    async with running(database_url, poll_interval=HOUR) as queues:
        await push(queues, queue, 0, partition="p")
        await answer(queues, (await pop(queues, queue)).messages)
        waits = []
        async with connected(database_url) as connection:
            for turn in range(200 if soak else 3):
                before, heard = queues.waiting.parked, queues.waiting.heard
                waiting = asyncio.ensure_future(
                    queues.pop(PopRequest(queue=queue, wait=True, timeout=60))
                )
                await eventually(lambda before=before: queues.waiting.parked > before)
                async with connection.transaction():
                    await outbox.push(connection, queue, turn, partition="p")
                committed = time.perf_counter()
                popped = await waiting
                waits.append(1000 * (time.perf_counter() - committed))
                assert values(popped) == [turn]
                assert queues.waiting.heard == heard + 1  # a pop looks again by itself, but later
                # the ack in a transaction of ours lets the next consumer in at once too
                await push(queues, queue, "next", partition="p")
                waiting = asyncio.ensure_future(
                    queues.pop(PopRequest(queue=queue, wait=True, timeout=60))
                )
                await eventually(lambda before=before: queues.waiting.parked > before)
                async with connection.transaction():
                    await outbox.ack(connection, leased(popped.messages[0]))
                popped = await waiting
                assert values(popped) == ["next"]
                await answer(queues, popped.messages)
        print(f"woken {statistics.median(waits):.1f} ms after the commit, worst {max(waits):.1f}")
        if soak:
            assert statistics.median(waits) < 50


async def test_models_are_pushed_as_objects(database_url: str, queue: str) -> None:
    models = [kind(id=7) for kind in (AsAttrs, AsDataclass, AsModel, AsStruct)]
    async with running(database_url) as queues, connected(database_url) as connection:
        async with connection.transaction():
            await outbox.push_many(connection, queue, models)
            for model in models:
                await outbox.push(connection, queue, model)
        assert values(await pop(queues, queue)) == [{"id": 7, "price": 1.5}] * 8


async def test_order_and_deduplication_are_those_of_any_push(database_url: str, queue: str) -> None:
    async with running(database_url) as queues:
        async with connected(database_url) as one, connected(database_url) as two:
            slow, quick = one.transaction(), two.transaction()
            await slow.start()
            await outbox.push(one, queue, "slow", partition="p", transaction_id="t-slow")
            await quick.start()
            await outbox.push(two, queue, "quick", partition="p")
            await outbox.push(two, queue, "twin", partition="p", transaction_id="t-twin")
            await outbox.push(two, queue, "twin again", partition="p", transaction_id="t-twin")
            await outbox.push(two, queue, "elsewhere", partition="q", transaction_id="t-twin")
            await quick.commit()
            await push(queues, queue, "by a broker", partition="p")
            await slow.commit()
            async with one.transaction():
                await outbox.push(one, queue, "known", partition="p", transaction_id="t-slow")
                await outbox.push_many(one, queue, list(range(300)), partition="p")
            (known,) = await queues.push([Item(queue, b"1", "p", transaction_id="t-twin")])
            assert known.status == "duplicate"
        popped = await pop(queues, queue, batch=1000, partition="p")
        assert values(popped) == ["quick", "twin", "by a broker", "slow", *range(300)]
        assert [message.seq for message in popped.messages] == list(range(1, 305))
        assert values(await pop(queues, queue, partition="q")) == ["elsewhere"]
        counts = await rows(
            queues, "SELECT pushed FROM queue_counts((SELECT id FROM queues WHERE name = $1))"
            " WHERE group_id = 0", queue,
        )  # fmt: skip
        assert counts == [(305,)]


async def test_headers_travel_with_the_message(database_url: str, queue: str) -> None:
    async with running(database_url) as queues:
        async with connected(database_url) as connection:
            async with connection.transaction():
                await outbox.push(connection, queue, 1, headers={"tenant": "é", "a": "b"})
                await outbox.push(connection, queue, 2, headers={})
                await outbox.push_many(connection, queue, [3, 4], headers={"tenant": "x"})
            for headers in ({"no spaces": "x"}, {"a": "x" * 8192}, dict.fromkeys(map(str, range(65)), "")):  # fmt: skip
                with pytest.raises(InvalidRequest, match="header"):
                    async with connection.transaction():
                        await outbox.push(connection, queue, 1, headers=headers)
                with pytest.raises(asyncpg.InvalidParameterValueError, match="header"):
                    await connection.execute(
                        "SELECT penstock.outbox_push($1, '1', headers => $2)",
                        *(queue, json.dumps(headers)),
                    )
        messages = [message.headers for message in (await pop(queues, queue)).messages]
        assert [text and decode(text) for text in messages] == [
            {"tenant": "é", "a": "b"}, None, {"tenant": "x"}, {"tenant": "x"},
        ]  # fmt: skip


async def test_a_message_may_be_for_later(database_url: str, queue: str) -> None:
    async with running(database_url, poll_interval=HOUR) as queues:
        later = datetime.now(UTC) + timedelta(days=1)
        async with connected(database_url) as connection:
            async with connection.transaction():
                await outbox.push(connection, queue, "tomorrow", deliver_at=later)
                await outbox.push(connection, queue, "soon", delay=0.3)
                await outbox.push(connection, queue, "now")
            first = await pop(queues, queue, 1)
            await answer(queues, first.messages)
            second = await pop(queues, queue, wait=True, timeout=60)  # brokers were told of it
            assert values(first) + values(second) == ["now", "soon"]
            waited = second.messages[0].created_at - first.messages[0].created_at
            assert waited >= timedelta(seconds=0.3)
            waiting = (await queues.scheduled.listing(queue)).messages
            assert [message.deliver_at for message in waiting] == [later]
            for wrong in ({"delay": -1}, {"delay": 1e12}, {"delay": 1, "deliver_at": later}):
                with pytest.raises(InvalidRequest, match="delay"):
                    async with connection.transaction():
                        await outbox.push(connection, queue, 1, **wrong)


async def test_a_savepoint_takes_back_what_was_asked_for_since(
    database_url: str, queue: str
) -> None:
    async with running(database_url) as queues:
        async with connected(database_url) as connection, connection.transaction():
            for kept in (False, True, False):
                inner = connection.transaction()
                await inner.start()
                await outbox.push(connection, queue, kept)
                await (inner.commit() if kept else inner.rollback())
            await outbox.push(connection, queue, "last")
        assert values(await pop(queues, queue)) == [True, "last"]
        # nothing is left behind
        assert await rows(queues, "SELECT 1 FROM outbox") == []


async def test_a_long_transaction_keeps_nobody_waiting(database_url: str, queue: str) -> None:
    """Not even those who use its own partition, a queue with maxSize, or the queue's name."""

    async with running(database_url) as queues:
        await queues.admin.configure(queue, QueueOptions(max_size=1000, ordering="none"))
        await push(queues, queue, "mine", "yours", "also yours", partition="p")
        mine, yours = [(await pop(queues, queue, 1)).messages[0] for _ in range(2)]
        async with connected(database_url) as connection:
            long = connection.transaction()
            await long.start()
            await outbox.push(connection, queue, "late", partition="p")
            await outbox.push(connection, queue, "late", partition="new")
            await outbox.push(connection, f"{queue}-new", "late")
            await outbox.ack(connection, leased(mine))
            begun = time.perf_counter()
            async with asyncio.timeout(60):
                await push(queues, queue, "a", partition="p")
                await push(queues, queue, "a", partition="new")
                await push(queues, f"{queue}-new", "a")
                await answer(queues, [yours])
                taken = values(await pop(queues, queue))
                assert taken
                assert len(values(await pop(queues, queue, group="another", partitions=9))) == 5
                assert (await queues.extend(mine.lease_id, 600)).success
                await queues.upkeep.roll_up()
                await queues.admin.configure(queue, QueueOptions(max_size=2000, ordering="none"))
            print(f"beside it: {1000 * (time.perf_counter() - begun):.0f} ms for ten calls")
            await long.commit()
        popped = await pop(queues, f"{queue}-new", group="another", partitions=9)
        assert values(popped) == ["a", "late"]
        # ours is done
        taken += values(await pop(queues, queue, partitions=9))
        assert sorted(taken) == ["a", "a", "also yours", "late", "late"]


async def test_a_lease_that_is_lost_before_the_commit_undoes_the_work(
    database_url: str, queue: str
) -> None:
    async with running(database_url) as queues:
        await queues.admin.configure(queue, QueueOptions(lease_time=1, retry_limit=9))
        await push(queues, queue, "work")
        (lost,) = (await pop(queues, queue)).messages
        async with connected(database_url) as connection:
            late = connection.transaction()
            await late.start()
            await connection.execute("INSERT INTO effects VALUES ($1, 'late')", queue)
            await outbox.ack(connection, leased(lost))
            popped = await queues.pop(PopRequest(queue=queue, wait=True, timeout=60))
            async with connected(database_url) as other, other.transaction():
                await other.execute("INSERT INTO effects VALUES ($1, 'once')", queue)
                await outbox.ack(other, leased(popped.messages[0]))
            with pytest.raises(asyncpg.PostgresError, match="lease of message") as failed:
                await late.commit()
            assert outbox.is_lease_lost(failed.value)
            assert not outbox.is_lease_lost(ValueError())
            # of two commits at the same time one succeeds
            await push(queues, queue, "again")
            (message,) = (await pop(queues, queue)).messages
            async with connected(database_url) as other:
                first, second = connection.transaction(), other.transaction()
                await first.start()
                await second.start()
                await outbox.ack(connection, leased(message))
                await outbox.ack(other, leased(message))
                ends = await asyncio.gather(first.commit(), second.commit(), return_exceptions=True)
            assert sorted(end is not None and outbox.is_lease_lost(end) for end in ends) == [
                False,
                True,
            ]
        assert await rows(queues, "SELECT work FROM public.effects WHERE queue = $1", queue) == [
            ("once",)
        ]


async def test_what_the_queue_does_not_take_fails_the_call_or_the_commit(
    database_url: str, queue: str
) -> None:
    async with running(database_url, encryption_key="00" * 32) as queues:
        await queues.admin.configure(queue, QueueOptions(max_size=2))
        async with connected(database_url) as connection:
            async with connection.transaction():
                await outbox.push_many(connection, queue, [1, 2])
            with pytest.raises(asyncpg.PostgresError, match="is full") as full:
                async with connection.transaction():
                    await connection.execute("INSERT INTO effects VALUES ($1, 'full')", queue)
                    await outbox.push(connection, queue, 3)
            assert full.value.sqlstate == "PQ002"
            assert await connection.fetch("SELECT 1 FROM effects WHERE queue = $1", queue) == []
            for level in ("repeatable_read", "serializable"):
                with pytest.raises(InvalidRequest, match="READ"):
                    async with connection.transaction(isolation=level):
                        await outbox.push(connection, queue, 3)
            secret = f"{queue}-secret"
            changing = connection.transaction()
            await changing.start()
            await outbox.push(connection, secret, "clear")
            await queues.admin.configure(secret, QueueOptions(encryption_enabled=True))
            with pytest.raises(asyncpg.SerializationError, match="encrypted"):
                await changing.commit()
            with pytest.raises(InvalidRequest, match="is encrypted"):
                async with connection.transaction():
                    await outbox.push(connection, secret, "clear")


async def test_a_role_needs_execute_and_nothing_else(database_url: str, queue: str) -> None:
    role = f"r{queue}"

    async def command(*words: str) -> int:
        arguments = ["database", *words, "--set", f"database.url={database_url}"]
        return (await asyncio.to_thread(CliRunner().invoke, app, arguments)).exit_code

    async with running(database_url) as queues:
        async with connected(database_url) as owner:
            await owner.execute(f"CREATE ROLE {role}; GRANT ALL ON effects TO {role}")
            # as in a database that was restored without its rights
            await owner.execute("GRANT EXECUTE ON FUNCTION penstock.outbox_push TO PUBLIC")
        async with connected(database_url, role) as connection:
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                async with connection.transaction():
                    await outbox.push(connection, queue, 1)
            assert await command("grant", role) == 0
            # what it finds in the session cannot lead it astray
            await connection.execute(
                "CREATE TEMP TABLE queues (name text); CREATE TEMP TABLE outbox (xid int);"
                "CREATE TEMP TABLE function_schemas (name text, made_at timestamptz);"
                "SET search_path TO pg_temp, public"
            )
            async with connection.transaction():
                await outbox.push(connection, queue, 1)
                await outbox.push_many(connection, queue, [2, 3])
            popped = await pop(queues, queue)
            assert values(popped) == [1, 2, 3]
            async with connection.transaction():
                for message in popped.messages:
                    await outbox.ack(connection, leased(message))
            for sql in ("SELECT * FROM penstock.messages", "SELECT * FROM penstock.outbox",
                        "SELECT penstock.outbox_release()", "DELETE FROM penstock.queues"):  # fmt: skip
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(sql)
            assert await command("grant", role, "--revoke") == 0
            async with connected(database_url) as owner:
                await owner.execute(f"GRANT USAGE ON SCHEMA penstock TO {role}")
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                async with connection.transaction():
                    await outbox.push(connection, queue, 1)
        async with connected(database_url) as owner:
            assert await command("grant", "nobody-of-this-name") == 1
            await owner.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_the_functions_of_any_release_serve_the_outbox(postgres: Any, queue: str) -> None:
    url = await create_database(postgres)
    older = replace(
        SCHEMA, functions=tuple(f for f in SCHEMA.functions if "outbox" not in f[0])
    )  # as before there was an outbox
    newer = replace(SCHEMA, functions=(*SCHEMA.functions, ("z.sql", "SELECT 1 -- another release")))

    async with running(url) as queues:
        async with connected(url) as connection:
            for release in (newer, older):
                await migrate(connection, "penstock", release)
                async with connection.transaction():
                    await outbox.push(connection, queue, 1)
            await connection.execute(
                "UPDATE penstock.function_schemas SET seen_at = now() - interval '1 year'"
            )
            assert (
                newer.function_schema("penstock") in await queues.database.drop_unused_functions()
            )
            async with connection.transaction():
                await outbox.push(connection, queue, 2)
        assert values(await pop(queues, queue)) == [1, 1, 2]
