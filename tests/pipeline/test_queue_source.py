"""Queues as Spark tables and streams: the horizon, the ids, the group that shows the position."""

import asyncio
import json
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import asyncpg
import pyarrow as pa
import pytest

from penstock.errors import InvalidRequest, NotFound, Unavailable
from penstock.pipeline.options import QueueSourceOptions, ReachOptions, read_options
from penstock.pipeline.source_columns import QUEUE_COLUMNS
from penstock.pipeline.sources import packed_messages as packed
from penstock.pipeline.sources import postgres as postgres_module
from penstock.pipeline.sources import queue as queue_source
from penstock.pipeline.sources.group_mirror import Mirror
from penstock.pipeline.sources.postgres import Away, Postgres
from penstock.pipeline.sources.queue import QueuePlan, QueueReader, QueueStreamReader
from penstock.pipeline.sources.queue_rows import message_ids
from penstock.pipeline.sources.topic import DataLoss
from penstock.protocol.headers import encode
from penstock.protocol.message_ids import message_uuid
from penstock.queues import Item
from tests.queues.support import push, running


def options(url: str, queue: str = "orders", *, streaming: bool = True, **more: Any) -> QueuePlan:
    given = {"database": url, "queue": queue, **{name: str(value) for name, value in more.items()}}
    return QueuePlan(
        read_options(QueueSourceOptions, given), QUEUE_COLUMNS.names, streaming=streaming
    )


def rows_of(reader: Any, tasks: Any) -> list[dict[str, Any]]:
    return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


class Stream:
    """Micro-batches of one reader, as Spark runs them: offsets pass through JSON."""

    def __init__(self, reader: QueueStreamReader) -> None:
        self.reader = reader
        self.at = reader.initialOffset()

    def batch(self) -> list[dict[str, Any]]:
        end = json.loads(
            json.dumps(self.reader.latestOffset(self.at, self.reader.getDefaultReadLimit()))
        )
        rows = rows_of(self.reader, self.reader.partitions(self.at, end)) if end != self.at else []
        self.at = end
        return rows


def load(url: str, *items: Item) -> None:
    async def run() -> None:
        async with running(url) as queues:
            await queues.push(list(items))

    asyncio.run(run())


def test_a_queue_is_read_with_every_column(database_url: str) -> None:
    trace = "0190b1f6-4f0e-7c3e-8000-0000000000ff"
    load(
        database_url,
        Item("orders", b'{"n": 1}', "c-1", "t-1", trace),
        Item("orders", '"ü"'.encode(), "c-2", "t-2", headers='{"a":"ü","b":""}'.encode()),
        Item("other", b"1"),
    )
    reader = QueueReader(options(database_url, streaming=False))
    rows = sorted(rows_of(reader, reader.partitions()), key=lambda row: row["partition"])
    assert [
        (r["queue"], r["partition"], r["seq"], r["transactionId"], r["traceId"], r["payload"])
        for r in rows
    ] == [
        ("orders", "c-1", 1, "t-1", trace, '{"n": 1}'),
        ("orders", "c-2", 1, "t-2", None, '"ü"'),
    ]
    assert all(UUID(row["id"]).version == 8 and row["createdAt"].year >= 2024 for row in rows)
    assert [row["headers"] for row in rows] == [None, [("a", "ü"), ("b", "")]]
    with pytest.raises(NotFound, match="queue 'nowhere' does not exist"):
        QueueReader(options(database_url, "nowhere", streaming=False))


def test_ids_made_by_numpy_are_those_of_the_queues() -> None:
    cases = [(0, 1, 1), (0xFFFFFFFF, 2**40 - 1, 2**50 - 1), (123456789, 54321, 987654321)]
    for installation, partition, seq in cases:
        result = message_ids(installation, pa.array([partition]), pa.array([seq]))
        assert result.to_pylist() == [str(message_uuid(installation, partition, seq))]


