"""The columns of sources and sinks, and how raw log bytes become them: Arrow and numpy do it, no
loop over records (see `penstock.protocol.record_batch`).
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import pyarrow as pa

from penstock.log.topic_files import Slice
from penstock.protocol.record_batch import payload_array

TIMESTAMP = pa.timestamp("us", tz="UTC")
HEADERS = pa.map_(pa.string(), pa.string())
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
    "payload STRING, createdAt TIMESTAMP, headers MAP<STRING, STRING>"
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
        ("headers", HEADERS),
    ]
)


class Archived(Protocol):
    """Records that were columns already."""

    @property
    def offsets(self) -> np.ndarray: ...

    @property
    def times(self) -> np.ndarray: ...

    @property
    def payloads(self) -> pa.Array: ...


def topic_batch(topic: str, records: Slice | Archived, names: list[str]) -> pa.RecordBatch:
    """The records as a batch with the named columns of TOPIC_COLUMNS."""
    count = len(records.offsets)
    make: dict[str, Callable[[], pa.Array]] = {
        "topic": lambda: pa.repeat(pa.scalar(topic), count),
        "offset": lambda: pa.array(records.offsets),
        "timestamp": lambda: pa.array(records.times).cast(TIMESTAMP),
        "payload": lambda: (
            payload_array(records.raw, records.starts)
            if isinstance(records, Slice)
            else records.payloads
        ),
    }
    schema = pa.schema([TOPIC_COLUMNS.field(name) for name in names])
    return pa.RecordBatch.from_arrays([make[name]() for name in names], schema=schema)
