"""The log of a shared topic: what is appended through one broker is read through every other."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import numpy as np
import pytest

from penstock.config.schema import DatabaseSettings, TopicsSettings
from penstock.database import Database
from penstock.database.embedded import EmbeddedPostgres
from penstock.errors import ConnectionLost, Damaged, InvalidOffset, NotFound, Unavailable
from penstock.log.context import Instruments
from penstock.log.producers import OutOfOrder, Producer, ProducerFenced
from penstock.metrics import Metrics
from penstock.protocol.kafka_batch import (
    BatchHead,
    NewRecord,
    decode_batch,
    encode_head,
    split_batches,
)
from penstock.queues.schema import SCHEMA
from penstock.topics.shared.appends import APPEND, AppendCall
from penstock.topics.shared.catalog import NOTIFY_SECONDS, SharedTopics
from penstock.topics.shared.log import NotLoaded, SharedLog, read_loading
from tests.conftest import create_database
from tests.support.kafka_wire import encode_batch
from tests.support.wait import eventually
from tests.topics.shared.conftest import shared_topics

Pair = tuple[SharedTopics, SharedTopics]
SECONDS = 60


async def values(log: SharedLog, offset: int = 0) -> list[bytes]:
    """Everything from an offset on, in as many reads as it takes."""
    found: list[bytes] = []
    await log.refresh()
    while offset < log.next_offset:
        batch = await log.read_through(lambda at=offset: log.read(at))
        found += batch.payloads()
        offset = batch.next_offset
    return found


async def execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def other(pair: Pair, name: str = "orders") -> SharedLog:
    log = await pair[1].find(name)
    assert log is not None
    return log


async def test_what_one_broker_appends_another_reads_in_order(pair: Pair) -> None:
    log = await pair[0].create("orders", 1)
    for i in range(5):
        appended = await log.append([b"%d-%d" % (i, n) for n in range(3)])
        assert (appended.first_offset, appended.count) == (3 * i, 3)
    there = await other(pair)
    assert await values(there) == [b"%d-%d" % (i, n) for i in range(5) for n in range(3)]
    assert (there.first_offset, there.next_offset) == (0, 15)


async def test_offsets_have_no_gaps_while_both_brokers_append(pair: Pair) -> None:
    here = await pair[0].create("orders", 1)
    there = await other(pair)
    sent: dict[int, bytes] = {}

    async def produce(log: SharedLog, who: int) -> None:
        for i in range(40):
            appended = await log.append([b"%d:%d" % (who, i), b"%d:%d+" % (who, i)])
            assert appended.first_offset not in sent
            sent[appended.first_offset] = b"%d:%d" % (who, i)

    await asyncio.gather(*(produce(log, who) for who, log in enumerate([here, there] * 4)))
    found = await values(here)
    assert len(found) == 8 * 40 * 2
    assert all(found[offset] == value for offset, value in sent.items())
    for who in range(8):  # each producer's records are in the order in which they were sent
        mine = [value for value in found if value.startswith(b"%d:" % who)]
        assert mine == [b"%d:%d%s" % (who, i, end) for i in range(40) for end in (b"", b"+")]
    assert await values(there) == found


async def test_a_reader_on_another_broker_is_woken(pair: Pair) -> None:
    here = await pair[0].create("orders", 1)
    there = await other(pair)
    waiting = asyncio.create_task(there.wait_for(0, SECONDS))
    await asyncio.sleep(0)
    await here.append([b"hello"])
    began = time.monotonic()
    assert await waiting
    assert time.monotonic() - began < SECONDS / 2  # woken, long before its time is over
    assert there.read(0).payloads() == [b"hello"]  # and what woke it is in memory


async def test_records_that_only_the_catalog_tells_of_are_in_memory_when_they_wake_a_reader(
    pair: Pair,
) -> None:
    """The broker that appended them was killed before its notice."""
    here = await pair[0].create("orders", 1)
    there = await other(pair)
    waiting = asyncio.create_task(there.wait_for(0, SECONDS))
    batch = encode_batch([NewRecord(b"hello")], 0)
    call = AppendCall(uuid4(), False, False, [here.log_id], [0], [1], [0], [batch])
    await pair[0].database.fetch(APPEND, *call)
    await pair[1].read_catalog()
    assert await waiting
    assert there.read(0).payloads() == [b"hello"]


async def test_notices_are_coalesced_and_not_part_of_an_append(
    broker: SharedTopics, database_url: str
) -> None:
    """A NOTIFY serializes the commits of the whole database."""
    heard: list[str] = []
    connection = await asyncpg.connect(database_url)
    try:
        await connection.add_listener(
            "penstock_shared_topics", lambda *notice: heard.append(notice[-1])
        )
        logs = [await broker.create(f"t{i}", 1) for i in range(8)]
        await eventually(lambda: heard)
        began, before = time.monotonic(), len(heard)

        async def append(log: SharedLog) -> None:
            for i in range(50):
                await log.append([b"%d" % i])

        await asyncio.gather(*map(append, logs))
        ends = {log.log_id: log.next_offset for log in logs}

        def announced() -> bool:
            for notice in heard:
                _, _, pairs = json.loads(notice)
                for log_id, end in pairs:
                    if ends.get(log_id) == end:
                        del ends[log_id]
            return not ends

        await eventually(announced)
        most = (time.monotonic() - began) / NOTIFY_SECONDS + 1
        assert len(heard) - before <= most
    finally:
        await connection.close()


async def test_what_cannot_be_loaded_fails_its_own_read_and_not_the_others_of_a_request(
    pair: Pair, database_url: str
) -> None:
    logs = []
    for name in ("moved", "here"):
        await (await pair[0].create(name, 1)).append([name.encode()])
        logs.append(await other(pair, name))
    await execute(
        database_url,
        """UPDATE penstock.shared_batches SET data = NULL, object = 'o', position = 0
            WHERE log_id = (SELECT id FROM penstock.shared_logs WHERE topic = 'moved')""",
    )

    def read() -> list[int]:
        counts = []
        for log in logs:
            try:
                counts.append(log.batches(0, 1).count)
            except NotLoaded:
                raise
            except Unavailable:  # this broker has no object storage
                counts.append(-1)
        return counts

    assert await read_loading(read) == [-1, 1]


async def test_an_offset_that_this_broker_does_not_know_yet_is_not_out_of_range(pair: Pair) -> None:
    here = await pair[0].create("orders", 1)
    there = await other(pair)
    for _ in range(20):
        end = (await here.append([b"a"])).first_offset + 1
        batch = await there.read_through(lambda at=end: there.read(at, strict=True))
        assert batch.count == 0
    with pytest.raises(InvalidOffset):
        await there.read_through(lambda: there.read(21, strict=True))


async def test_a_repeated_batch_gets_its_old_offset_from_either_broker(pair: Pair) -> None:
    here, producer = await pair[0].create("orders", 1), uuid4().bytes
    there = await other(pair)
    first = await here.append([b"a", b"b"], Producer(producer, 0))
    again = await there.append([b"a", b"b"], Producer(producer, 0))
    assert (again.first_offset, again.count, again.duplicate) == (first.first_offset, 2, True)
    assert (await there.append([b"c"], Producer(producer, 1))).first_offset == 2
    with pytest.raises(OutOfOrder, match="too early"):
        await here.append([b"e"], Producer(producer, 3))
    for i in range(2, 80):
        await here.append([b"%d" % i], Producer(producer, i))
    with pytest.raises(OutOfOrder, match="too old"):
        await there.append([b"a", b"b"], Producer(producer, 0))
    assert len(await values(here)) == 3 + 78


async def test_batches_in_flight_together_keep_the_order_of_their_producer(pair: Pair) -> None:
    here, producer = await pair[0].create("orders", 1), uuid4().bytes
    there = await other(pair)
    await asyncio.gather(*(here.append([b"%d" % i], Producer(producer, i)) for i in range(30)))
    # Sent again through the other broker, from the middle on, with what comes next and one twice.
    numbers = [*range(20, 40), 35]
    again = await asyncio.gather(
        *(there.append([b"%d" % i], Producer(producer, i)) for i in numbers)
    )
    assert [one.first_offset for one in again] == numbers
    assert [one.duplicate for one in again] == [True] * 10 + [False] * 10 + [True]
    assert await values(here) == [b"%d" % i for i in range(40)]


async def test_records_that_cannot_be_decoded_hide_none_before_and_after_them(
    broker: SharedTopics,
) -> None:
    log = await broker.create("orders", 1)
    garbage = encode_head([b"\xff" * 20], 3, timestamps=(1, 1)) + b"\xff" * 20
    await asyncio.gather(
        log.append([b"before"]),
        log.append_batch(*split_batches(garbage)[0]),
        log.append([b"after"]),
    )
    before = await log.read_through(lambda: log.read(0))
    assert (before.payloads(), before.next_offset) == ([b"before"], 1)
    with pytest.raises(Damaged) as caught:
        await log.read_through(lambda: log.read(1))
    assert caught.value.resume == 4
    assert await values(log, 4) == [b"after"]


async def test_a_sparse_producer_may_leave_numbers_out(broker: SharedTopics) -> None:
    log, producer, sparse = await broker.create("orders", 1), uuid4().bytes, 1 << 63
    assert (await log.append([b"a"], Producer(producer, sparse + 5))).first_offset == 0
    assert (await log.append([b"b"], Producer(producer, sparse + 9))).first_offset == 1
    old = await log.append([b"x"], Producer(producer, sparse + 7))
    assert (old.duplicate, old.count) == (True, 0)
    assert (await log.append([b"b"], Producer(producer, sparse + 9))).first_offset == 1
    assert await values(log) == [b"a", b"b"]


def kafka_batch(sequence: int, count: int, *, epoch: int = 0) -> tuple[BatchHead, memoryview]:
    records = [NewRecord(b"v%d" % (sequence + i), b"k", [("h", b"1")]) for i in range(count)]
    [batch] = split_batches(encode_batch(records, 1000, producer=(77, epoch, sequence)))
    return batch


async def test_kafka_sequences_epochs_and_their_end_are_checked(pair: Pair) -> None:
    here = await pair[0].create("orders", 1)
    there = await other(pair)
    last = (1 << 31) - 2
    assert (await here.append_batch(*kafka_batch(last, 3))).first_offset == 0
    assert (await there.append_batch(*kafka_batch(last, 3))).duplicate
    assert (await there.append_batch(*kafka_batch(1, 2))).first_offset == 3  # numbers start over
    with pytest.raises(OutOfOrder):
        await here.append_batch(*kafka_batch(5, 1))
    with pytest.raises(OutOfOrder):
        await here.append_batch(*kafka_batch(3, 1, epoch=1))
    assert (await here.append_batch(*kafka_batch(0, 1, epoch=1))).first_offset == 5
    with pytest.raises(ProducerFenced):
        await there.append_batch(*kafka_batch(3, 1))
    fetched = await there.read_through(lambda: there.batches(4, 1))
    [(head, data)] = split_batches(fetched.data)
    assert (head.base_offset, fetched.next_offset) == (3, 5)  # the batch that contains offset 4
    first = decode_batch(data)
    assert [(one.offset, one.key, one.value, one.headers) for one in first] == [
        (3, b"k", b"v1", (("h", b"1"),)),
        (4, b"k", b"v2", (("h", b"1"),)),
    ]


async def test_producers_continue_where_a_failover_lost_their_last_batches(
    broker: SharedTopics, database_url: str
) -> None:
    """What the database lost of a producer is reported as a gap; it does not stop the producer."""
    log = await broker.create("orders", 1)
    ours = uuid4().bytes

    async def send(sequence: int) -> bool:
        """One batch of each; whether they were stored now."""
        [batch] = split_batches(
            encode_batch([NewRecord(b"%d" % sequence)], 0, producer=(7, 0, sequence))
        )
        done = await asyncio.gather(
            log.append([b"%d" % sequence], Producer(ours, sequence)), log.append_batch(*batch)
        )
        return not any(one.duplicate for one in done)

    connection = await asyncpg.connect(database_url, server_settings={"search_path": "penstock"})
    try:
        assert await send(0)
        assert await send(1)
        await connection.execute("CREATE TABLE kept AS SELECT * FROM shared_producers")
        for sequence in range(2, 5):
            assert await send(sequence)
        end = log.next_offset
        await connection.execute(
            """DELETE FROM shared_producers; INSERT INTO shared_producers SELECT * FROM kept;
               DELETE FROM shared_batches WHERE last_offset > 3;
               UPDATE shared_logs SET next_offset = 4, timeline = 0"""
        )
        assert not await send(1)  # it was kept
        assert await send(5)
        assert not await send(5)
        assert log.next_offset > end
        with pytest.raises(OutOfOrder):
            await send(7)  # from here on, nothing may be left out
        assert await send(6)
    finally:
        await connection.close()


@pytest.mark.parametrize("loses", [False, True])
async def test_a_producer_that_went_on_through_another_broker_continues_after_a_failover(
    pair: Pair, database_url: str, monkeypatch: pytest.MonkeyPatch, loses: bool
) -> None:
    """Its batch had failed at the broker to which it returns."""
    here = await pair[0].create("orders", 1)
    there = await other(pair)

    async def send(log: SharedLog, sequence: int) -> None:
        assert not (await log.append_batch(*kafka_batch(sequence, 1))).duplicate

    async def down(*_: Any) -> list[Any]:
        raise Unavailable("the database is down")

    await send(here, 0)
    with monkeypatch.context() as patch:
        patch.setattr(pair[0].database, "fetch", down)
        with pytest.raises(Unavailable):
            await send(here, 1)
    for sequence in range(1, 5):
        await send(there, sequence)
    await execute(database_url, "UPDATE penstock.shared_logs SET timeline = 0")
    if loses:
        await execute(
            database_url,
            """UPDATE penstock.shared_producers
                  SET expected = 3, sequences = sequences[:3], offsets = offsets[:3]""",
        )
    await send(here, 5)
    await send(here, 6)


@pytest.mark.parametrize("known", [False, True])
async def test_a_batch_behind_one_that_failed_is_not_stored_before_it(
    broker: SharedTopics, database_url: str, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Neither of a new producer, nor after a failover, when a producer may leave batches out."""
    log = await broker.create("orders", 1)
    if known:
        await log.append_batch(*kafka_batch(0, 3))
        await execute(database_url, "UPDATE penstock.shared_logs SET timeline = 0")
    fetch, failed = broker.database.fetch, list[str]()

    async def fail_once(sql: str, *args: Any) -> list[Any]:
        if sql == APPEND and not failed:
            failed.append(sql)
            await asyncio.sleep(0)  # the second batch arrives
            raise Unavailable("the database is down")
        return await fetch(sql, *args)

    monkeypatch.setattr(broker.database, "fetch", fail_once)
    first = log.append_batch(*kafka_batch(3, 2))
    await eventually(lambda: failed)
    second = log.append_batch(*kafka_batch(5, 1))
    with pytest.raises(Unavailable):
        await first
    with pytest.raises(OutOfOrder):
        await second
    for batch in (kafka_batch(3, 2), kafka_batch(5, 1)):
        assert not (await log.append_batch(*batch)).duplicate


