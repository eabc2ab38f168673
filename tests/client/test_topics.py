"""The client of topics against a real server, and against the ways a server can fail it."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.client import Client, SyncClient
from penstock.errors import (
    Conflict,
    InvalidOffset,
    InvalidRequest,
    NotFound,
    StorageFull,
    TooLarge,
    Unavailable,
)
from penstock.io.fs import Disk
from penstock.net.addresses import parse_addresses
from penstock.net.retry import Backoff
from penstock.net.topic_link import TopicLink
from penstock.protocol import frames
from tests.support.ports import free_port
from tests.support.served import Served, serving, serving_in_thread
from tests.support.wait import eventually


@asynccontextmanager
async def with_client(directory: Path, **settings: Any) -> AsyncIterator[tuple[Served, Client]]:
    async with (
        serving(directory, **settings) as served,
        Client(topics=served.address, timeout=30) as client,
    ):
        yield served, client


class Proxy:
    """Between client and server; cuts the connections when told, or after so many bytes."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._pairs: set[asyncio.StreamWriter] = set()
        self.connections = 0
        self.swallow_answers = False

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            self.cut()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        self._pairs |= {writer, up_writer}
        await asyncio.gather(
            self._copy(reader, up_writer, True), self._copy(up_reader, writer, False)
        )

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if up or not self.swallow_answers:
                    writer.write(data)
                    await writer.drain()
        writer.close()

    @property
    def connected(self) -> bool:
        return bool(self._pairs)

    def cut(self) -> None:
        pairs, self._pairs = self._pairs, set()
        for writer in pairs:
            writer.transport.abort()


async def everything(client: Client, topic: str) -> list[bytes]:
    async with client.topic(topic).reader(follow=False) as reader:
        return [record.payload async for record in reader]


async def test_create_list_describe_produce_consume_and_delete(tmp_path: Path) -> None:
    async with with_client(tmp_path) as (_, client):
        await client.topic("b").create()
        await client.topic("a").create()
        assert await client.topics() == ["a", "b"]
        assert await client.topic("a").produce(b"x", b"y") == 0
        assert await client.topic("a").produce(b"z") == 2
        assert await client.topic("a").next_offset() == 3
        assert await client.topic("a").consume(1) == [(1, b"y"), (2, b"z")]
        info = await client.topic("a").info()
        assert (info.first_offset, info.next_offset, info.segments) == (0, 3, 1)
        assert await client.topic("a").offset_at(datetime(2000, 1, 1, tzinfo=UTC)) == 0
        assert await client.topic("a").offset_at(datetime.now(UTC) + timedelta(hours=1)) == 3
        await client.topic("a").delete()
        with pytest.raises(NotFound):
            await client.topic("a").info()
        with pytest.raises(NotFound):
            await client.topic("a").delete()
        with pytest.raises(InvalidRequest):
            await client.topic("no/good").create()


async def test_a_producer_batches_and_keeps_the_order(tmp_path: Path) -> None:
    async with with_client(tmp_path) as (served, client):
        payloads = [b"%d" % number for number in range(25_000)]
        async with client.topic("a").producer(max_batch_records=1000) as producer:
            deliveries = [await producer.send(payload) for payload in payloads]
            await producer.flush()
            assert [await deliveries[place] for place in (0, 999, 1000, 24_999)] == [
                0,
                999,
                1000,
                24_999,
            ]
            assert producer.records == len(payloads)
        assert await everything(client, "a") == payloads
        assert (
            served.metrics.samples()['penstock_tcp_requests_total{command="produce_batch"}'] == 25
        )


async def test_a_record_is_sent_after_the_linger_without_a_flush(tmp_path: Path) -> None:
    async with with_client(tmp_path) as (served, client):
        await client.topic("a").create()
        for linger in (0, 0.01):
            async with client.topic("a").producer(linger=linger) as producer:
                before = served.topics.require("a").next_offset
                assert await (await producer.send(b"x")) == before


