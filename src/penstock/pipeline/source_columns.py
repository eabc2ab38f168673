"""Define the columns of sources and sinks, and convert raw log bytes to them with Arrow and numpy,
without a loop over records (see `penstock.protocol.record_batch`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.errors import InvalidRequest
from penstock.log.topic_files import Slice
from penstock.protocol.kafka_batch import Headers
from penstock.protocol.names import split_label
from penstock.protocol.record_batch import payload_array

TIMESTAMP = pa.timestamp("us", tz="UTC")
HEADERS = pa.map_(pa.string(), pa.string())
RECORD_HEADERS = pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))
KINDS = {
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    TIMESTAMP: "TIMESTAMP",
    HEADERS: "MAP<STRING, STRING>",
    RECORD_HEADERS: "ARRAY<STRUCT<key: STRING, value: BINARY>>",
    pa.list_(pa.int16()): "ARRAY<SMALLINT>",
    pa.list_(pa.int64()): "ARRAY<BIGINT>",
}


def ddl(schema: pa.Schema) -> str:
    """Return the schema as Spark reads it."""
    return ", ".join(f"{field.name} {KINDS[field.type]}" for field in schema)


TOPIC_COLUMNS = pa.schema(
    {"topic": pa.string(), "offset": pa.int64(), "timestamp": TIMESTAMP, "payload": pa.binary()}
)
# A read gets these too if its schema names them; they are null in aiq's layout.
KEYED_COLUMNS = pa.schema({"key": pa.binary(), "headers": RECORD_HEADERS})
ALL_TOPIC_COLUMNS = pa.schema([*TOPIC_COLUMNS, pa.field("partition", pa.int32()), *KEYED_COLUMNS])
QUEUE_COLUMNS = pa.schema(
    {
        "queue": pa.string(),
        "partition": pa.string(),
        "seq": pa.int64(),
        **dict.fromkeys(("id", "transactionId", "traceId", "payload"), pa.string()),
        "createdAt": TIMESTAMP,
        "headers": HEADERS,
    }
)
TOPIC_DDL, QUEUE_DDL = ddl(TOPIC_COLUMNS), ddl(QUEUE_COLUMNS)
CORRUPT = "_corrupt"  # columns of a JSON source in addition to its schema
REASON = "_reason"
# which of its columns a JSON source keeps, with an underscore before their names
META = {
    "topic": ("topic", "offset", "timestamp"),
    "queue": ("queue", "partition", "seq", "id", "transactionId", "createdAt"),
}


def joined_values(column: pa.Array) -> pa.Buffer:
    """Return the bytes of all values of a column of texts or bytes, one after another."""
    if column.null_count:  # the bytes under a null are undefined
        column = column.drop_null()
    _, ends, data = column.buffers()
    if not len(column) or data is None:
        return pa.py_buffer(b"")
    bounds = np.frombuffer(ends, np.int32)[column.offset :]
    return data.slice(int(bounds[0]), int(bounds[len(column)] - bounds[0]))


def checked_columns(source: str, schema: pa.Schema, names: Sequence[str]) -> list[str]:
    """Return the columns that a read asks for. Raise InvalidRequest for unknown ones."""
    unknown = [name for name in names if name not in schema.names]
    if unknown:
        raise InvalidRequest(
            f"a {source} has the columns {', '.join(schema.names)}; it has no {unknown[0]!r}"
        )
    return list(names)


@dataclass(frozen=True)
class ArchivedRecords:
    """A few records of an archive's table: what `Slice` is for those of the log."""

    offsets: np.ndarray
    times: np.ndarray  # microseconds since 1970
    payloads: pa.Array


def topic_batch(label: str, records: Slice | ArchivedRecords, names: list[str]) -> pa.RecordBatch:
    """Return the records of a partition as a batch with the named columns of ALL_TOPIC_COLUMNS."""
    count = len(records.offsets)
    topic, partition = split_label(label)
    keyed = records.records if isinstance(records, Slice) else None
    make: dict[str, Callable[[], pa.Array]] = {
        "topic": lambda: pa.repeat(pa.scalar(topic), count),
        "offset": lambda: pa.array(records.offsets),
        "timestamp": lambda: pa.array(records.times).cast(TIMESTAMP),
        "payload": lambda: (
            payload_array(records.raw, records.starts)
            if isinstance(records, Slice)
            else records.payloads
        ),
        "partition": lambda: pa.repeat(pa.scalar(partition, pa.int32()), count),
        "key": lambda: pa.array(
            [None] * count if keyed is None else [one.key for one in keyed], pa.binary()
        ),
        "headers": lambda: pa.array(
            [None] * count if keyed is None else [_header_rows(one.headers) for one in keyed],
            RECORD_HEADERS,
        ),
    }
    schema = pa.schema([ALL_TOPIC_COLUMNS.field(name) for name in names])
    return pa.RecordBatch.from_arrays([make[name]() for name in names], schema=schema)


def _header_rows(headers: Headers) -> list[dict[str, str | bytes | None]]:
    return [{"key": name, "value": value} for name, value in headers]


def origin_columns(kind: str, fields: list[str]) -> list[str]:
    """Return the origin columns of a source whose names a JSON schema does not use: a field of the
    record takes precedence.
    """
    taken = {name.lower() for name in fields}
    for name in (CORRUPT, REASON):
        if name in taken:
            raise InvalidRequest(
                f"the schema has a field {name}, which says what is wrong with a record: read such "
                "records with from_json on a raw source"
            )
    return [name for name in META[kind] if f"_{name}".lower() not in taken]