async def test_a_call_whose_answer_was_lost_is_answered_the_same_again(
    pair: Pair, database_url: str
) -> None:
    """The connection is cut after the commit: a plain append is not stored twice."""
    log = await pair[0].create("orders", 1)
    database, cut = pair[0].database, list[tuple[Any, ...]]()
    fetch = database.fetch

    async def lose_first(sql: str, *args: Any) -> list[asyncpg.Record]:
        rows = await fetch(sql, *args)
        if sql == APPEND and not cut:
            cut.append(args)
            raise ConnectionLost("the answer was lost")
        return rows

    database.fetch = lose_first  # type: ignore[method-assign]
    appended = await log.append([b"once"])
    assert appended.first_offset == 0
    assert await values(log) == [b"once"]
    connection = await asyncpg.connect(database_url)
    try:  # the first call arrives late, behind its repetition: it fails and changes nothing
        await connection.execute(f"SET search_path TO {SCHEMA.search_path('penstock')}")
        with pytest.raises(asyncpg.UniqueViolationError):
            await connection.fetch(APPEND, *cut[0])
    finally:
        await connection.close()
    assert await values(await other(pair)) == [b"once"]


async def test_a_call_that_arrives_behind_its_skipped_repetition_appends_nothing(
    broker: SharedTopics, database_url: str
) -> None:
    """The turn that was skipped is in another call by then."""
    log = await broker.create("orders", 1)
    batch = encode_batch([NewRecord(b"late")], 0)
    first = AppendCall(uuid4(), False, False, [log.log_id], [0], [1], [0], [batch])
    holder = await asyncpg.connect(database_url)
    try:
        async with holder.transaction():
            await holder.execute("SELECT 1 FROM penstock.shared_logs FOR UPDATE")
            [answer] = await broker.database.fetch(APPEND, *first._replace(again=True))
            assert answer["statuses"] == ["skipped"]
        await holder.execute(f"SET search_path TO {SCHEMA.search_path('penstock')}")
        with pytest.raises(asyncpg.UniqueViolationError):
            await holder.fetch(APPEND, *first)
    finally:
        await holder.close()
    assert await values(log) == []


