"""Kafka's record batch, byte by byte, and every way to build and read one."""

import gzip
from random import Random

import cramjam
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Damaged, InvalidRequest
from penstock.log.batches.decode import Decoder, decode_columns, records_of
from penstock.log.batches.encode import encode_arrays, encode_table, encode_values
from penstock.protocol import kafka_batch
from penstock.protocol.kafka_batch import (
    HEAD_SIZE,
    LOG_APPEND_TIME,
    PRODUCER_HEADER,
    BatchHead,
    KafkaRecord,
    NewRecord,
    decode_batch,
    decompress,
    encode_head,
    is_whole,
    our_producer,
    producer_header,
    split_batches,
    varint,
)
from tests.support.kafka_wire import encode_batch

NOW = 1_700_000_000_000

# As aiokafka 0.12 builds it, but for the leader epoch, which is the broker's.
GOLDEN = bytes.fromhex(
    "0000000000000007"  # base offset 7
    "0000004f"  # length
    "00000000"  # leader epoch
    "02"  # magic
    "b556e0d0"  # CRC32C from here to the end
    "0000"  # attributes: no codec, create time
    "00000001"  # last offset delta
    "0000018bcfe56800"  # base timestamp
    "0000018bcfe56805"  # max timestamp
    "ffffffffffffffff"  # no producer
    "ffff"
    "ffffffff"
    "00000002"  # records
    "26"  # 19 bytes follow
    "000000"  # attributes, timestamp delta 0, offset delta 0
    "026b"  # key "k"
    "0a68656c6c6f"  # value "hello"
    "04"  # two headers
    "02610231"  # a: 1
    "026201"  # b: null
    "12"  # 9 bytes follow
    "000a02"  # attributes, timestamp delta 5, offset delta 1
    "06746f6d"  # key "tom"
    "01"  # null: a tombstone
    "00"  # no headers
)  # fmt: skip
RECORDS = [
    NewRecord(b"hello", b"k", [("a", b"1"), ("b", None)], NOW),
    NewRecord(None, b"tom", (), NOW + 5),
]


def test_a_batch_is_these_bytes() -> None:
    assert encode_batch(RECORDS, 0, base_offset=7).hex() == GOLDEN.hex()
    assert decode_batch(GOLDEN) == [
        KafkaRecord(7, NOW, b"k", b"hello", (("a", b"1"), ("b", None))),
        KafkaRecord(8, NOW + 5, b"tom", None),
    ]
    head = BatchHead.parse(GOLDEN)
    assert (head.size, head.next_offset, head.records) == (len(GOLDEN), 9, 2)


