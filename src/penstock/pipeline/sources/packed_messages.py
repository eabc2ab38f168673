"""Read messages of a range of the table's blocks, packed by PostgreSQL: each row of the answer has
columns of many messages.

The client pays most for rows: libpq copies each, and ADBC takes their fields one by one. So
PostgreSQL concatenates the messages of some blocks with `string_agg`: numbers in binary form,
texts, payloads and their lengths. The result is Arrow's buffers, except for the byte order. For a
million messages, this costs PostgreSQL 0.25 s of CPU more and the client 0.65 s less.

| column     | bytes                                                                               |
|------------|-------------------------------------------------------------------------------------|
| `n`        | how many messages                                                                   |
| `p` `s`    | partition_id, seq: i64 each, big-endian                                             |
| `a`        | created_at: i64 each, big-endian, microseconds since 2000                           |
| `t` `d`    | transaction_id, payload: one after the other                                        |
| `tl` `dl`  | their lengths: i32 each, big-endian; -1 for a payload that Spark must not read      |
| `h`        | headers, JSON text: one after the other                                             |
| `hl`       | their lengths: i32 each, big-endian; -1 for none, 0 for encrypted ones              |
| `c`        | trace_id: 16 bytes for each message that has one                                    |
| `cl`       | whether it has one: a byte, 0 or 1, each                                            |

A packed row must stay far below PostgreSQL's limit of 1 GB, whatever the payloads are. BLOCKS
blocks have at most 32 * 8 KB, and at most 255 times that after decompression. Of payloads stored
out of line (TOAST), only those of up to SMALL bytes are packed; `rest` selects the others, which
are read as rows.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.pipeline.source_columns import TIMESTAMP, joined_values

BLOCKS = 32
SMALL = 8192
_YEAR_2000 = 946_684_800_000_000  # microseconds since 1970
_CLEAR = "CASE WHEN m.key_id IS NULL THEN %s END"
# empty: there are some, which Spark must not read
HEADERS = "CASE WHEN m.key_id IS NULL OR m.headers IS NULL THEN m.headers ELSE ''::bytea END"
_PACK = {
    "p": {"p": "int8send(m.partition_id)"},
    "s": {"s": "int8send(m.seq)"},
    "a": {"a": "timestamptz_send(m.created_at)"},
    "t": {"t": "m.transaction_id", "tl": "int4send(octet_length(m.transaction_id))"},
    "c": {"c": "uuid_send(m.trace_id)", "cl": "boolsend(m.trace_id IS NOT NULL)"},
    "d": {
        "d": _CLEAR % "m.payload",
        "dl": "int4send(CASE WHEN m.key_id IS NULL THEN octet_length(m.payload) ELSE -1 END)",
    },
    "h": {"h": HEADERS, "hl": f"int4send(coalesce(octet_length({HEADERS}), -1))"},
}


def query(
    needed: list[str], conditions: list[str], first: int, end: int | None, *, toasted: bool
) -> str:
    """Return the query of the messages in blocks `first` up to `end` (None: end of the table)."""
    columns = "".join(
        f", string_agg({value}, '')" + f" AS {name}"
        for need in needed
        for name, value in _PACK[need].items()
    )
    last = (
        "pg_relation_size('messages') / current_setting('block_size')::int"
        if end is None
        else str(end)
    )
    # nothing volatile: it bounds the scan
    until = f"b + {BLOCKS}" if end is None else f"least(b + {BLOCKS}, {end})"
    within = [*conditions, f"octet_length(m.payload) <= {SMALL}"] if toasted else conditions
    # OFFSET 0 keeps the conditions out of the choice of the scan: an index that serves them would
    # be read again for every row of the answer.
    return f"""
        SELECT packed.* FROM generate_series({first}::bigint, {last} - 1, {BLOCKS}) b
         CROSS JOIN LATERAL (
            SELECT count(*) AS n{columns}
              FROM (SELECT * FROM messages WHERE ctid >= format('(%s,0)', b)::tid
                       AND ctid < format('(%s,0)', {until})::tid OFFSET 0) m
             WHERE {" AND ".join(within)}
        ) packed WHERE n > 0"""


def rest() -> str:
    """Return the condition of the messages that `query` leaves out of a table with TOAST."""
    return f"octet_length(m.payload) > {SMALL}"


def unpack(packed: pa.RecordBatch) -> pa.RecordBatch:
    """Return the messages as rows again, with the columns named by their letters."""
    count = int(packed["n"].to_numpy().sum())
    names = packed.schema.names
    made: dict[str, pa.Array] = {}
    for name in ("p", "s"):
        if name in names:
            made[name] = pa.array(_numbers(packed[name], ">i8"))
    if "a" in names:
        made["a"] = pa.array(_numbers(packed["a"], ">i8") + _YEAR_2000).cast(TIMESTAMP)
    for name, kind in (("t", pa.string()), ("d", pa.binary()), ("h", pa.binary())):
        if name in names:
            made[name] = _slices(kind, _numbers(packed[f"{name}l"], ">i4"), packed[name])
    if "c" in names:
        there = _numbers(packed["cl"], "i1")
        made["c"] = _slices(pa.binary(), np.where(there, 16, -1), packed["c"])
    assert all(len(column) == count for column in made.values())
    return pa.RecordBatch.from_pydict(made)


def _numbers(column: pa.Array, kind: str) -> npt.NDArray[np.int64]:
    return np.frombuffer(joined_values(column), kind).astype(np.int64)


def _slices(kind: pa.DataType, lengths: npt.NDArray[np.int64], column: pa.Array) -> pa.Array:
    """Split the column's bytes into values of these lengths; -1 is a null."""
    ends = np.zeros(len(lengths) + 1, np.int32)
    there = lengths >= 0
    np.cumsum(np.where(there, lengths, 0), out=ends[1:])
    validity = None if there.all() else pa.array(there).buffers()[1]
    return pa.Array.from_buffers(
        kind, len(lengths), [validity, pa.py_buffer(ends), joined_values(column)]
    )