async def test_a_log_that_another_session_holds_delays_no_other_log(
    broker: SharedTopics, database_url: str
) -> None:
    hot, cold = await broker.create("hot", 1), await broker.create("cold", 1)
    connection = await asyncpg.connect(database_url)
    try:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(
            "SELECT 1 FROM penstock.shared_logs WHERE topic = 'hot' FOR UPDATE"
        )
        waiting = hot.append([b"h"])
        for i in range(10):
            assert (await cold.append([b"c"])).first_offset == i
        assert not waiting.done()
        await transaction.rollback()
    finally:
        await connection.close()
    assert (await waiting).first_offset == 0


async def test_a_deleted_topic_is_gone_everywhere_and_its_name_is_free(pair: Pair) -> None:
    here = await pair[0].create("orders", 2)
    there = await other(pair)
    await here.append([b"old"])
    waiting = asyncio.create_task(there.wait_for(5, SECONDS))
    await pair[0].delete("orders")
    with pytest.raises(NotFound):
        await waiting
    with pytest.raises(NotFound):
        await there.append([b"x"])
    made = await pair[1].create("orders", 1)
    assert (await made.append([b"new"])).first_offset == 0
    found = await eventually(lambda: pair[0].find("orders"))
    assert found.incarnation == made.incarnation != here.incarnation
    assert await values(found) == [b"new"]


