"""The binary protocol's bytes, written out: whoever changes these breaks every client there is."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import Damaged, InvalidRequest
from penstock.protocol import frames
from penstock.protocol.frames import Body, Command
from penstock.protocol.kafka_batch import NewRecord
from penstock.protocol.record_batch import HEADER_SIZE, RECORD_HEADER, Batch, walk
from penstock.protocol.status import Malformed, TcpStatus
from tests.support.served import Wire, serving

ID = bytes(range(16))


def hexed(text: str) -> bytes:
    return bytes.fromhex(text.replace(" ", ""))


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (frames.produce("ab", b"hey"), "01 0000000b 0002 6162 00000003 686579"),
        (frames.consume("ab", 7, 100), "02 00000010 0002 6162 0000000000000007 00000064"),
        (frames.request(Command.NEXT_OFFSET, frames.name("ab")), "03 00000004 0002 6162"),
        (frames.request(Command.CREATE_TOPIC, frames.name("ab")), "04 00000004 0002 6162"),
        (frames.request(Command.LIST_TOPICS), "05 00000000"),
        (
            b"".join(frames.produce_batch("ab", [b"x", b"", b"yz"])),
            "06 00000018 0002 6162 00 00000003 00000001 00000000 00000002 78 797a",
        ),
        (
            b"".join(frames.produce_batch("a", [b"x"], (ID, 5))),
            "06 00000025 0001 61 01 000102030405060708090a0b0c0d0e0f 0000000000000005 00000001 00000001 78",
        ),
        (
            frames.fetch("a", 9, 65536, 250),
            "07 00000013 0001 61 0000000000000009 00010000 000000fa",
        ),
        (
            frames.fetch("a", 9, 65536, 0, frames.LENGTHS),
            "07 00000014 0001 61 0000000000000009 00010000 00000000 01",
        ),
        (
            b"".join(frames.produce_records("a", [NewRecord(b"v", b"k", [("h", None)], 5)])),
            "0b 00000023 0001 61 00 00000001 0000000000000005 00000001 6b 00000001 76 0001 0001 68 ffffffff",
        ),
        (
            b"".join(frames.produce_records("a/3", [NewRecord(None)], (ID, 5))),
            "0b 00000034 0003 612f33 01 000102030405060708090a0b0c0d0e0f 0000000000000005 00000001 8000000000000000 ffffffff ffffffff 0000",
        ),
        (
            frames.create_partitioned("a", "kafka", 3),
            "0c 0000000e 0001 61 0005 6b61666b61 00000003",
        ),
    ],
)
def test_requests_have_exactly_these_bytes(frame: bytes, expected: str) -> None:
    assert frame == hexed(expected)


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (frames.produced(258, 1), "81 00 00000008 0000000000000102"),
        (
            frames.produced(255, 3),
            "".join(f"81 00 00000008 0000000000000{low}" for low in ("0ff", "100", "101")),
        ),
        (
            frames.consumed([3, 4], [b"x", b""]),
            "82 00 0000001d 00000002 0000000000000003 00000001 78 0000000000000004 00000000",
        ),
        (frames.names(["a", "bc"]), "85 00 0000000b 00000002 0001 61 0002 6263"),
        (
            frames.times(np.array([7, 7, -1], np.int64)),
            "00000002 00000002 00000001 0000000000000007 ffffffffffffffff",
        ),
        (frames.failure(TcpStatus.TOPIC_NOT_FOUND, "no"), "ff 01 00000006 00000002 6e6f"),
        (
            frames.failure(TcpStatus.PRODUCE_FAILED, "no", b'{"code":"Full"}'),
            "ff 04 00000015 00000002 6e6f 7b22636f6465223a2246756c6c227d",
        ),
    ],
)
def test_answers_have_exactly_these_bytes(frame: bytes, expected: str) -> None:
    assert frame == hexed(expected)


# What a broker answers to these, one after another. {name}: bytes it chose itself, used later.
AB, G, M = "0002 6162", "0001 67", "0001 6d"
RECORDS = (
    "0000000000000000 03000000 686579 0100000000000000 01000000 78"
    "0200000000000000 00000000 0300000000000000 02000000 797a"
)
THREE = "00000003 00000001 00000000 00000002 78 797a"
INFO = "00000001 0000000000000004 ffffffffffffffff 00 00000000 00000001 00"
CLAIM = b'{"target":"t","app":"a","batch":0,"task":0,"checksum":"c","run":"r"}'
CLAIMED = b'{"verdict":"write","newest":0,"note":"","tasks":[],"rows":0}'
COMMIT = b'{"target":"t","app":"a","batch":0}'
CONVERSATION = [
    ("10 00000005 746f6b656e", "90 00 00000000"),
    (f"04 00000004 {AB}", "84 00 00000000"),
    ("05 00000000", f"85 00 00000008 00000001 {AB}"),
    (f"01 0000000b {AB} 00000003 686579", "81 00 00000008 0000000000000000"),
    (
        f"06 00000030 {AB} 01 000102030405060708090a0b0c0d0e0f 0000000000000000 {THREE}",
        "86 00 0000000c 0000000000000001 00000003",
    ),
    (
        f"02 00000010 {AB} 0000000000000000 00000002",
        "82 00 00000020 00000002 0000000000000000 00000003 686579 0000000000000001 00000001 78",
    ),
    (f"03 00000004 {AB}", "83 00 00000008 0000000000000004"),
    (
        f"09 00000004 {AB}",
        "89 00 00000046 {incarnation:16} 0000000000000000 0000000000000004 {bytes:8} " + INFO,
    ),
    (
        f"07 00000014 {AB} 0000000000000000 00010000 00000000",
        "87 00 00000062 {incarnation} 0000000000000000 0000000000000004 0000000000000004 00000004"
        + RECORDS,
    ),
    (
        f"07 00000015 {AB} 0000000000000000 00010000 00000000 01",
        "87 00 00000072 {incarnation} 0000000000000000 0000000000000004 0000000000000004 00000004"
        "00000003 00000001 00000000 00000002" + RECORDS,
    ),
    (f"08 0000000c {AB} 0000000000000000", "88 00 00000008 0000000000000000"),
    (
        f"20 00000012 {AB} {G} {M} 0000000a 00000000",
        "a0 00 00000024 {lease:16} 0000000000000000 0000000000000004 {milliseconds:4}",
    ),
    (f"25 00000017 {AB} {G} {{lease}}", "a5 00 00000004 {milliseconds:4}"),
    (f"21 00000017 {AB} {G} {{lease}}", "a1 00 00000008 0000000000000004"),
    (f"22 0000000f {AB} {G} 0000000000000002", "a2 00 00000000"),
    (f"23 00000007 {AB} {G}", "a3 00 00000010 0000000000000002 0000000000000002"),
    (f"24 0000000a {AB} {G} {M}", "a4 00 00000004 00000000"),
    (f"30 {len(CLAIM):08x} {CLAIM.hex()}", f"b0 00 {len(CLAIMED):08x} {CLAIMED.hex()}"),
    (f"31 {len(COMMIT):08x} {COMMIT.hex()}", "b1 00 00000000"),
    (f"0a 00000004 {AB}", "8a 00 00000000"),
    (f"0c 0000000f {AB} 0005 6b61666b61 00000002", "8c 00 00000000"),
    (
        "0b 0000001f 0004 61622f31 00 00000001 8000000000000000 00000001 6b 00000001 76 0000",
        "8b 00 0000000c 0000000000000000 00000001",
    ),
    (
        "0b 0000001c 0002 6162 00 00000001 8000000000000000 ffffffff 00000001 76 0000",
        "8b 00 0000000c 0000000000000000 00000001",
    ),
    (f"0a 00000004 {AB}", "8a 00 00000000"),
    (f"0a 00000004 {AB}", "ff 01 {length:4} {message:*}"),
]


async def test_a_broker_answers_every_command_with_exactly_these_bytes(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        wire = await Wire.connect(served.tcp.port)
        chosen: dict[str, str] = {}
        for request, expected in CONVERSATION:
            wire.writer.write(hexed(request.format(**chosen)))
            command, status, body = await wire.answer()
            answer = struct.pack(">BBI", command, status, len(body)).hex() + body.hex()
            match = re.fullmatch(pattern(expected, chosen), answer)
            assert match, f"{request}: {answer}"
            chosen |= match.groupdict()
        wire.close()


def pattern(expected: str, chosen: dict[str, str]) -> str:
    def group(match: re.Match[str]) -> str:
        name, size = match[1], match[2]
        if size is None:
            return chosen[name]
        return f"(?P<{name}>.*)" if size == "*" else f"(?P<{name}>.{{{2 * int(size)}}})"

    return re.sub(r"{(\w+)(?::(\*|\d+))?}", group, expected.replace(" ", ""))


def test_every_command_is_in_the_conversation_and_in_the_tables_of_the_docs() -> None:
    assert {hexed(request.split("{")[0])[0] for request, _ in CONVERSATION} == {*Command}
    table = re.findall(r"^ +0x(\w\w) ([A-Z_]+)", frames.__doc__ or "", re.MULTILINE)
    assert [(int(code, 16), name) for code, name in table] == [(c, c.name) for c in Command]
    page = Path("docs/reference/protocols.md").read_text()
    missing = [c.name for c in Command if c > 5 and f"0x{c:02X} {c.name}" not in page]
    assert missing == []


def test_commands_and_statuses_have_the_numbers_of_the_original() -> None:
    assert [*range(1, 6)] == [
        Command.PRODUCE,
        Command.CONSUME,
        Command.NEXT_OFFSET,
        Command.CREATE_TOPIC,
        Command.LIST_TOPICS,
    ]
    assert [status.name for status in TcpStatus] == [
        "SUCCESS", "TOPIC_NOT_FOUND", "INVALID_OFFSET", "SERIALIZATION", "PRODUCE_FAILED", "INTERNAL",
        "INVALID_REQUEST", "PAYLOAD_TOO_LARGE", "UNKNOWN_COMMAND", "UNAUTHORIZED", "FORBIDDEN",
    ]  # fmt: skip
    assert [*TcpStatus] == [*range(11)]  # the last two are ours


@settings(deadline=None)
@given(
    st.text(max_size=30), st.lists(st.binary(max_size=40), max_size=20), st.integers(0, 2**64 - 1)
)
def test_a_batch_reads_back_as_it_was_written(
    topic: str, payloads: list[bytes], sequence: int
) -> None:
    frame = b"".join(frames.produce_batch(topic, payloads, (ID, sequence)))
    command, length = frames.REQUEST.unpack_from(frame)
    request = frames.read_batch(memoryview(frame)[5:])
    assert (command, length) == (6, len(frame) - 5)
    assert (request.topic, request.producer) == (topic, (ID, sequence))
    assert request.lengths.tolist() == [len(payload) for payload in payloads]
    assert bytes(request.payloads) == b"".join(payloads)


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            NewRecord,
            st.none() | st.binary(max_size=9),
            st.none() | st.binary(max_size=9),
            st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=9))),
            st.none() | st.integers(-(2**40), 2**50),
        ),
        max_size=5,
    ),
)
def test_records_read_back_as_they_were_written(records: list[NewRecord]) -> None:
    frame = b"".join(frames.produce_records("t/1", records, (ID, 9)))
    command, length = frames.REQUEST.unpack_from(frame)
    assert (command, length) == (Command.PRODUCE_RECORDS, len(frame) - 5)
    assert frames.read_records(memoryview(frame)[5:]) == ("t/1", (ID, 9), records)
    for cut in range(5, len(frame) - 1):
        with pytest.raises(Malformed):
            frames.read_records(memoryview(frame)[5:cut])


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_no_bytes_make_the_batch_parser_fail_in_another_way_than_refusing(body: bytes) -> None:
    try:
        request = frames.read_batch(memoryview(body))
    except InvalidRequest:
        return
    assert int(request.lengths.sum()) == len(request.payloads)


def test_a_body_that_is_cut_short_anywhere_is_malformed() -> None:
    body = b"".join(frames.produce_batch("ab", [b"one", b"two"], (ID, 1)))[5:]
    for cut in range(len(body)):
        with pytest.raises(Malformed):
            frames.read_batch(memoryview(body)[:cut])


def test_bytes_behind_the_last_field_are_malformed() -> None:
    body = Body(memoryview(frames.name("a") + b"!"))
    body.name()
    with pytest.raises(Malformed):
        body.end()


def raw_log(first: int, payloads: list[bytes], step: int = 1) -> bytes:
    parts = []
    for place, payload in enumerate(payloads):
        parts.append(
            (first + place * step).to_bytes(8, "little")
            + len(payload).to_bytes(4, "little")
            + payload
        )
    return b"".join(parts)


@settings(deadline=None)
@given(
    st.integers(0, 1 << 40),
    st.lists(st.binary(max_size=50), min_size=1, max_size=40),
    st.integers(1, 3),
)
def test_a_raw_log_becomes_columns_with_the_same_records(
    first: int, payloads: list[bytes], step: int
) -> None:
    raw = raw_log(first, payloads, step)
    lengths = np.array([len(payload) for payload in payloads], ">u4")
    batch = Batch("t", first, raw, lengths)
    offsets = [first + place * step for place in range(len(payloads))]
    columns = batch.to_arrow()
    assert columns["offset"].to_pylist() == offsets
    assert columns["payload"].to_pylist() == payloads
    assert [*batch] == [*zip(offsets, payloads, strict=True)]
    assert walk(raw).tolist() == lengths.tolist()
    assert batch.next_offset == offsets[-1] + 1
    middle = offsets[len(offsets) // 2]
    assert batch.until(middle).payloads() == payloads[: len(payloads) // 2]
    assert batch.until(offsets[-1] + 1) is batch


def test_a_raw_log_that_does_not_fit_its_lengths_is_damaged() -> None:
    raw = raw_log(5, [b"one", b"two"])
    with pytest.raises(Damaged):
        Batch("t", 5, raw, np.array([3, 4], np.uint32))
    with pytest.raises(Damaged):
        Batch("t", 6, raw, np.array([3, 3], np.uint32))
    with pytest.raises(Damaged):
        walk(raw[:-1])


@pytest.mark.parametrize("lengths", [(3, 3, 3), (0, 0), (1, 300, 0, 7), (5,)])
def test_consume_answers_made_from_the_log_are_those_made_from_records(
    lengths: tuple[int, ...],
) -> None:
    payloads = [bytes([65 + i]) * length for i, length in enumerate(lengths)]
    offsets = np.arange(2**40, 2**40 + len(lengths))
    log = b"".join(
        RECORD_HEADER.pack(offset, len(payload)) + payload
        for offset, payload in zip(offsets.tolist(), payloads, strict=True)
    )
    ends = np.cumsum(np.array(lengths, np.int64) + HEADER_SIZE)
    # what lies behind the last record in the buffer does not count
    answer = frames.consumed_log(log + b"more", offsets, ends - np.array(lengths), ends)
    assert bytes(answer) == frames.consumed(offsets.tolist(), payloads)