async def test_a_transaction_that_commits_late_is_never_skipped(database_url: str) -> None:
    """Three transactions stay open across batches and end in another order than they began; one is
    rolled back.
    """

    async with running(database_url) as queues:
        await push(queues, "orders", 0)
        partition = await queues.database.fetch("SELECT id FROM partitions")

        async def begin(name: str) -> tuple[Any, Any]:
            connection = await asyncpg.connect(
                database_url, server_settings={"search_path": "penstock"}
            )
            transaction = connection.transaction()
            await transaction.start()
            await connection.execute("SELECT pg_current_xact_id()")
            return connection, transaction

        async def insert(connection: Any, n: int) -> None:
            await connection.execute(
                "SELECT 1 FROM partitions WHERE id = $1 FOR NO KEY UPDATE", partition[0]["id"]
            )
            await connection.execute(
                "INSERT INTO messages (partition_id, seq, created_at, queue_id, "
                "transaction_id, payload) "
                "SELECT partition_id, max(seq) + 1, clock_timestamp(), max(queue_id), $2, "
                "$3 FROM messages "
                "WHERE partition_id = $1 GROUP BY 1",
                partition[0]["id"],
                f"t-{n}",
                str(n).encode(),
            )

        stream = await asyncio.to_thread(lambda: Stream(QueueStreamReader(options(database_url))))

        async def batch() -> list[int]:
            return [int(row["payload"]) for row in await asyncio.to_thread(stream.batch)]

        assert await batch() == [0]
        early, early_transaction = await begin("early")
        await push(queues, "orders", 1)  # commits at once, with a larger xid than the open one
        assert await batch() == []  # held back by the open transaction, not lost
        late, late_transaction = await begin("late")
        await insert(early, 2)
        await early_transaction.commit()
        seen = await batch()
        assert seen == [1, 2]
        await push(queues, "orders", 3)
        assert await batch() == []
        aborted, aborted_transaction = await begin("aborted")
        await insert(late, 4)
        await late_transaction.commit()
        assert await batch() == [3, 4]
        await insert(aborted, 99)
        await aborted_transaction.rollback()
        await push(queues, "orders", 5)
        assert await batch() == [5]
        assert await batch() == []
        for connection in (early, late, aborted):
            await connection.close()


def test_batches_hold_whole_transactions_up_to_the_limit_and_a_large_one_is_cut_between_partitions(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_source, "SMALL_BATCH", 10)
    for k in range(6):
        load(database_url, *(Item("orders", b"%d" % (10 * k + i), f"p-{i % 5}") for i in range(10)))
    stream = Stream(QueueStreamReader(options(database_url, maxOffsetsPerTrigger=25)))
    sizes = [len(stream.batch()) for _ in range(4)]
    assert sizes == [20, 20, 20, 0]
    reader = QueueStreamReader(options(database_url))
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    tasks = reader.partitions(start, end)
    assert 1 < len(tasks) <= 4
    per_task = [
        [(row["partition"], row["seq"]) for row in rows_of(reader, [task])] for task in tasks
    ]
    assert sum(map(len, per_task)) == 60
    partitions = [{partition for partition, _ in rows} for rows in per_task]
    assert sum(map(len, partitions)) == 5  # no partition in two tasks
    for rows in per_task:
        for partition in {partition for partition, _ in rows}:
            assert [seq for name, seq in rows if name == partition] == list(range(1, 13))


def test_transactions_are_counted_as_numbers_by_the_index(database_url: str) -> None:
    for k in range(4):
        load(database_url, *(Item("orders", b"%d" % (10 * k + i)) for i in range(10)))
    o = options(database_url)
    with o.postgres.connect() as connection, connection.cursor() as cursor:
        cursor.execute(
            "UPDATE messages SET xid = (98 + (seq - 1) / 10)::text::xid8"
        )  # 98, 99, 100, 101
        connection.commit()
    queue = o.state().id
    assert [o.nth_xid(queue, 0, n) for n in (0, 9, 10, 19, 20, 39, 40)] == [
        98,
        98,
        99,
        99,
        100,
        101,
        None,
    ]
    stream = Stream(QueueStreamReader(options(database_url, maxOffsetsPerTrigger=25)))
    assert [len(stream.batch()) for _ in range(3)] == [20, 20, 0]


def test_few_partitions_are_cut_within_when_order_is_not_promised(
    database_url: str, monkeypatch
) -> None:
    monkeypatch.setattr(queue_source, "SMALL_BATCH", 10)
    load(database_url, *(Item("orders", b"%d" % i, "only") for i in range(40)))
    load(database_url, *(Item("orders", b"%d" % i, "two") for i in range(40, 100)))
    reader = QueueReader(options(database_url, streaming=False))
    tasks = reader.partitions()
    assert len(tasks) >= 4
    assert sorted(int(row["payload"]) for row in rows_of(reader, tasks)) == list(range(100))