@pytest.mark.parametrize("copied", [False, True])
async def test_a_start_without_the_database_serves_the_topics_of_the_file_until_it_answers(
    postgres: EmbeddedPostgres, tmp_path: Path, copied: bool
) -> None:
    """The database may be another one by then, with other topics under the same numbers. It has
    the same identity if it was copied.
    """
    first = await create_database(postgres, migrated=True)
    second = await create_database(postgres, migrated=True)
    saved = tmp_path / "shared-topics"
    async with shared_topics(first, saved=saved) as topics:
        await (await topics.create("orders", 2)).append([b"a"])
    if not copied:
        await execute(second, "UPDATE penstock.installation SET id = (id + 1) % 1000")
    async with shared_topics(second) as topics:
        await (await topics.create("payments", 1)).append([b"b"])
    metrics = Metrics()
    database = Database(DatabaseSettings(url=second), tmp_path, metrics, SCHEMA)
    topics = SharedTopics(database, TopicsSettings(), Instruments(metrics), metrics, saved=saved)
    await topics.start()
    try:
        log = await topics.find("orders")
        assert log is not None
        assert (log.next_offset, topics.partitions("orders")) == (1, 2)
        with pytest.raises(Unavailable):
            await log.read_through(lambda: log.read(0))
        await database.start()
        assert copied or "orders" not in topics.names()
        await topics.read_catalog()
        assert topics.names() == ["payments"]
        with pytest.raises(NotFound):
            await log.append([b"c"])
        there = await topics.find("payments")
        assert there is not None
        assert await values(there) == [b"b"]
    finally:
        await topics.stop()
        await database.stop()


