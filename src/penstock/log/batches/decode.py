"""The records of a Kafka batch as numpy columns: only their lengths are walked one by one."""

from typing import NamedTuple

import numpy as np

from penstock.errors import Damaged
from penstock.protocol.kafka_batch import (
    LOG_APPEND_TIME,
    BatchHead,
    Bytes,
    find_records,
    records_bytes,
)

_PADDING = bytes(10)  # so that a varint may be read at any position


class Columns(NamedTuple):
    """The parts of a batch's records: where they lie in `data`, which is not compressed. A length
    of -1: null.
    """

    data: bytes
    offsets: np.ndarray
    times: np.ndarray  # milliseconds since 1970
    key_starts: np.ndarray
    key_lengths: np.ndarray
    value_starts: np.ndarray
    value_lengths: np.ndarray
    header_starts: np.ndarray  # of the number of headers


def decode_columns(batch: Bytes, head: BatchHead, at: int = 0) -> Columns:
    """The records of the batch at this position of `batch`."""
    data = bytes(records_bytes(batch, head, at))
    bounds = np.array(find_records(data, head.records), np.int64)
    starts = bounds[:-1]
    padded = np.frombuffer(data + _PADDING, np.uint8)
    timestamp_deltas, places = _varints(padded, starts + 1)
    offset_deltas, places = _varints(padded, places)
    key_lengths, key_starts = _varints(padded, places)
    value_lengths, value_starts = _varints(padded, key_starts + np.maximum(key_lengths, 0))
    header_starts = value_starts + np.maximum(value_lengths, 0)
    ends = np.append(bounds[1:-1] - 1, bounds[-1])  # at least: the next length has a byte or more
    if len(starts) and (
        bool((header_starts >= ends).any())
        or int(key_lengths.min()) < -1
        or int(value_lengths.min()) < -1
    ):
        raise Damaged("the records of a batch do not fit their lengths")
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
    """The zigzag varints at these positions, and where each ends."""
    at = np.minimum(at, len(data) - len(_PADDING))
    first = data[at].astype(np.int64)
    values, ends = first & 0x7F, at + 1
    longer = np.flatnonzero(first & 0x80)
    shift = 7
    while len(longer) and shift < 64:
        byte = data[at[longer] + shift // 7].astype(np.int64)
        values[longer] |= (byte & 0x7F) << shift
        ends[longer] += 1
        longer, shift = longer[(byte & 0x80) != 0], shift + 7
    return (values >> 1) ^ -(values & 1), ends
