"""Decode the records of Kafka batches to numpy columns. Only the lengths of records are read one by
one.
"""

from typing import NamedTuple

import numpy as np

from penstock.errors import Damaged
from penstock.protocol.kafka_batch import (
    LOG_APPEND_TIME,
    MAX_VARINT_BITS,
    BatchHead,
    Bytes,
    KafkaRecord,
    batches_in,
    find_fields,
    find_records,
    read_headers,
    records_bytes,
    undecodable,
    without_ours,
)

MAX_WALKED_RECORDS = 48

_PADDING = bytes(10)  # appended, so that a varint can be read at any position


class Columns(NamedTuple):
    """The positions of the parts of records within `data`, which is not compressed. A length of -1
    is null.
    """

    data: bytes
    offsets: np.ndarray
    times: np.ndarray  # milliseconds since 1970
    key_starts: np.ndarray
    key_lengths: np.ndarray
    value_starts: np.ndarray
    value_lengths: np.ndarray
    header_starts: np.ndarray  # of the number of headers


class Decoder:
    """Decode several batches to common columns. A batch of few records is decoded in Python, since
    numpy's fixed costs would exceed the work.
    """

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self.size = 0  # bytes of the records, decompressed
        self._done: list[list[np.ndarray]] = []  # columns of batches, in order
        self._few: list[list[int]] = [[] for _ in Columns._fields[1:]]  # columns of later records

    def add(self, batch: Bytes, head: BatchHead, at: int = 0) -> None:
        """Add the batch at this position of `batch`. Raises Damaged if its records cannot be
        decoded.
        """
        try:
            data = bytes(records_bytes(batch, head, at))
            if head.records > MAX_WALKED_RECORDS:
                columns = decode_columns(data, head)
                self._flush()
                moved = [
                    column if i in (0, 1, 3, 5) else column + self.size
                    for i, column in enumerate(columns[1:])
                ]
                self._done.append(moved)
            else:
                self._walk(data, head)
        except Damaged as error:
            raise undecodable(head, error) from None
        self._data.append(data)
        self.size += len(data)

    def _walk(self, data: bytes, head: BatchHead) -> None:
        fields = find_fields(data, head.records, head.last_offset_delta)
        by = self.size
        offsets, times, key_starts, key_lengths, value_starts, value_lengths, headers = self._few
        base, appended = head.base_offset, head.attributes & LOG_APPEND_TIME
        offsets += [base + delta for delta in fields.offset_deltas]
        times += (
            [head.max_timestamp] * head.records
            if appended
            else [head.base_timestamp + delta for delta in fields.timestamp_deltas]
        )
        key_starts += [at + by for at in fields.key_starts]
        key_lengths += fields.key_lengths
        value_starts += [at + by for at in fields.value_starts]
        value_lengths += fields.value_lengths
        headers += [at + by for at in fields.header_starts]

    def _flush(self) -> None:
        if self._few[0]:
            self._done.append([np.array(column, np.int64) for column in self._few])
            self._few = [[] for _ in self._few]

    def columns(self) -> Columns:
        self._flush()
        if not self._done:
            return Columns(b"", *(np.empty(0, np.int64) for _ in self._few))
        data = self._data[0] if len(self._data) == 1 else b"".join(self._data)
        if len(self._done) == 1:
            return Columns(data, *self._done[0])
        return Columns(data, *(np.concatenate(parts) for parts in zip(*self._done, strict=True)))


def decode_batches(data: bytes, start: int, end: int = 1 << 62) -> Columns:
    """Return the records of the batches that have offsets in [start, end). Raises Damaged if one
    cannot be decoded, with the offset after it if it is the first one.
    """
    decoder = Decoder()
    for at, head in batches_in(data):
        if head.next_offset > start and head.base_offset < end:
            try:
                decoder.add(data, head, at)
            except Damaged as error:
                if decoder.size:
                    error.resume = None
                raise
    return decoder.columns()


def records_of(columns: Columns, part: slice, *, whole: bool = False) -> list[KafkaRecord]:
    """Return a part of the records. Our own header is left out, unless `whole`."""
    data = columns.data
    return [
        KafkaRecord(
            offset,
            time,
            data[key : key + key_length] if key_length >= 0 else None,
            data[value : value + value_length] if value_length >= 0 else None,
            _headers(data, headers, whole) if data[headers] else (),
        )
        for offset, time, key, key_length, value, value_length, headers in zip(
            *(column[part].tolist() for column in columns[1:]), strict=True
        )
    ]


def _headers(data: bytes, at: int, whole: bool) -> tuple[tuple[str, bytes | None], ...]:
    headers = read_headers(data, at)
    return headers if whole else without_ours(headers)


def decode_columns(data: bytes, head: BatchHead) -> Columns:
    """Return the records of a batch, which must be decompressed (`records_bytes`)."""
    bounds = np.array(find_records(data, head.records), np.int64)
    starts = bounds[:-1]
    padded = np.frombuffer(data + _PADDING, np.uint8)
    timestamp_deltas, places = _varints(padded, starts + 1)
    offset_deltas, places = _varints(padded, places)
    key_lengths, key_starts = _varints(padded, places)
    value_lengths, value_starts = _varints(padded, key_starts + np.maximum(key_lengths, 0))
    header_starts = value_starts + np.maximum(value_lengths, 0)
    ends = np.append(bounds[1:-1] - 1, bounds[-1])  # upper bounds: each length has a byte or more
    if len(starts) and (
        bool((header_starts >= ends).any())
        or int(key_lengths.min()) < -1
        or int(value_lengths.min()) < -1
    ):
        raise Damaged("the records of a batch do not fit their lengths")
    if (
        not len(starts)
        or offset_deltas[0] < 0
        or offset_deltas[-1] > head.last_offset_delta
        or not (offset_deltas[1:] > offset_deltas[:-1]).all()
    ):
        raise Damaged("the offsets of a batch are not in order")
    times = (
        np.full(len(starts), head.max_timestamp)
        if head.attributes & LOG_APPEND_TIME
        else head.base_timestamp + timestamp_deltas
    )
    return Columns(
        data,
        head.base_offset + offset_deltas,
        times,
        key_starts,
        key_lengths,
        value_starts,
        value_lengths,
        header_starts,
    )


def _varints(data: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the zigzag varints at these positions, and where each ends."""
    at = np.minimum(at, len(data) - len(_PADDING))
    first = data[at].astype(np.int64)
    values, ends = first & 0x7F, at + 1
    longer = np.flatnonzero(first & 0x80)
    shift = 7
    while len(longer) and shift < MAX_VARINT_BITS:
        byte = data[at[longer] + shift // 7].astype(np.int64)
        values[longer] |= (byte & 0x7F) << shift
        ends[longer] += 1
        longer, shift = longer[(byte & 0x80) != 0], shift + 7
    if len(longer):
        raise Damaged("a number in a record has more than nine bytes")
    return (values >> 1) ^ -(values & 1), ends