async def test_a_stop_before_the_catalog_was_read_keeps_the_file(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    url = await create_database(postgres, migrated=True)
    saved = tmp_path / "shared-topics"
    async with shared_topics(url, saved=saved) as topics:
        await topics.create("orders", 1)
    metrics = Metrics()
    database = Database(DatabaseSettings(url=url), tmp_path, metrics, SCHEMA)
    await database.start()
    try:
        topics = SharedTopics(
            database, TopicsSettings(), Instruments(metrics), metrics, saved=saved
        )
        await topics.stop()
    finally:
        await database.stop()
    assert b"orders" in saved.read_bytes()


async def test_an_offset_that_did_not_exist_is_read_when_it_does(database_url: str) -> None:
    """Also if its records have left the memory since: the former error must not come back."""
    async with shared_topics(database_url, shared_cache=1 << 20) as topics:
        log = await topics.create("orders", 1)
        with pytest.raises(NotLoaded) as raised:
            log.read(1, strict=True)
        await raised.value.load()  # asks the database: the offset lies behind the end
        await log.append([b"0", b"1"])
        assert log.read(1, strict=True).payloads() == [b"1"]
        for _ in range(8):
            await log.append([bytes(600_000)])
        batch = await log.read_through(lambda: log.read(1, 1, strict=True))
        assert batch.payloads() == [b"1"]


async def test_times_find_offsets_across_batches(pair: Pair) -> None:
    here = await pair[0].create("orders", 1)
    for i in range(0, 100, 10):
        await here.append_records([NewRecord(b"x", timestamp=1_000_000 + i + n) for n in range(5)])
    there = await other(pair)

    async def at(milliseconds: int) -> int:
        return await there.read_through(lambda: there.offset_at(milliseconds / 1000))

    assert await at(0) == 0
    assert await at(1_000_013) == 5 + 3
    assert await at(1_000_017) == 10
    assert await at(1_000_094) == 49
    assert await at(1_000_095) == 50 == there.next_offset


async def test_readers_far_behind_do_not_push_the_newest_records_out(database_url: str) -> None:
    async with shared_topics(database_url, shared_cache=1 << 20) as topics:
        log = await topics.create("orders", 1)
        for i in range(40):
            await log.append([bytes([i]) * 100_000])
        assert len(await values(log)) == 40
        assert log.read(39).payloads() == [bytes([39]) * 100_000]  # still in memory
        assert topics.context.recent.size <= 1 << 20
        assert topics.context.older.size <= 1 << 20


async def test_ten_thousand_topics_are_served_and_appended_to_together(database_url: str) -> None:
    async with shared_topics(database_url) as topics:
        await topics.create("t0", 1)
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(
            """INSERT INTO penstock.shared_logs (topic, partition, incarnation, timeline, changed_at)
               SELECT 't' || n, 0, gen_random_uuid(), 1, now() FROM generate_series(1, 9999) n"""
        )
    finally:
        await connection.close()
    async with shared_topics(database_url) as topics:
        assert len(topics.names()) == 10_000
        logs = [topics.get(f"t{i}") for i in range(0, 10_000, 20)]
        appended = await asyncio.gather(*(log.append([b"x"]) for log in logs if log is not None))
        assert [one.first_offset for one in appended] == [0] * 500
        assert len(await values(logs[-1])) == 1  # type: ignore[arg-type]
        before = await transactions(database_url)
        assert await topics.mover.step()
        assert await transactions(database_url) - before < 1000  # not one for each topic


async def transactions(url: str) -> int:
    """How many transactions the server has given a number, that is, have written something."""
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval("SELECT txid_current()"))
    finally:
        await connection.close()


