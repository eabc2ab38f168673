"""The binary protocol against a real server over plain sockets."""

import asyncio
import random
import resource
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.errors import StorageFailed
from penstock.log.writer import SegmentWriter, Write
from penstock.protocol.frames import Command
from penstock.wire.tcp.connection import WAITING
from tests.support.served import Served, Wire, consume_body, consumed, named, produce_body, serving
from tests.support.tokens import SECRET, token
from tests.support.wait import eventually

PRODUCE, CONSUME, NEXT, CREATE, LIST, BATCH, FETCH, AT, INFO, DELETE = range(1, 11)
CLAIM = 0x30
OK, NO_TOPIC, BAD_OFFSET, SERIALIZATION, PRODUCE_FAILED, INTERNAL, INVALID, TOO_LARGE, UNKNOWN = (
    range(9)
)
ERROR, AUTH, UNAUTHORIZED = 0xFF, 0x10, 9

Body = Callable[[Served, Wire], Awaitable[None]]


@asynccontextmanager
async def over_tcp(directory: Path, **settings: object) -> AsyncIterator[tuple[Served, Wire]]:
    async with serving(directory, **settings) as served:  # type: ignore[arg-type]
        wire = await Wire.connect(served.tcp.port)
        try:
            yield served, wire
        finally:
            wire.close()


def u64(*values: int) -> bytes:
    return struct.pack(f">{len(values)}Q", *values)


def batch_body(
    topic: str, payloads: list[bytes], producer: tuple[bytes, int] | None = None
) -> bytes:
    head = named(topic) + (b"\1" + producer[0] + u64(producer[1]) if producer else b"\0")
    return (
        head
        + struct.pack(f">I{len(payloads)}I", len(payloads), *map(len, payloads))
        + b"".join(payloads)
    )