def test_a_read_of_most_of_the_table_goes_by_blocks_each_message_once_unless_it_is_moved(
    database_url: str, monkeypatch
) -> None:
    monkeypatch.setattr(queue_source, "SMALL_BATCH", 10)
    trace = "0190b1f6-4f0e-7c3e-8000-0000000000ff"
    for k in range(5):
        items = (
            Item("orders", b"%d" % (200 * k + i), f"p-{i % 7}", None, trace if i % 3 else None)
            for i in range(200)
        )
        load(database_url, *items)
    load(database_url, *(Item("few", b"1", f"p-{i}") for i in range(30)))

    asyncio.run(_execute(database_url, "ANALYZE messages"))
    reader = QueueReader(options(database_url, streaming=False))
    tasks = reader.partitions()
    assert len(tasks) == 4
    assert all(task.file and task.packed == "all" for task in tasks)
    load(database_url, Item("orders", b"9999", "p-0"))  # after the read was planned: not part of it
    rows = rows_of(reader, tasks)
    assert sorted(int(row["payload"]) for row in rows) == list(range(1000))
    assert {(row["partition"], int(row["payload"]) % 200 % 7) for row in rows} == {
        (f"p-{i}", i) for i in range(7)
    }
    assert all(row["traceId"] == (trace if int(row["payload"]) % 200 % 3 else None) for row in rows)
    few = QueueReader(options(database_url, "few", streaming=False))
    assert not any(task.file for task in few.partitions())
    assert len(rows_of(few, few.partitions())) == 30
    asyncio.run(_execute(database_url, "VACUUM FULL messages"))
    with pytest.raises(Unavailable, match="were moved"):
        rows_of(reader, tasks)


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1"])
def test_blocks_are_packed_whatever_is_in_them_and_large_payloads_come_as_rows(
    database_url: str, monkeypatch, encoding: str
) -> None:
    monkeypatch.setattr(queue_source, "SMALL_BATCH", 10)
    monkeypatch.setattr(packed, "BLOCKS", 2)
    if encoding != "UTF8":  # what a database of another encoding is planned as
        monkeypatch.setattr(queue_source, "_PACKED", "''")
    noise = random.Random(7)
    expected: dict[str, tuple[str, str | None, list[tuple[str, str]] | None]] = {}
    for k in range(6):
        items = []
        for i in range(40):
            name = f"tür-{k}-{i}" if i % 2 else f"{k}-{i}"
            text = (
                ""
                if i == 3
                else noise.randbytes(6000 if i == 5 else 20).hex()
                if i % 3
                else "é" * (20_000 if i == 6 else 3)
            )
            trace = str(UUID(int=noise.getrandbits(128))) if i % 5 == k else None
            headers = {"n": name} if i % 7 == k else {}
            payload = json.dumps(text, ensure_ascii=False)
            expected[name] = (payload, trace, list(headers.items()) or None)
            item = Item("orders", payload.encode(), f"p-{i % 4}", name, trace)
            item.headers = encode(headers)
            items.append(item)
        load(database_url, *items)

    def read(*columns: str) -> list[dict[str, Any]]:
        given = QueuePlan(
            QueueSourceOptions(database=database_url, queue="orders"),
            columns or QUEUE_COLUMNS.names,
            streaming=False,
        )
        reader = QueueReader(given)
        tasks = reader.partitions()
        assert {task.packed for task in tasks} == {"small" if encoding == "UTF8" else ""}
        return rows_of(reader, tasks)

    asyncio.run(_execute(database_url, "ANALYZE messages"))
    within = options(database_url, streaming=False)._conditions(1, 0, 1 << 40)
    for end in (None, 4):
        asked = packed.query(["p", "d"], within, 0, end, toasted=True)
        plan = "\n".join(row[0] for row in asyncio.run(_execute(database_url, f"EXPLAIN {asked}")))
        assert re.search(r"Tid Range Scan[^\n]*\n *TID Cond: [^\n]*ctid >= [^\n]*ctid < ", plan), (
            plan
        )
        assert "Index" not in plan
    rows = read()
    assert len(rows) == len(expected)
    result = {
        row["transactionId"]: (row["payload"], row["traceId"], row["headers"]) for row in rows
    }
    assert result == expected
    by_order = QueueStreamReader(options(database_url))
    streamed = Stream(by_order).batch()
    assert sorted(rows, key=lambda row: row["id"]) == sorted(streamed, key=lambda row: row["id"])
    assert sorted(row["seq"] for row in read("seq")) == sorted(row["seq"] for row in rows)
    assert [row["queue"] for row in read("queue")] == ["orders"] * len(rows)


async def _execute(url: str, text: str) -> list[Any]:
    connection = await asyncpg.connect(url, server_settings={"search_path": "penstock"})
    rows = await connection.fetch(text)
    await connection.close()
    return list(rows)


