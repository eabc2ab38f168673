"""The line format: golden bytes, raw payloads, one line per event whatever the client sent."""

import json
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.buffer.events import encode, item_of
from penstock.errors import InvalidRequest
from penstock.protocol import buffer_lines
from penstock.queues.types import Item

TRACE = "0198c5a0-0000-7000-8000-000000000001"
HEAD = b'{"queue":"q","partition":"p","payload":%b,"transaction_id":"t","trace_id":"","namespace":"","task":"",'
LINES = {
    "the seed's fields and a checksum": (
        Item("orders", b'{"id":1}', "customer-123", "tx-1", TRACE),
        (
            b'{"queue":"orders","partition":"customer-123","payload":{"id":1},"transaction_id":"tx-1",'
            b'"trace_id":"0198c5a0-0000-7000-8000-000000000001","namespace":"","task":"","crc32c":"4062ca32"}'
        ),
    ),
    "an authenticated producer": (
        Item("q", b"1", "p", "t", None, "alice"),
        HEAD % b"1" + b'"producer":"alice","crc32c":"598b9291"}',
    ),
    "a sealed payload, in base64 beside the id of its key": (
        Item("q", b"\x00\x01\xff", "p", "t", key_id="k1"),
        HEAD % b'"AAH/"' + b'"sealed":"k1","crc32c":"e1d89a2c"}',
    ),
    "headers": (
        Item("q", b"1", "p", "t", headers=b'{"tenant":"a"}'),
        HEAD % b"1" + b'"headers":{"tenant":"a"},"crc32c":"d27f9c15"}',
    ),
    "a message for later": (
        Item("q", b"1", "p", "t", due=datetime(2026, 1, 31, 12, 0, 0, 250000, UTC)),
        HEAD % b"1" + b'"deliver_at":"2026-01-31T12:00:00.250000Z","crc32c":"43cc17e4"}',
    ),
    "no order": (
        Item("q", b"1", "Default", "t", ordering="none"),
        HEAD.replace(b'"p"', b'"Default"') % b"1" + b'"unordered":true,"crc32c":"7d8ebb0f"}',
    ),
}


def decode(line: bytes) -> Item:
    return item_of(buffer_lines.decode(line, ""))


@pytest.mark.parametrize(("item", "line"), LINES.values(), ids=LINES)
def test_an_event_is_a_line_byte_for_byte(item: Item, line: bytes):
    assert encode([item]) == [line + b"\n"]
    assert decode(line + b"\n") == item


def test_sealed_headers_are_read_back():
    sealed = Item("q", b"\x00\x01\xff", "p", "t", key_id="k1", headers=b"\xff\x00")
    assert decode(encode([sealed])[0]) == sealed


def test_the_seeds_own_lines_are_read():
    line = (
        b'{"queue":"orders","partition":"customer-123","payload":{"id":1},"transaction_id":"tx-1","trace_id":"trace-1",'
        b'"namespace":"sales","task":"process"}'
    )
    # a trace id is a UUID; one that is not must not keep the message from its queue
    assert decode(line) == Item("orders", b'{"id":1}', "customer-123", "tx-1", None)


def test_a_line_with_any_bit_flipped_is_no_event_or_the_same_event():
    item = Item("q", b'{"amount":100}', "p", "t", None, "alice")
    [line] = encode([item])
    for place in range(len(line) - 1):
        for bit in range(8):
            flipped = line[:place] + bytes([line[place] ^ 1 << bit]) + line[place + 1 :]
            try:
                assert decode(flipped) == item, (place, bit)  # the checksum's own name was hit
            except (msgspec.DecodeError, UnicodeDecodeError):
                pass


@pytest.mark.parametrize(
    "payload",
    [b'{"a": 1.10,  "a":1e400}', b"12345678901234567890123.0", b'"\xc3\xa9\\u00e9"', b"null"],
)
def test_payload_bytes_are_not_touched(payload):
    [line] = encode([Item("q", payload, "p", "t")])
    assert decode(line).payload == payload


def test_newlines_between_tokens_are_taken_out_and_nothing_else():
    [line] = encode(
        [Item("q", b'{\n  "a": 1.10,\n  "a": "x\\ny",\r\n "b": [1,\n 2e5]\n}', "p", "t")]
    )
    assert line.count(b"\n") == 1
    assert decode(line).payload == b'{"a":1.10,"a":"x\\ny","b":[1,2e5]}'


def test_a_raw_newline_inside_a_string_is_refused():
    with pytest.raises(InvalidRequest):
        encode([Item("q", b'"a\nb"', "p", "t")])


@pytest.mark.parametrize(
    "payload",
    [b"", b"first", b'{"a":1', b"1}", b'1,"queue":"other"}{', b"\xff", b'"\xff"', b'1,"x":2'],
)
def test_what_could_not_be_read_back_is_refused_or_harmless(payload):
    item = Item("q", payload, "p", "t")
    try:
        [line] = encode([item])
    except InvalidRequest:
        return
    assert (decode(line).queue, decode(line).transaction_id) == ("q", "t")


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
)


# making the input is most of the work, and a busy machine takes its time over it
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(texts, texts, texts.filter(bool), values, st.sampled_from([None, 1])), max_size=5
    )
)
def test_what_is_written_is_read_back(rows):
    given_items = [
        Item(queue, json.dumps(value, indent=indent).encode(), partition, transaction)
        for queue, partition, transaction, value, indent in rows
    ]
    data = b"".join(encode(given_items))
    assert data.count(b"\n") == len(rows)
    for item, back in zip(given_items, map(item_of, buffer_lines.decode_all(data)), strict=True):
        assert (back.queue, back.partition, back.transaction_id) == (
            item.queue,
            item.partition,
            item.transaction_id,
        )
        assert msgspec.json.decode(back.payload) == msgspec.json.decode(item.payload)


def test_headers_that_are_no_map_of_strings_make_a_line_no_event():
    line = b'{"queue":"q","transaction_id":"t","payload":1,"headers":{"a":1}}'
    with pytest.raises(msgspec.DecodeError):
        decode(line)