async def test_the_five_commands_of_the_original_answer_to_the_letter(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as (_, wire):
        assert await wire.ask(LIST) == (0x85, OK, struct.pack(">I", 0))
        assert await wire.ask(CREATE, named("a")) == (0x84, OK, b"")
        assert await wire.ask(CREATE, named("a")) == (0x84, OK, b"")
        assert await wire.ask(PRODUCE, produce_body("a", b"hello")) == (0x81, OK, u64(0))
        assert await wire.ask(PRODUCE, produce_body("a", b"")) == (0x81, OK, u64(1))
        assert await wire.ask(NEXT, named("a")) == (0x83, OK, u64(2))
        command, status, result = await wire.ask(CONSUME, consume_body("a", 0, 10))
        assert (command, status, consumed(result)) == (0x82, OK, [(0, b"hello"), (1, b"")])
        command, status, result = await wire.ask(CONSUME, consume_body("a", 1, 1))
        assert consumed(result) == [(1, b"")]
        assert await wire.ask(LIST) == (0x85, OK, struct.pack(">I", 1) + named("a"))


async def test_a_topic_is_made_by_its_first_record_and_names_may_hold_anything_a_file_name_may(
    tmp_path: Path,
) -> None:
    async with over_tcp(tmp_path) as (served, wire):
        name = "topic with spaces & symbols !@#$%^&()_+ é"
        for number in range(3):
            assert await wire.ask(PRODUCE, produce_body(name, b"x")) == (0x81, OK, u64(number))
        assert served.topics.names() == [name]


async def test_what_is_not_there_is_empty_not_an_error(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as (_, wire):
        assert await wire.ask(NEXT, named("none")) == (0x83, OK, u64(0))
        assert await wire.ask(CONSUME, consume_body("none", 0, 5)) == (
            0x82,
            OK,
            struct.pack(">I", 0),
        )
        await wire.ask(PRODUCE, produce_body("a", b"x"))
        assert await wire.ask(CONSUME, consume_body("a", 1, 5)) == (0x82, OK, struct.pack(">I", 0))
        assert await wire.ask(CONSUME, consume_body("a", 2**64 - 1, 5)) == (
            0x82,
            OK,
            struct.pack(">I", 0),
        )
        assert await wire.ask(CONSUME, consume_body("a", 0, 0)) == (0x82, OK, struct.pack(">I", 0))


@pytest.mark.parametrize(
    ("command", "request_body", "status"),
    [
        (PRODUCE, b"", SERIALIZATION),
        (PRODUCE, named("a") + struct.pack(">I", 5) + b"four", SERIALIZATION),
        (PRODUCE, named("a") + struct.pack(">I", 3) + b"four", SERIALIZATION),
        (PRODUCE, struct.pack(">H", 9) + b"short", SERIALIZATION),
        (PRODUCE, produce_body("a/b", b"x"), INVALID),
        (PRODUCE, produce_body("..", b"x"), INVALID),
        (PRODUCE, produce_body("", b"x"), INVALID),
        (PRODUCE, produce_body("n" * 250, b"x"), INVALID),
        (PRODUCE, struct.pack(">H", 1) + b"\xff" + struct.pack(">I", 1) + b"x", INVALID),
        (CONSUME, named("a") + b"\0", SERIALIZATION),
        (CONSUME, consume_body("a", 0, 1) + b"!", SERIALIZATION),
        (CONSUME, consume_body("a\0", 0, 1), INVALID),
        (CREATE, named("a/b"), INVALID),
        (CREATE, named("a") + b"!", SERIALIZATION),
        (LIST, b"!", SERIALIZATION),
        (NEXT, b"\0", SERIALIZATION),
        (BATCH, batch_body("a", [b"x"])[:-1], SERIALIZATION),
        (BATCH, batch_body("a", [b"x"]) + b"!", SERIALIZATION),
        (BATCH, batch_body("a", []), INVALID),
        (BATCH, named("a") + b"\x02" + struct.pack(">I", 0), SERIALIZATION),
        (FETCH, named("none") + struct.pack(">QII", 0, 1024, 0), NO_TOPIC),
        (FETCH, named("a") + struct.pack(">QII", 0, 1024, 0) + b"\x80", SERIALIZATION),
        (FETCH, named("a") + struct.pack(">QII", 7, 1024, 0), BAD_OFFSET),
        (AT, named("none") + struct.pack(">q", 0), NO_TOPIC),
        (INFO, named("none"), NO_TOPIC),
        (DELETE, named("none"), NO_TOPIC),
        (CLAIM, b'{"target":', SERIALIZATION),
        pytest.param(CLAIM, b'{"x": ' + b"[" * 100_000, SERIALIZATION, id="nested too deeply"),
        (CLAIM, b'{"target": "\xff"}', SERIALIZATION),
        (0x00, b"", UNKNOWN),
        (0x81, b"xyz", UNKNOWN),
    ],
)
async def test_a_bad_request_is_answered_and_the_connection_stays_usable(
    tmp_path: Path, command: int, request_body: bytes, status: int
) -> None:
    async with over_tcp(tmp_path) as (_, wire):
        await wire.ask(CREATE, named("a"))
        answered, result, message = await wire.ask(command, request_body)
        assert (answered, result) == (ERROR, status)
        (length,) = struct.unpack_from(">I", message)
        assert length == len(message) - 4 > 0
        assert await wire.ask(PRODUCE, produce_body("a", b"fine")) == (0x81, OK, u64(0))


async def test_a_token_is_welcome_where_none_is_asked_for(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as (_, wire):
        assert await wire.ask(0x10, b"any.old.token") == (0x90, OK, b"")
        assert await wire.ask(PRODUCE, produce_body("a", b"fine")) == (0x81, OK, u64(0))


async def test_a_frame_above_the_limit_is_refused_at_once_and_passed_over(tmp_path: Path) -> None:
    async with over_tcp(tmp_path, tcp={"max_frame": 1000}) as (_, wire):
        wire.send(PRODUCE, produce_body("a", b"before"))
        wire.writer.write(struct.pack(">BI", PRODUCE, 2000) + b"only the beginning")
        assert await wire.answer() == (0x81, OK, u64(0))
        command, status, _ = await wire.answer()
        assert (command, status) == (ERROR, TOO_LARGE)
        wire.writer.write(b"x" * 900)
        wire.writer.write(b"x" * (2000 - 918) + struct.pack(">BI", PRODUCE, 1500) + b"y" * 1500)
        wire.send(PRODUCE, produce_body("a", b"after"))
        assert (await wire.answer())[:2] == (ERROR, TOO_LARGE)
        assert await wire.answer() == (0x81, OK, u64(1))
        wire.writer.write(
            struct.pack(">BI", PRODUCE, 5000)
        )  # nobody means that: we do not wait for it
        assert (await wire.answer())[:2] == (ERROR, TOO_LARGE)
        assert await wire.ended()


async def test_a_client_that_sends_a_frame_of_65_mb_before_it_reads_gets_the_answer(
    tmp_path: Path,
) -> None:
    """As the original's client does: blocking, all of the frame first."""

    def send(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            connection.sendall(struct.pack(">BI", PRODUCE, 65 << 20))
            for _ in range(65):
                connection.sendall(bytes(1 << 20))
            connection.sendall(struct.pack(">BI", NEXT, 3) + named("a"))
            answers = b""
            while len(answers) < 6 or not answers.endswith(u64(0)):
                answers += connection.recv(4096) or pytest.fail(f"closed after {answers!r}")
            return answers

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with over_tcp(tmp_path) as (_, wire):
        port = wire.writer.get_extra_info("peername")[1]
        answers = await asyncio.to_thread(send, port)
        assert answers[:2] == bytes([ERROR, TOO_LARGE])
        assert b"larger than the limit of 67108864" in answers
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (
            32 << 10
        )  # kilobytes: it was not kept


async def test_a_record_above_the_limit_is_refused_alone_and_counted_once(tmp_path: Path) -> None:
    async with over_tcp(tmp_path, max_record=100) as (served, wire):
        await wire.ask(CREATE, named("a"))
        for payload in (b"small", b"x" * 101, b"small"):
            wire.send(PRODUCE, produce_body("a", payload))
        assert [status for _, status, _ in [await wire.answer() for _ in range(3)]] == [
            OK,
            TOO_LARGE,
            OK,
        ]
        assert await wire.ask(NEXT, named("a")) == (0x83, OK, u64(2))
        assert served.metrics.samples()['penstock_tcp_requests_total{command="produce"}'] == 3


@pytest.mark.parametrize("fsync", ["never", "interval", "group", "always"])
async def test_pipelined_requests_are_answered_in_their_order(tmp_path: Path, fsync: str) -> None:
    async with over_tcp(tmp_path, fsync=fsync) as (_, wire):
        choose = random.Random(fsync)
        expected: list[tuple[int, int]] = []
        offsets = {"a": 0, "b": 0}
        for _ in range(400):
            kind = choose.choice([PRODUCE, PRODUCE, PRODUCE, BATCH, NEXT, LIST, 0x77])
            topic = choose.choice("ab")
            if kind == PRODUCE:
                wire.send(PRODUCE, produce_body(topic, choose.randbytes(choose.randrange(20))))
                expected.append((0x81, offsets[topic]))
                offsets[topic] += 1
            elif kind == BATCH:
                count = choose.randrange(1, 5)
                wire.send(BATCH, batch_body(topic, [b"x"] * count))
                expected.append((0x86, offsets[topic]))
                offsets[topic] += count
            elif kind == NEXT:
                wire.send(NEXT, named(topic))
                expected.append((0x83, -1))
            else:
                wire.send(kind)
                expected.append((0x85 if kind == LIST else ERROR, -1))
        for command, offset in expected:
            answered, _, result = await wire.answer()
            assert answered == command
            if offset >= 0:
                assert struct.unpack_from(">Q", result)[0] == offset


@pytest.mark.parametrize("sizes", [[100] * 300, [*range(300)], [100] * 40 + [7] * 40 + [100] * 40])
async def test_a_run_of_produces_in_one_read_is_stored_record_by_record(
    tmp_path: Path, sizes: list[int]
) -> None:
    async with over_tcp(tmp_path) as (_, wire):
        await wire.ask(CREATE, named("a"))
        payloads = [bytes([place % 256]) * size for place, size in enumerate(sizes)]
        wire.writer.write(
            b"".join(
                struct.pack(">BI", PRODUCE, len(produce_body("a", payload)))
                + produce_body("a", payload)
                for payload in payloads
            )
        )
        for number in range(len(payloads)):
            assert await wire.answer() == (0x81, OK, u64(number))
        collected: list[tuple[int, bytes]] = []
        while len(collected) < len(payloads):
            collected += consumed(
                (await wire.ask(CONSUME, consume_body("a", len(collected), 1000)))[2]
            )
        assert collected == [*enumerate(payloads)]


@pytest.mark.parametrize("fsync", ["group", "interval"])
@pytest.mark.parametrize("error", [StorageFailed("no disk"), ValueError("a bug")])
async def test_every_produce_of_a_commit_that_fails_is_answered_and_the_next_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: str, error: Exception
) -> None:
    write = SegmentWriter.write
    failing = True

    def fail(self: SegmentWriter, job: Write, sync: bool) -> None:
        if failing:
            raise error
        write(self, job, sync)

    monkeypatch.setattr(SegmentWriter, "write", fail)

    async with over_tcp(tmp_path, fsync=fsync) as (_, wire):
        await wire.ask(CREATE, named("a"))
        for size in (3, 3, 3, 3, 3, 7):
            wire.send(PRODUCE, produce_body("a", bytes(size)))
        for _ in range(6):
            answered, status, result = await wire.answer()
            assert (answered, status) == (ERROR, PRODUCE_FAILED)
            assert (b"no disk" if isinstance(error, StorageFailed) else b"see the log") in result
        failing = False
        assert await wire.ask(PRODUCE, produce_body("a", b"x")) == (0x81, OK, u64(0))
        assert consumed((await wire.ask(CONSUME, consume_body("a", 0, 9)))[2]) == [(0, b"x")]


async def test_a_large_frame_behind_an_append_is_answered_when_the_append_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = SegmentWriter.write, threading.Event()

    def wait_and_write(self: SegmentWriter, job: Write, sync: bool) -> None:
        written.wait(60)
        write(self, job, sync)

    async with over_tcp(tmp_path, fsync="group") as (served, wire):
        await wire.ask(CREATE, named("a"))
        monkeypatch.setattr(SegmentWriter, "write", wait_and_write)
        wire.send(PRODUCE, produce_body("a", b"x"))
        wire.send(NEXT, named("a") + bytes(200_000))
        wire.send(NEXT, named("a"))
        sent = len(named("a")) + 200_000
        await eventually(lambda: served.tcp.bytes_in > sent)
        written.set()
        assert await wire.answer() == (0x81, OK, u64(0))
        assert (await wire.answer())[0] == ERROR
        assert await wire.answer() == (0x83, OK, u64(1))


async def test_bytes_may_come_one_by_one_or_cut_anywhere(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as (_, wire):
        large = (
            bytes(range(256)) * 1000
        )  # above what is kept joined: received into memory of its own
        stream = b"".join(
            struct.pack(">BI", command, len(part)) + part
            for command, part in [
                (CREATE, named("a")),
                *[(PRODUCE, produce_body("a", b"r%d" % number)) for number in range(20)],
                (PRODUCE, produce_body("a", large)),
                (BATCH, batch_body("a", [b"x", large, b"y"])),
                (NEXT, named("a")),
            ]
        )
        choose = random.Random(7)
        at = 0
        while at < len(stream):
            step = choose.choice([1, 1, 2, 5, 7, 100, 30_000, 70_000])
            wire.writer.write(stream[at : at + step])
            await wire.writer.drain()
            await asyncio.sleep(0)
            at += step
        assert (await wire.answer())[0] == 0x84
        for number in range(21):
            assert await wire.answer() == (0x81, OK, u64(number))
        assert await wire.answer() == (0x86, OK, u64(21) + struct.pack(">I", 3))
        assert await wire.answer() == (0x83, OK, u64(24))
        result = consumed((await wire.ask(CONSUME, consume_body("a", 20, 3)))[2])
        assert result == [(20, large), (21, b"x"), (22, large)]


async def test_a_batch_is_stored_once_when_its_producer_sends_it_again(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as (served, wire):
        me = bytes(range(16))
        first = await wire.ask(BATCH, batch_body("a", [b"x", b"y"], (me, 0)))
        assert first == (0x86, OK, u64(0) + struct.pack(">I", 2))
        assert await wire.ask(BATCH, batch_body("a", [b"z"], (me, 1))) == (
            0x86,
            OK,
            u64(2) + struct.pack(">I", 1),
        )
        assert await wire.ask(BATCH, batch_body("a", [b"x", b"y"], (me, 0))) == first
        again = await Wire.connect(served.tcp.port)
        assert await again.ask(BATCH, batch_body("a", [b"x", b"y"], (me, 0))) == first
        again.close()
        assert await wire.ask(NEXT, named("a")) == (0x83, OK, u64(3))
        command, status, _ = await wire.ask(BATCH, batch_body("a", [b"q"], (me, 9)))
        assert (command, status) == (ERROR, INVALID)


def fetch_body(topic: str, start: int, most: int, wait: int = 0, lengths: bool = False) -> bytes:
    return named(topic) + struct.pack(">QII", start, most, wait) + (b"\1" if lengths else b"")


@pytest.mark.parametrize("lengths", [False, True])
async def test_fetch_gives_the_file_as_it_is(tmp_path: Path, lengths: bool) -> None:
    async with over_tcp(tmp_path) as (served, wire):
        payloads = [b"r" * size for size in (0, 5, 100, 1, 1000)]
        await wire.ask(BATCH, batch_body("a", payloads))
        log = (tmp_path / "a" / "data.log").read_bytes()
        command, status, rows = await wire.ask(FETCH, fetch_body("a", 0, 1 << 20, lengths=lengths))
        incarnation, first, following, end, count = struct.unpack_from(">16sQQQI", rows)
        assert (command, status) == (0x87, OK)
        assert (incarnation.hex(), first, following, end, count) == (
            served.topics.require("a").incarnation,
            0,
            5,
            5,
            5,
        )
        rest = rows[44:]
        if lengths:
            assert struct.unpack_from(">5I", rest) == (0, 5, 100, 1, 1000)
            rest = rest[20:]
        assert rest == log
        # From the middle, with room for less than all: whole records only, and at least one.
        rows = (await wire.ask(FETCH, fetch_body("a", 1, 40, lengths=lengths)))[2]
        _, first, following, end, count = struct.unpack_from(">16sQQQI", rows)
        assert (first, following, end, count) == (1, 2, 5, 1)
        assert rows.endswith(log[12 : 12 + 17])
        rows = (await wire.ask(FETCH, fetch_body("a", 4, 1, lengths=lengths)))[2]
        assert rows.endswith(log[-1012:])
        rows = (await wire.ask(FETCH, fetch_body("a", 5, 100, lengths=lengths)))[2]
        assert struct.unpack_from(">16sQQQI", rows)[1:] == (5, 5, 5, 0)


async def test_a_fetch_that_waits_is_answered_by_the_next_append(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as (served, wire):
        await wire.ask(CREATE, named("a"))
        wire.send(FETCH, fetch_body("a", 0, 100, wait=10_000))
        wire.send(LIST)  # behind a waiting request: answered after it
        other = await Wire.connect(served.tcp.port)
        assert (await other.ask(PRODUCE, produce_body("a", b"now")))[0] == 0x81
        command, _, result = await wire.answer()
        assert (command, result[-3:]) == (0x87, b"now")
        assert (await wire.answer())[0] == 0x85
        wire.send(FETCH, fetch_body("a", 1, 100, wait=20))
        assert struct.unpack_from(">16sQQQI", (await wire.answer())[2])[4] == 0
        other.close()


async def test_a_waiting_fetch_hears_that_its_topic_is_deleted(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as (served, wire):
        await wire.ask(CREATE, named("a"))
        wire.send(FETCH, fetch_body("a", 0, 100, wait=10_000))
        other = await Wire.connect(served.tcp.port)
        assert (await other.ask(DELETE, named("a")))[:2] == (0x8A, OK)
        assert (await wire.answer())[:2] == (ERROR, NO_TOPIC)
        other.close()


async def test_topic_info_offset_by_time_and_delete(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as (served, wire):
        await wire.ask(BATCH, batch_body("a", [b"x", b"y"]))
        fields = struct.unpack(">16sQQQIQQBIIB", (await wire.ask(INFO, named("a")))[2])
        incarnation, first, following, size, segments, records, archived, policy, damaged = fields[
            :9
        ]
        assert fields[9:] == (1, 0), "one partition, in aiq's layout"
        assert (first, following, segments, records, archived, policy) == (
            0,
            2,
            1,
            2,
            (1 << 64) - 1,
            0,
        )
        assert damaged == 0
        assert size >= 26
        assert incarnation.hex() == served.topics.require("a").incarnation
        assert await wire.ask(AT, named("a") + struct.pack(">q", 0)) == (0x88, OK, u64(0))
        assert await wire.ask(AT, named("a") + struct.pack(">q", 1 << 45)) == (0x88, OK, u64(2))
        assert await wire.ask(DELETE, named("a")) == (0x8A, OK, b"")
        assert await wire.ask(NEXT, named("a")) == (0x83, OK, u64(0))
        assert await wire.ask(PRODUCE, produce_body("a", b"new")) == (0x81, OK, u64(0))
        assert served.topics.require("a").incarnation != incarnation.hex()


async def test_a_client_that_does_not_read_is_held_back_and_holds_back_nobody_else(
    tmp_path: Path,
) -> None:
    async with over_tcp(tmp_path) as (served, wire):
        large = b"z" * (1 << 20)
        await wire.ask(BATCH, batch_body("a", [large] * 4))
        slow = await Wire.connect(served.tcp.port, receive_buffer=4096)
        asked = 100
        for _ in range(asked):  # 400 MiB of answers, none of which is read
            slow.send(CONSUME, consume_body("a", 0, 4))
        held = None
        for _ in range(50):
            assert (await wire.ask(NEXT, named("a")))[1] == OK
            held = held or next((each for each in served.tcp.connections if each.held()), None)
        assert held is not None
        assert held.transport.get_write_buffer_size() < 16 << 20
        for _ in range(3):
            assert len(consumed((await slow.answer())[2])) == 4
        slow.close()


async def test_appends_in_flight_are_bounded_and_all_are_answered(tmp_path: Path) -> None:
    async with over_tcp(tmp_path, fsync="group") as (served, wire):
        payload = b"q" * (1 << 20)
        await wire.ask(CREATE, named("a"))
        for _ in range(60):
            wire.send(PRODUCE, produce_body("a", payload))
        most = 0
        for number in range(60):
            assert await wire.answer() == (0x81, OK, u64(number))
            most = max(most, *(each.in_flight for each in served.tcp.connections))
        assert most <= (16 << 20) + 2 * len(payload)


async def test_an_abrupt_close_in_the_middle_leaves_the_server_well(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as (served, wire):
        await wire.ask(CREATE, named("a"))
        for cut in (0, 3, 5, 9, 30):
            gone = await Wire.connect(served.tcp.port)
            if not cut:
                gone.send(FETCH, fetch_body("a", 0, 10, wait=60_000))
            gone.writer.write(
                (struct.pack(">BI", PRODUCE, 40) + produce_body("a", b"x" * 33))[:cut]
            )
            await gone.writer.drain()
            gone.writer.transport.abort()
        await eventually(lambda: len(served.tcp.connections) == 1)
        assert await wire.ask(PRODUCE, produce_body("a", b"x")) == (0x81, OK, u64(0))


async def test_a_client_that_stops_sending_still_gets_its_answers(tmp_path: Path) -> None:
    async with over_tcp(tmp_path, fsync="group") as (_, wire):
        for _ in range(10):
            wire.send(PRODUCE, produce_body("a", b"x"))
        wire.writer.write_eof()
        for number in range(10):
            assert await wire.answer() == (0x81, OK, u64(number))
        assert await wire.ended()


async def test_connections_beyond_the_limit_are_closed_at_once(tmp_path: Path) -> None:
    async with over_tcp(tmp_path, tcp={"max_connections": 1}) as (served, wire):
        await wire.ask(LIST)
        second = await Wire.connect(served.tcp.port)
        assert await second.ended()
        assert (await wire.ask(LIST))[1] == OK
        wire.close()
        await eventually(lambda: not served.tcp.connections)
        third = await Wire.connect(served.tcp.port)
        assert (await third.ask(LIST))[1] == OK
        third.close()


async def test_silent_connections_are_closed_after_the_idle_time(tmp_path: Path) -> None:
    async with over_tcp(tmp_path, tcp={"idle_timeout": 0.1}) as (_, wire):
        await wire.ask(LIST)
        assert await wire.ended()


async def test_a_connection_that_does_not_authenticate_in_time_is_closed(tmp_path: Path) -> None:
    async with over_tcp(
        tmp_path, auth={"secret": SECRET, "clock_skew": 0.0}, tcp={"auth_timeout": 1.0}
    ) as (served, silent):
        known, refused, busy = [await Wire.connect(served.tcp.port) for _ in range(3)]
        admitted = await known.ask(AUTH, token().encode())
        assert admitted[1] == OK
        assert (await refused.ask(AUTH, b"nonsense"))[1] == UNAUTHORIZED

        async def is_heard() -> bool:
            return (await busy.ask(LIST))[1] != UNAUTHORIZED

        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await eventually(is_heard)  # asking does not extend its time
        assert await silent.ended()
        assert await refused.ended()
        assert (await known.ask(LIST))[1] == OK
        for wire in (known, refused, busy):
            wire.close()


async def test_a_connection_whose_token_expired_is_closed_unless_it_brings_another(
    tmp_path: Path,
) -> None:
    async with over_tcp(
        tmp_path, auth={"secret": SECRET, "clock_skew": 0.0}, tcp={"auth_timeout": 1.0}
    ) as (served, wire):
        renewing = await Wire.connect(served.tcp.port)
        for one in (wire, renewing):
            brief = token(lifetime=1.0)  # up to one second more
            assert (await one.ask(AUTH, brief.encode()))[1] == OK
        assert (await renewing.ask(AUTH, token().encode()))[1] == OK
        assert await wire.ended()
        assert (await renewing.ask(LIST))[1] == OK
        renewing.close()


@pytest.mark.parametrize("size", [100, 200_000])
async def test_a_frame_that_does_not_end_or_trickles_in_is_given_up(
    tmp_path: Path, size: int
) -> None:
    async with over_tcp(tmp_path, tcp={"frame_timeout": 0.3}) as (served, stuck):
        trickling, idle = await Wire.connect(served.tcp.port), await Wire.connect(served.tcp.port)
        start = struct.pack(">BI", PRODUCE, size) + b"x" * 20
        for wire in (stuck, trickling):
            wire.writer.write(start)

        async def trickle() -> None:
            while True:
                trickling.writer.write(b"x")
                await asyncio.sleep(0.05)

        task = asyncio.ensure_future(trickle())
        assert await stuck.ended()
        assert await trickling.ended() or size == 100  # of which all bytes may have come
        task.cancel()
        assert (await idle.ask(LIST))[1] == OK  # between frames there is no limit
        for wire in (trickling, idle):
            wire.close()


async def test_all_frames_that_are_arriving_have_a_common_bound(tmp_path: Path) -> None:
    async with over_tcp(tmp_path, max_bodies=1_000_000) as (served, one):
        two, small = await Wire.connect(served.tcp.port), await Wire.connect(served.tcp.port)
        memory = served.tcp.memory
        large = produce_body("a", b"x" * 700_000)
        one.writer.write(struct.pack(">BI", PRODUCE, len(large)) + large[:-1])
        await eventually(lambda: memory.total > 700_000)
        two.writer.write(struct.pack(">BI", PRODUCE, len(large)) + large[:1000])
        _, status, text = await two.answer()
        assert (status, b"try again" in text) == (INTERNAL, True)
        assert await two.ended()
        assert (await small.ask(PRODUCE, produce_body("a", b"x" * 60_000)))[1] == OK
        one.writer.write(large[-1:])
        assert (await one.answer())[1] == OK
        assert memory.total == 0
        small.writer.write(struct.pack(">BI", PRODUCE, len(large)) + large[:1000])
        await eventually(lambda: memory.total > 700_000)
        small.close()
        await eventually(lambda: memory.total == 0)
        two.close()


async def test_stopping_answers_what_is_under_way(tmp_path: Path) -> None:
    async with over_tcp(tmp_path, fsync="group") as (served, wire):
        await wire.ask(CREATE, named("a"))
        for _ in range(20):
            wire.send(PRODUCE, produce_body("a", b"x"))
        await wire.writer.drain()
        await eventually(lambda: served.topics.require("a").next_offset > 0)
        await served.tcp.stop(5)
        answers = 0
        while not wire.reader.at_eof():
            try:
                assert (await wire.answer())[1] == OK
            except asyncio.IncompleteReadError:
                break
            answers += 1
        assert answers == served.topics.require("a").next_offset > 0


async def test_random_bytes_never_take_the_server_down(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as (served, wire):
        choose = random.Random(20)
        for _ in range(150):
            victim = await Wire.connect(served.tcp.port)
            for _ in range(choose.randrange(1, 6)):
                command = choose.choice([*Command, 0x00, 0x0F, 0x7F, ERROR])
                part = choose.choice(
                    [
                        choose.randbytes(choose.randrange(60)),
                        named("a") + choose.randbytes(choose.randrange(40)),
                        named("a") + named("g") + choose.randbytes(choose.randrange(40)),
                        batch_body("a", [b"x"] * choose.randrange(4))[: choose.randrange(40)],
                    ]
                )
                if command in WAITING:
                    part = part[:8]  # may not wait
                victim.send(command, part)
                if choose.random() < 0.1:
                    victim.writer.write(choose.randbytes(choose.randrange(20)))
            victim.writer.write_eof()
            async with asyncio.timeout(60):
                while await victim.reader.read(1 << 16):
                    pass
            victim.close()
        assert (await wire.ask(LIST))[1] == OK