def test_every_flipped_bit_behind_the_crc_is_seen() -> None:
    assert is_whole(GOLDEN)
    for bit in range(8 * 17, 8 * len(GOLDEN)):
        harmed = bytearray(GOLDEN)
        harmed[bit // 8] ^= 1 << bit % 8
        assert not is_whole(harmed), bit
    assert not is_whole(GOLDEN[:-1])
    assert not is_whole(bytes(200))


@given(
    st.lists(
        st.builds(
            NewRecord,
            st.none() | st.binary(max_size=300),
            st.none() | st.binary(max_size=100),
            st.lists(st.tuples(st.text(max_size=9), st.none() | st.binary(max_size=9)), max_size=3),
            st.integers(NOW - (1 << 33), NOW + (1 << 33)),
        ),
        min_size=1,
        max_size=90,
    )
)
def test_whatever_is_encoded_is_decoded(records: list[NewRecord]) -> None:
    batch = encode_batch(records, NOW, base_offset=1 << 40)
    assert is_whole(batch)
    expected = [
        KafkaRecord((1 << 40) + i, one.timestamp or 0, one.key, one.value, tuple(one.headers))
        for i, one in enumerate(records)
    ]
    assert decode_batch(batch) == expected
    columns = decode_columns(batch[HEAD_SIZE:], BatchHead.parse(batch))
    decoder = Decoder()
    decoder.add(b"..." + batch, BatchHead.parse(batch), 3)
    assert records_of(decoder.columns(), slice(None)) == expected
    assert columns.offsets.tolist() == [one.offset for one in expected]
    assert columns.times.tolist() == [one.timestamp for one in expected]
    for starts, lengths, wanted in (
        (columns.value_starts, columns.value_lengths, [one.value for one in expected]),
        (columns.key_starts, columns.key_lengths, [one.key for one in expected]),
    ):
        pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
        assert [None if n < 0 else columns.data[at : at + n] for at, n in pairs] == wanted


@pytest.mark.parametrize("count", [1, 40, 41, 63, 64, 65, 300, 8193, 20000])
def test_payloads_are_wrapped_alike_however_they_lie(count: int) -> None:
    random = Random(count)
    for sizes in ([33] * count, [random.randint(0, 300) for _ in range(count)], [0] * count):
        payloads = [random.randbytes(size) for size in sizes]
        one = bytes(encode_values(payloads))
        lengths = np.array(sizes, np.int64)
        assert bytes(encode_arrays(lengths, memoryview(b"".join(payloads)))) == one
        if set(sizes) == {33}:
            assert bytes(encode_table(np.frombuffer(b"".join(payloads), "V33"))) == one
        batch = encode_head([one], count, timestamps=(NOW, NOW)) + one
        assert batch == encode_batch([NewRecord(payload) for payload in payloads], NOW)


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_compressed_batches_are_read(codec: int) -> None:
    large = encode_batch([NewRecord(bytes(1 << 20))] * 20, NOW)[HEAD_SIZE:]
    compressors = (cramjam.gzip, cramjam.snappy, cramjam.lz4, cramjam.zstd)
    if codec != 2:
        packed = bytes(compressors[codec - 1].compress(large))
        assert decompress(codec, memoryview(packed)) == large
    plain = encode_batch(RECORDS, 0)[HEAD_SIZE:]
    forms = {
        1: [gzip.compress(plain)],
        2: [
            bytes(cramjam.snappy.compress_raw(plain)),
            b"\x82SNAPPY\x00"
            + bytes(8)
            + b"".join(
                len(part).to_bytes(4, "big") + part
                for part in (bytes(cramjam.snappy.compress_raw(p)) for p in (plain[:9], plain[9:]))
            ),
        ],
        3: [bytes(cramjam.lz4.compress(plain))],
        4: [bytes(cramjam.zstd.compress(plain))],
    }[codec]
    for packed in forms:
        head = encode_head([packed], 2, timestamps=(NOW, NOW + 5), attributes=codec, base_offset=7)
        assert decode_batch(head + packed) == decode_batch(GOLDEN)
        harmed = encode_head([packed[:5]], 2, timestamps=(NOW, NOW), attributes=codec)
        with pytest.raises(Damaged):
            decode_batch(harmed + packed[:5])


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_a_batch_that_decompresses_to_more_than_the_limit_is_refused(
    codec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, block = 10_000, bytes(6_000)
    monkeypatch.setattr(kafka_batch, "MAX_DECOMPRESSED", limit)
    snappy = bytes(cramjam.snappy.compress_raw(block))
    packed = {
        1: gzip.compress(2 * block),
        # two blocks, each of which is below the limit
        2: b"\x82SNAPPY\x00" + bytes(8) + 2 * (len(snappy).to_bytes(4, "big") + snappy),
        3: bytes(cramjam.lz4.compress(2 * block)),
        4: bytes(cramjam.zstd.compress(2 * block)),
    }[codec]
    with pytest.raises(Damaged):
        decompress(codec, memoryview(packed))


def test_our_producer_travels_in_a_header_that_our_readers_leave_out() -> None:
    header = producer_header(b"p" * 16, 7)
    batch = encode_batch([NewRecord(b"v", headers=[("mine", b"1"), header]), NewRecord(b"w")], NOW)
    assert our_producer(batch, BatchHead.parse(batch)) == (b"p" * 16, 7)
    assert [record.headers for record in decode_batch(batch)] == [(("mine", b"1"),), ()]
    assert PRODUCER_HEADER.encode() in batch
    assert our_producer(GOLDEN, BatchHead.parse(GOLDEN)) is None


def test_log_append_time_is_that_of_every_record() -> None:
    records = encode_batch(RECORDS, 0)[HEAD_SIZE:]
    head = encode_head([records], 2, timestamps=(NOW, NOW + 99), attributes=LOG_APPEND_TIME)
    assert [one.timestamp for one in decode_batch(head + records)] == [NOW + 99] * 2


def test_what_a_producer_sends_is_split_and_checked() -> None:
    two = GOLDEN + encode_batch([NewRecord(b"x")], NOW)
    assert [head.records for head, _ in split_batches(two)] == [2, 1]
    with pytest.raises(Damaged):
        split_batches(two[:-1])
    wrong = encode_head([b""], 2, timestamps=(0, 0), last_offset_delta=5)
    with pytest.raises(InvalidRequest):
        split_batches(wrong)


@given(st.binary(max_size=200), st.integers(0, 50))
def test_garbage_is_damaged_and_nothing_else(records: bytes, count: int) -> None:
    batch = encode_head([records], count, timestamps=(0, 0)) + records
    for decode in (decode_batch, lambda data: decode_columns(records, BatchHead.parse(data))):
        try:
            decode(batch)
        except Damaged:
            pass


def test_varints_are_those_of_protocol_buffers() -> None:
    assert [varint(n) for n in (0, -1, 1, 63, 64, -65, 1 << 40)] == [
        b"\0", b"\1", b"\2", b"\x7e", b"\x80\x01", b"\x81\x01", b"\x80\x80\x80\x80\x80\x40",
    ]  # fmt: skip