async def test_a_connection_lost_between_two_questions_is_made_anew(database_url: str) -> None:
    postgres = Postgres(ReachOptions(database=database_url))
    ((first,),) = postgres.rows("SELECT pg_backend_pid()")
    assert postgres.rows("SELECT pg_backend_pid()") == [(first,)]

    connection = await asyncpg.connect(database_url)
    await connection.execute("SELECT pg_terminate_backend($1, 5000)", first)
    await connection.close()
    assert postgres.rows("SELECT pg_backend_pid()") != [(first,)]


def test_encrypted_messages_are_an_error_or_have_no_payload(database_url: str) -> None:
    load(database_url, Item("orders", b"1"), Item("orders", b"2", headers=b'{"a":"b"}'))

    async def encrypt() -> None:
        connection = await asyncpg.connect(
            database_url, server_settings={"search_path": "penstock"}
        )
        await connection.execute("UPDATE messages SET key_id = 'k1' WHERE seq = 2")
        await connection.close()

    asyncio.run(encrypt())
    reader = QueueReader(options(database_url, streaming=False))
    with pytest.raises(InvalidRequest, match="holds encrypted messages"):
        rows_of(reader, reader.partitions())
    reader = QueueReader(options(database_url, streaming=False, encrypted="null"))
    rows = rows_of(reader, reader.partitions())
    assert [(row["payload"], row["headers"]) for row in rows] == [("1", None), (None, None)]
    given = QueueSourceOptions(database=database_url, queue="orders")
    reader = QueueReader(QueuePlan(given, ["headers"], streaming=False))
    with pytest.raises(InvalidRequest, match="holds encrypted messages"):
        rows_of(reader, reader.partitions())


def test_a_checkpoint_of_another_queue_database_or_incarnation_is_refused(
    database_url: str,
) -> None:
    load(database_url, Item("orders", b"1"), Item("refunds", b"1"))
    reader = QueueStreamReader(options(database_url))
    limit = reader.getDefaultReadLimit()
    offset = reader.latestOffset(reader.initialOffset(), limit)
    with pytest.raises(InvalidRequest, match="belongs to the queue 'orders'"):
        QueueStreamReader(options(database_url, "refunds")).latestOffset(offset, limit)
    with pytest.raises(
        InvalidRequest, match="belongs to the queue 'orders'"
    ):  # a batch that was not finished
        QueueStreamReader(options(database_url, "refunds")).partitions(
            reader.initialOffset(), offset
        )
    with pytest.raises(DataLoss, match="another database"):
        reader.latestOffset({**offset, "installation": 1}, limit)
    with pytest.raises(DataLoss, match="deleted and created again"):
        reader.latestOffset({**offset, "id": 99}, limit)
    with pytest.raises(InvalidRequest, match="not of a queue source"):
        reader.latestOffset({"orders": {"incarnation": "", "next": 3}}, limit)


async def test_the_position_shows_as_a_group_with_its_lag(database_url: str) -> None:
    async with running(database_url) as queues:
        await push(queues, "orders", *range(5), partition="a")
        await push(queues, "orders", *range(3), partition="b")
        stream = await asyncio.to_thread(lambda: Stream(QueueStreamReader(options(database_url))))
        await asyncio.to_thread(stream.batch)
        mirror = Mirror(Postgres(ReachOptions(database=database_url)), "orders", "spark")
        await asyncio.to_thread(mirror.show, int(stream.at["xid"]))
        assert await queues.groups.lag("orders", "spark") == 0
        await push(queues, "orders", 8, 9, partition="b")
        assert await queues.groups.lag("orders", "spark") == 2
        await asyncio.to_thread(stream.batch)
        mirror.move(int(stream.at["xid"]))
        await asyncio.to_thread(mirror.stop)
        assert await queues.groups.lag("orders", "spark") == 0
        assert (await queues.groups.describe("spark"))[1].consumed == 5


