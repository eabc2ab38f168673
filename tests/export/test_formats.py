"""What lies on disk, byte for byte, and that it reads back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import Damaged
from penstock.export.deadletters import DeadRecord, parse_line
from penstock.export.payload import FRAMES, JSON, NDJSON, RAW, compress, decompress, join, split
from penstock.export.sendqueue.blocks import (
    HEADER_SIZE,
    Block,
    decode_block,
    encode_header,
    pass_blocks,
)
from penstock.export.sendqueue.journal import BlockEntry, Completed, EntryKind, decode
from tests.support.topics import castagnoli


def test_golden_block():
    block = Block(
        b"hello",
        2,
        NDJSON,
        1,
        9,
        77,
        sequence=3,
        enqueued=1_700_000_000_000_000,
        before=40,
        attempts=1,
    )
    block.offset = (7 << 32) + 5
    header = encode_header(block)
    assert header[:12].hex() == "3d0000000000008050534231"
    assert header[16:].hex() == (
        "01010000"
        "0300000000000000"
        + (1_700_000_000_000_000).to_bytes(8, "little").hex()
        + "2800000000000000"
        + "4d00000000000000"
        + "02000000"
        + "01000000"
        + "09000000"
    )
    assert int.from_bytes(header[12:16], "little") == castagnoli(header[16:] + b"hello", 5)
    assert len(header) == HEADER_SIZE == 64


@settings(deadline=None)
@given(
    st.binary(max_size=300),
    st.integers(0, 3),
    st.integers(0, (1 << 64) - 2),
    st.integers(0, 1 << 31),
    st.data(),
)
def test_a_block_reads_back_and_any_flipped_bit_is_noticed(
    body: bytes, encoding: int, position: int, records: int, data
):
    block = Block(
        body,
        records,
        encoding,
        0,
        len(body),
        position,
        sequence=5,
        enqueued=6,
        before=7,
        attempts=8,
    )
    block.offset = 99
    stored = encode_header(block) + body
    assert decode_block(b"junk" + stored + b"junk", 4, 99) == block
    assert pass_blocks(stored + b"junk", 99) == (len(stored), 5, 0)
    for wrong in (0, 98, 100):
        with pytest.raises(Damaged):
            decode_block(stored, 0, wrong)
        assert pass_blocks(stored, wrong) == (0, -1, -1)
    bit = data.draw(st.integers(0, len(stored) * 8 - 1))
    broken = bytearray(stored)
    broken[bit // 8] ^= 1 << bit % 8
    if bit in (62, 63):  # the two flag bits of the seed's head carry no data of ours
        return
    with pytest.raises(Damaged):
        decode_block(bytes(broken), 0, 99)
    assert pass_blocks(bytes(broken), 99) == (0, -1, -1)


def test_golden_journal_entry():
    data = BlockEntry(EntryKind.DELIVERED, 0, 7, 1000, 9, 1).encode()
    assert (
        data[4:].hex()
        == "01000000" + "0700000000000000" + "e803000000000000" + "09000000" + "01000000"
    )
    assert int.from_bytes(data[:4], "little") == castagnoli(data[4:])
    assert list(decode(data + data[:5])) == [BlockEntry(EntryKind.DELIVERED, 0, 7, 1000, 9, 1)]
    assert list(decode(data[:10] + b"\xff" + data[11:])) == [None]


def test_golden_dead_letter():
    letter = DeadRecord(3, 1, "refused", "answered 400", 2, 1.5, 2.5, b'{"a":1}')
    line = letter.line()
    text = (
        b'{"sequence": 3, "index": 1, "reason": "refused", "detail": "answered 400", '
        b'"attempts": 2, "enqueued": 1.5, '
        b'"died": 2.5, "record": "{\\"a\\":1}", "encoding": "utf-8"}'
    )
    assert line == b"%08x " % castagnoli(text) + text + b"\n"
    assert parse_line(line) == letter
    assert parse_line(line.replace(b"400", b"401")) is None
    binary = DeadRecord(3, 1, "refused", "", 2, 1.5, 2.5, b"\xff\x00")
    assert parse_line(binary.line()) == binary


records = st.lists(st.binary(max_size=30), min_size=1, max_size=20)


@settings(deadline=None)
@given(records)
def test_frames_hold_any_bytes(given_records: list[bytes]):
    assert split(join(given_records, FRAMES), FRAMES) == given_records


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=20),
            st.sampled_from([b"1,2", b"[3", b"4]", b'{"a": 1}', b'{"a":\n1}', b'"x', b'"\xff"']),
        ),
        min_size=1,
    )
)
def test_whatever_the_records_are_a_json_body_is_valid_and_has_as_many(given_records: list[bytes]):
    import msgspec

    array = join(given_records, JSON)
    assert len(msgspec.json.decode(array)) == len(given_records)
    lines = join(given_records, NDJSON)
    assert len(split(lines, NDJSON)) == len(given_records) == lines.count(b"\n")
    for line in split(lines, NDJSON):
        msgspec.json.decode(line)
    array.decode()
    lines.decode()


def test_raw_is_one_record():
    assert split(join([b"\x00\n"], RAW), RAW) == [b"\x00\n"]
    with pytest.raises(ValueError):
        join([b"a", b"b"], RAW)


@settings(deadline=None)
@given(st.binary(max_size=2000), st.integers(0, 3))
def test_compression_reads_back(data: bytes, compression: int):
    assert decompress(compress(data, compression), compression) == data


@settings(max_examples=100, deadline=None)
@given(st.permutations(list(range(1, 25))))
def test_completed_ranges_merge_in_any_order(order: list[int]):
    completed, model = Completed(), set()
    for sequence in order:
        assert completed.add(sequence, sequence + 1, sequence * 10, sequence * 10 + 10)
        assert not completed.add(sequence, sequence + 1, sequence * 10, sequence * 10 + 10)
        model.add(sequence)
        assert [each in completed for each in range(26)] == [each in model for each in range(26)]
        gaps = [each for start, stop in completed.gaps(1, 25) for each in range(start, stop)]
        assert gaps == sorted(set(range(1, 25)) - model)
        for start, end, before, through in completed.spans:
            assert (before, through) == (start * 10, end * 10)
    assert len(completed.spans) == 1
    assert completed.covers(1, 25)