async def test_a_full_buffer_holds_the_sender_back_until_the_broker_answers(tmp_path: Path) -> None:
    async with with_client(tmp_path) as (served, client):
        await client.topic("a").create()
        proxy = Proxy(served.tcp.port)
        async with proxy.listening() as address, Client(topics=address) as through:
            proxy.swallow_answers = True
            producer = through.topic("a").producer(buffer_bytes=10_000, max_batch_bytes=1000)

            sent = 0

            async def send_all() -> None:
                nonlocal sent
                for _ in range(100):
                    await producer.send(b"x" * 1000)
                    sent += 1

            sending = asyncio.ensure_future(send_all())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(sending), 0.2)
            assert 5 <= sent <= 12
            proxy.swallow_answers = False
            proxy.cut()
            await sending
            await producer.close()
        assert served.topics.require("a").next_offset == 100


async def test_connections_cut_at_any_moment_neither_lose_nor_repeat_a_record(
    tmp_path: Path,
) -> None:
    async with with_client(tmp_path) as (served, client):
        await client.topic("a").create()
        proxy = Proxy(served.tcp.port)
        async with proxy.listening() as address, Client(topics=address) as through:
            payloads = [b"%d" % number for number in range(6000)]
            async with through.topic("a").producer(max_batch_records=50, linger=0.001) as producer:
                for place, payload in enumerate(payloads):
                    await producer.send(payload)
                    if place % 500 == 250:
                        await eventually(lambda: proxy.connected)
                        await asyncio.sleep(place / 1e6)
                        proxy.cut()
                await producer.flush()
            assert proxy.connections > 5
        assert await everything(client, "a") == payloads


async def test_produce_is_stored_once_when_its_answer_is_lost(tmp_path: Path) -> None:
    async with with_client(tmp_path) as (served, client):
        await client.topic("a").create()
        proxy = Proxy(served.tcp.port)
        async with proxy.listening() as address, Client(topics=address) as through:
            assert await through.topic("a").produce(b"first") == 0
            proxy.swallow_answers = True
            producing = asyncio.ensure_future(through.topic("a").produce(b"second"))
            await eventually(lambda: served.topics.require("a").next_offset == 2)
            proxy.swallow_answers = False
            proxy.cut()
            assert await producing == 1
            assert await through.topic("a").produce(b"third") == 2
        assert await everything(client, "a") == [b"first", b"second", b"third"]


async def test_a_batch_that_is_refused_fails_alone_and_cannot_be_overlooked(tmp_path: Path) -> None:
    async with with_client(tmp_path, max_record=1000) as (_, client):
        producer = client.topic("a").producer(max_batch_records=1)
        sent = [await producer.send(b"x" * size) for size in (1, 5000, 2, 3, 4, 5)]
        with pytest.raises(TooLarge):
            await producer.flush()
        with pytest.raises(TooLarge):
            await sent[1]
        assert [await sent[place] for place in (0, 2, 3, 4, 5)] == [0, 1, 2, 3, 4]
        await producer.flush()
        await producer.close()
        with pytest.raises(InvalidRequest):
            await producer.send(b"late")
        assert [len(payload) for payload in await everything(client, "a")] == [1, 2, 3, 4, 5]


async def test_without_a_broker_everything_fails_in_time(tmp_path: Path) -> None:
    async with Client(topics="127.0.0.1:1", timeout=0.3) as client:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            await client.topics()
        producer = client.topic("a").producer(timeout=0.3)
        delivery = await producer.send(b"x")
        with pytest.raises(Unavailable):
            await producer.close()
        with pytest.raises(Unavailable):
            await delivery