class Proxy:
    """PostgreSQL behind a port that can be closed for a while, with all connections through it."""

    def __init__(self, url: str) -> None:
        result = urlsplit(url)
        given = parse_qs(result.query)
        self._target = given["host"][0] if "host" in given else None
        self._address = (
            result.hostname or "127.0.0.1",
            result.port or int(given.get("port", ["5432"])[0]),
        )
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        user = f"{result.username or ''}{':' + result.password if result.password else ''}"
        self.url = f"postgresql://{user + '@' if user else ''}127.0.0.1:{self.port}{result.path}"
        threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if self._target:
                server = socket.socket(socket.AF_UNIX)
                server.connect(f"{self._target}/.s.PGSQL.{self._address[1]}")
            else:
                server = socket.create_connection(self._address)
            self._open += [client, server]
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass
        for one in (source, target):
            one.close()

    def cut(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._open:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._open.clear()

    def restore(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()


def test_a_stream_waits_for_a_postgresql_that_is_away_and_says_so(
    database_url: str, caplog, monkeypatch
) -> None:
    load(database_url, *(Item("orders", b"%d" % i) for i in range(10)))
    proxy = Proxy(database_url)
    stream = Stream(QueueStreamReader(options(proxy.url)))
    assert len(stream.batch()) == 10
    load(database_url, Item("orders", b"10"))
    proxy.cut()
    waiting = threading.Event()
    sleep = time.sleep
    monkeypatch.setattr(
        postgres_module.time, "sleep", lambda seconds: (waiting.set(), sleep(seconds))
    )
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(stream.batch)
        assert waiting.wait(20)
        proxy.restore()
        assert [row["payload"] for row in batch.result(60)] == ["10"]
    assert "trying again for up to 60 s (option databaseTimeout)" in caplog.text
    assert "PostgreSQL answers again after" in caplog.text
    proxy.cut()
    with pytest.raises(Unavailable, match="Raise the option databaseTimeout"):
        QueueStreamReader(options(proxy.url, databaseTimeout=0.2))


def test_a_wrong_database_is_told_at_once(database_url: str) -> None:
    wrong = urlsplit(database_url)._replace(path="/nowhere-at-all").geturl()
    with pytest.raises(Unavailable, match="does not exist"):
        QueueStreamReader(options(wrong))


def test_a_range_that_breaks_off_is_resumed_where_it_was(database_url: str, monkeypatch) -> None:
    load(database_url, *(Item("orders", b"%d" % i, f"p-{i % 3}") for i in range(30)))
    reader = QueueStreamReader(options(database_url))
    at = reader.initialOffset()
    (task,) = reader.partitions(at, reader.latestOffset(at, reader.getDefaultReadLimit()))
    whole = rows_of(reader, [task])
    batches = Postgres.batches
    failures = [7, 11, 0]

    def breaking(self: Postgres, query: str) -> Any:
        for batch in batches(self, query):
            if failures:
                yield batch.slice(0, failures.pop(0))
                raise Away("PostgreSQL failed while a range was read: server closed the connection")
            yield batch

    monkeypatch.setattr(Postgres, "batches", breaking)
    assert rows_of(reader, [task]) == whole
    assert not failures
    failures.append(5)
    unordered = QueueReader(options(database_url, streaming=False))
    with pytest.raises(Unavailable, match="a part was read already, in no order; read again"):
        rows_of(unordered, unordered.partitions())


def test_who_holds_messages_back_is_named_and_can_be_waited_for(
    database_url: str, caplog, monkeypatch
) -> None:
    load(database_url, *(Item("orders", b"%d" % i) for i in range(10)))
    opened, close = threading.Event(), threading.Event()

    async def hold() -> None:
        connection = await asyncpg.connect(
            database_url, server_settings={"application_name": "nightly"}
        )
        async with connection.transaction():
            await connection.execute("SELECT pg_current_xact_id()")
            opened.set()
            await asyncio.to_thread(close.wait, 60)
        await connection.close()

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(asyncio.run, hold())
        assert opened.wait(20)
        load(database_url, *(Item("orders", b"%d" % i) for i in range(10, 20)))
        reader = QueueReader(options(database_url, streaming=False, waitForTransactions=0.1))
        assert len(rows_of(reader, reader.partitions())) == 10
        output = (
            r"queue orders: 10 committed messages are not read yet, since an older "
            r"transaction is still open: pid \d+"
        )
        warning = output + r', application_name "nightly", idle in transaction, for \d+ s'
        assert any(re.search(warning, message) for message in caplog.messages)
        caplog.clear()

        monkeypatch.setattr(queue_source, "WARN_SECONDS", 0.0)
        stream = Stream(QueueStreamReader(options(database_url)))
        assert len(stream.batch()) == 10
        assert [stream.batch() for _ in range(3)] == [[], [], []]
        assert caplog.text.count("nightly") == 1  # said once, then from time to time

        sleep = time.sleep
        monkeypatch.setattr(
            queue_source.time, "sleep", lambda seconds: (close.set(), sleep(seconds))
        )
        patient = QueueReader(options(database_url, streaming=False, waitForTransactions=30))
        assert len(rows_of(patient, patient.partitions())) == 20
        holding.result(20)
        assert len(stream.batch()) == 10