async def test_rows_that_appends_update_do_not_bloat_their_tables(
    broker: SharedTopics, database_url: str
) -> None:
    """The table says how much of a page stays free, so that a new version fits beside the old."""
    log = await broker.create("orders", 1)
    for i in range(600):
        await log.append([b"x"], Producer(b"p" * 16, i))
    connection = await asyncpg.connect(database_url)
    try:
        for table in ("shared_logs", "shared_producers"):
            size = await connection.fetchval(f"SELECT pg_total_relation_size('penstock.{table}')")
            assert size <= 8 * 8192, table  # 600 versions of a row take more
    finally:
        await connection.close()


async def test_a_broker_that_stops_answers_what_is_queued(database_url: str) -> None:
    async with shared_topics(database_url) as topics:
        log = await topics.create("orders", 1)
        waiting = [log.append([b"%d" % i]) for i in range(500)]
        large = [log.append([bytes(3 << 20)]) for _ in range(3)]  # each takes a turn of its own
    assert sorted([one.result().first_offset for one in waiting + large]) == list(range(503))


async def test_brokers_whose_clocks_differ_by_an_hour_give_the_databases_time(
    database_url: str,
) -> None:
    def ahead() -> float:
        return time.time() + 3600

    async with (
        shared_topics(database_url, clock=ahead) as fast,
        shared_topics(database_url) as right,
    ):
        here = await fast.create("orders", 1)
        there = await right.find("orders")
        assert there is not None
        for _ in range(5):
            await here.append([b"a"])
            await there.append([b"b"])
        await here.refresh()
        times = await here.read_through(lambda: here.timestamps(np.arange(10)))
        assert max(times) - min(times) < 600e6  # microseconds: far less than the hour
        later = time.time() + 1800
        assert await here.read_through(lambda: here.offset_at(later)) == 10