@contextlib.asynccontextmanager
async def speaking_http() -> AsyncIterator[str]:
    """A web server, whose answer "HTTP/1.1" read as our frame is 1.4 GB long."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_a_port_with_another_protocol_is_reported_as_such() -> None:
    async with speaking_http() as address:
        async with Client(topics=address, timeout=0.5) as client:
            with pytest.raises(Unavailable, match="does not speak Penstock's TCP protocol"):
                await client.topic("t").info()
        with pytest.raises(InvalidRequest, match="does not speak Penstock's TCP protocol"):
            await asyncio.to_thread(append_blocking, address)


async def test_a_wait_for_the_first_connection_is_logged_when_it_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Client(topics=f"127.0.0.1:{free_port()}", timeout=30.0) as client:
        asking = asyncio.create_task(client.topic("t").info())
        await eventually(lambda: any("waits for the broker" in line for line in caplog.messages))
        assert not asking.done()
        asking.cancel()


def append_blocking(address: str) -> None:
    """As a Spark task does."""
    with TopicLink(address, 0.5) as link:
        link.append(frames.produce_batch("t", [b"x" * 1000], None))


async def test_a_full_disk_is_reported_waited_for_and_ends_as_such_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = 1 << 30

    def waits() -> list[str]:
        return [
            message
            for message in caplog.messages
            if message.startswith("the producer of t waits for the broker")
        ]

    monkeypatch.setattr(Disk, "free_bytes", lambda *_: free)
    monkeypatch.setattr("penstock.io.space.CHECK_SECONDS", 0.0)

    async with with_client(tmp_path, free_space_reserve=1000) as (served, client):
        loop = asyncio.get_running_loop()
        await client.topic("t").create()
        free = 1500
        began = loop.time()
        producer = client.topic("t").producer(timeout=1.0)
        for _ in range(5):
            await producer.send(b"x" * 1000)
        with pytest.raises(StorageFull, match="the disk has 1500 bytes free"):
            await producer.close()
        assert loop.time() - began < 10.0
        (word,) = waits()
        assert "the disk has 1500 bytes free" in word
        with pytest.raises(StorageFull):
            await asyncio.to_thread(append_blocking, served.address)
        async with Client(topics=served.address, timeout=0.5) as hasty:
            with pytest.raises(StorageFull):
                await hasty.topic("t").produce(b"x" * 1000)
            with pytest.raises(StorageFull):
                free = 10
                await hasty.topic("another").create()
        free = 1500
        async with client.topic("t").producer(timeout=30.0) as patient:
            await patient.send(b"y" * 1000)
            await eventually(lambda: len(waits()) == 2)
            free = 1 << 30
        assert (patient.records, patient.first_offset, patient.last_offset) == (1, 0, 0)
        assert await client.topic("t").next_offset() == 1
        state = [record.message for record in caplog.records if record.name == "penstock.storage"]
        assert [text.partition(":")[0] for text in state] == [
            "appends to topics are refused until there is room",
            "appends to topics are accepted again",
        ]


async def test_the_next_address_is_used_when_one_is_dead(tmp_path: Path) -> None:
    async with (
        with_client(tmp_path) as (served, _),
        Client(topics=f"127.0.0.1:1,{served.address}") as client,
    ):
        assert await client.topic("a").produce(b"x") == 0


async def test_reading_starts_where_it_is_told(tmp_path: Path) -> None:
    async with with_client(tmp_path) as (_, client):
        await client.topic("a").produce(b"0", b"1", b"2")
        await asyncio.sleep(0.01)
        between = datetime.now(UTC)
        await asyncio.sleep(0.01)
        await client.topic("a").produce(b"3", b"4")

        async def read(start: Any) -> list[int]:
            async with client.topic("a").reader(start, follow=False) as reader:
                return [record.offset async for record in reader]

        assert await read("earliest") == [0, 1, 2, 3, 4]
        assert await read(2) == [2, 3, 4]
        assert await read(5) == []
        assert await read("latest") == []
        assert await read(between) == [3, 4]
        with pytest.raises(InvalidOffset):
            await read(6)
        with pytest.raises(NotFound):
            async with client.topic("none").reader(follow=False) as reader:
                await anext(reader.batches())
        with pytest.raises(InvalidRequest):
            client.topic("a").reader(-1)


async def test_a_reader_follows_the_topic_and_survives_cut_connections(tmp_path: Path) -> None:
    async with with_client(tmp_path) as (served, client):
        await client.topic("a").create()
        proxy = Proxy(served.tcp.port)
        async with proxy.listening() as address, Client(topics=address) as through:
            collected: list[int] = []

            async def read() -> None:
                async with through.topic("a").reader(wait=0.5) as reader:
                    async for record in reader:
                        assert record.payload == b"%d" % record.offset
                        collected.append(record.offset)
                        if len(collected) == 3000:
                            return

            reading = asyncio.ensure_future(read())
            async with client.topic("a").producer(linger=0.001) as producer:
                for number in range(3000):
                    await producer.send(b"%d" % number)
                    if number % 500 == 499:
                        await producer.flush()
                        await eventually(lambda number=number: len(collected) > number - 400)
                        proxy.cut()
            await reading
            assert collected == [*range(3000)]
            assert proxy.connections > 3


async def test_large_answers_are_fetched_ahead_and_decoded_into_columns(tmp_path: Path) -> None:
    async with with_client(tmp_path) as (_, client):
        payloads = [os.urandom(number % 700) for number in range(20_000)]
        async with client.topic("a").producer() as producer:
            await producer.send_many(payloads)
        collected: list[bytes] = []
        async with client.topic("a").reader(follow=False) as reader:
            async for batch in reader.batches():
                columns = batch.to_arrow()
                assert columns["offset"].to_pylist() == [
                    *range(len(collected), len(collected) + batch.count)
                ]
                collected += columns["payload"].to_pylist()
        assert collected == payloads


async def test_what_is_read_ahead_is_asked_for_once(tmp_path: Path) -> None:
    async with with_client(tmp_path) as (served, client):
        await client.topic("a").produce(*[bytes(400_000)] * 40)
        before = served.tcp.bytes_out
        async with client.topic("a").reader(follow=False) as reader:
            async for batch in reader.batches():
                await asyncio.sleep(0.005)  # time for the answers ahead to arrive
                assert batch.count
        assert served.tcp.bytes_out - before < 1.1 * 40 * 400_012


async def test_a_topic_made_anew_under_a_reader_is_noticed(tmp_path: Path) -> None:
    async with with_client(tmp_path) as (_, client):
        await client.topic("a").produce(b"0", b"1")
        async with client.topic("a").reader(max_bytes=1) as reader:
            batches = reader.batches()
            assert (await anext(batches)).payloads() == [b"0"]
            await client.topic("a").delete()
            await client.topic("a").produce(b"other", b"other", b"other")
            later: list[bytes] = []
            with pytest.raises(Conflict):
                async for (
                    batch
                ) in batches:  # what was read ahead before the deletion may still come
                    later += batch.payloads()
            assert later in ([], [b"1"])


async def test_a_reader_whose_records_aged_out_fails_or_goes_on_as_told(tmp_path: Path) -> None:
    async with with_client(tmp_path, segment_bytes=1000, retention_bytes=1500) as (served, client):
        for _ in range(4):
            await client.topic("a").produce(b"x" * 600)
        await served.topics.maintain()
        first = served.topics.require("a").first_offset
        assert first > 0
        with pytest.raises(InvalidOffset):
            async with client.topic("a").reader(0, follow=False) as reader:
                await anext(reader.batches())
        async with client.topic("a").reader(0, follow=False, on_lost="earliest") as reader:
            assert (await anext(reader.batches())).first_offset == first


async def test_members_of_a_group_share_a_topic_and_commit_what_they_did(tmp_path: Path) -> None:
    async with with_client(tmp_path) as (_, client):
        async with client.topic("a").producer() as producer:
            await producer.send_many(b"%d" % number for number in range(5000))
        result: dict[str, list[int]] = {"one": [], "two": []}

        async def member(name: str) -> None:
            async with client.topic("a").reader(
                group="g", member=name, max_records=100, follow=False
            ) as reader:
                async for batch in reader.batches():
                    result[name] += batch.offsets().tolist()
                    await asyncio.sleep(0)

        await asyncio.gather(member("one"), member("two"))
        assert sorted(result["one"] + result["two"]) == [*range(5000)]
        assert result["one"]
        assert result["two"]
        assert await client.topic("a").group("g").committed() == (5000, 0)
        await client.topic("a").group("g").commit(4990)
        assert await client.topic("a").group("g").committed() == (4990, 10)
        with pytest.raises(InvalidOffset):
            await client.topic("a").group("g").commit(5001)


async def test_a_member_that_leaves_in_the_middle_gives_its_range_back(tmp_path: Path) -> None:
    async with with_client(tmp_path) as (_, client):
        await client.topic("a").produce(*[b"%d" % number for number in range(10)])
        async with client.topic("a").reader(group="g", max_records=10, max_bytes=1) as reader:
            assert (await anext(reader.batches())).offsets().tolist() == [0]
        async with client.topic("a").reader(group="g", follow=False) as reader:
            assert [record.offset async for record in reader] == [*range(10)]
        assert await client.topic("a").group("g").committed() == (10, 0)


async def test_a_member_at_work_keeps_its_lease_and_a_silent_one_loses_it(tmp_path: Path) -> None:
    async with with_client(tmp_path, lease_time=0.6) as (_, client):
        await client.topic("a").produce(b"0", b"1", b"2")
        async with client.topic("a").reader(
            group="g", max_records=3, max_bytes=1, follow=False
        ) as busy:
            batches = busy.batches()
            for number in range(3):
                assert (await anext(batches)).first_offset == number
                # more than half of the lease each, more than all of it together
                await asyncio.sleep(0.35)
            assert [batch async for batch in batches] == []
        assert await client.topic("a").group("g").committed() == (3, 0)
        await client.topic("a").produce(b"3")
        silent = client.topic("a").reader(group="g", follow=False)
        assert (await anext(silent.batches())).first_offset == 3
        async with client.topic("a").reader(group="g", wait=5) as other:
            assert (await anext(other.batches())).first_offset == 3
            await other.complete()
        assert await client.topic("a").group("g").committed() == (4, 0)
        await silent.close()


def test_the_sync_facade_does_the_same_from_plain_code(tmp_path: Path) -> None:
    with serving_in_thread(tmp_path) as served, SyncClient(topics=served.address) as client:
        client.topic("a").create()
        assert client.topics() == ["a"]
        assert client.topic("a").produce(b"zero") == 0
        with client.topic("a").producer() as producer:
            delivery = producer.send(b"one")
            assert producer.offset(delivery) == 1
            producer.send_many([b"two", b"three"])
            producer.flush()
        assert client.topic("a").next_offset() == client.topic("a").info().next_offset == 4
        assert client.topic("a").consume(3) == [(3, b"three")]
        assert client.topic("a").offset_at(datetime(2000, 1, 1, tzinfo=UTC)) == 0
        with client.topic("a").reader(1, follow=False) as reader:
            assert [record.payload for record in reader] == [b"one", b"two", b"three"]
            assert reader.position == 4
        for record in client.topic("a").reader():
            assert record == (0, b"zero")
            break  # leaving a loop over a reader that would wait must not hang
        client.topic("a").group("g").commit(2)
        assert client.topic("a").group("g").committed() == (2, 2)
        client.topic("a").delete()
        with pytest.raises(NotFound):
            client.topic("a").info()


def test_addresses_are_read_the_way_people_write_them() -> None:
    assert parse_addresses("a:1, b:2") == ([("a", 1), ("b", 2)], False)
    assert parse_addresses("localhost") == ([("localhost", 12345)], False)
    assert parse_addresses([("a", 1), "[::1]:5"]) == ([("a", 1), ("::1", 5)], False)
    for wrong in ("", "a:b", ":5", []):
        with pytest.raises(InvalidRequest):
            parse_addresses(wrong)


def test_backoff_doubles_up_to_its_limit_and_starts_over() -> None:
    backoff = Backoff(1.0, 4.0)
    for most in (1.0, 2.0, 4.0, 4.0):
        assert most / 2 <= backoff.delay() <= most
    backoff.reset()
    assert backoff.delay() <= 1.0


async def test_a_broker_of_0_2_0_that_refuses_the_format_byte_is_read_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`FETCH_FLAGS` is all that 0.2.0 knows; the real release is in tests/e2e."""
    known = frames.LENGTHS | frames.TIMES
    monkeypatch.setattr("penstock.wire.tcp.commands.FETCH_FLAGS", known)
    async with with_client(tmp_path) as (served, client):
        await client.topic("a").produce(*(b"%d" % i for i in range(100)))
        assert await everything(client, "a") == [b"%d" % i for i in range(100)]
        with TopicLink(served.address) as link:
            fetched = await asyncio.to_thread(link.fetch, "a", 0, 1 << 20, keyed=True)
        assert fetched.records == 100
