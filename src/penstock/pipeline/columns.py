"""The columns of sources and sinks, and how raw log bytes become them: Arrow and numpy do it, no
loop over records.

A raw log is `[offset u64][length u32][payload]` repeated. Given where each record begins (from the
index, or from the lengths a FETCH answer carries), those positions are the offsets buffer of an
Arrow binary array over the very bytes that were read; `binary_slice` then drops the 12 header bytes
of every record in C++.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.log.shared_reader import HEADER, Slice

TIMESTAMP = pa.timestamp("us", tz="UTC")
TOPIC_DDL = "topic STRING, offset BIGINT, timestamp TIMESTAMP, payload BINARY"
TOPIC_COLUMNS = pa.schema(
    [
        ("topic", pa.string()),
        ("offset", pa.int64()),
        ("timestamp", TIMESTAMP),
        ("payload", pa.binary()),
    ]
)
QUEUE_DDL = (
    "queue STRING, partition STRING, seq BIGINT, id STRING, transactionId STRING, traceId STRING, "
    "payload STRING, createdAt TIMESTAMP"
)
QUEUE_COLUMNS = pa.schema(
    [
        ("queue", pa.string()),
        ("partition", pa.string()),
        ("seq", pa.int64()),
        ("id", pa.string()),
        ("transactionId", pa.string()),
        ("traceId", pa.string()),
        ("payload", pa.string()),
        ("createdAt", TIMESTAMP),
    ]
)
_NO_END = (1 << 31) - 1  # binary_slice without an explicit stop overflows for some row counts


def payloads(raw: memoryview, starts: npt.NDArray[np.int64]) -> pa.Array:
    """The payloads of the records that begin at `starts` (which ends with where the last record
    ends).
    """
    offsets = pa.py_buffer(starts.astype(np.int32))
    whole = pa.Array.from_buffers(pa.binary(), len(starts) - 1, [None, offsets, pa.py_buffer(raw)])
    return pc.binary_slice(whole, HEADER, _NO_END)


def topic_batch(topic: str, found: Slice, names: list[str]) -> pa.RecordBatch:
    """The records as a batch with the named columns of TOPIC_COLUMNS."""
    count = len(found.offsets)
    make: dict[str, Callable[[], pa.Array]] = {
        "topic": lambda: pa.repeat(pa.scalar(topic), count),
        "offset": lambda: pa.array(found.offsets),
        "timestamp": lambda: pa.array(found.times).cast(TIMESTAMP),
        "payload": lambda: payloads(found.raw, found.starts),
    }
    schema = pa.schema([TOPIC_COLUMNS.field(name) for name in names])
    return pa.RecordBatch.from_arrays([make[name]() for name in names], schema=schema)
