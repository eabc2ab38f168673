"""Return the rows of a task of the queue source, a range of a queue's messages, as Arrow batches.

PostgreSQL does not send what can be computed here: the queue's name, ids and traces as text, and
names of partitions (queried once per task and partition).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from penstock.errors import InvalidRequest, Unavailable
from penstock.pipeline.source_columns import HEADERS, QUEUE_COLUMNS, TIMESTAMP, joined_values
from penstock.pipeline.sources import packed_messages as packed
from penstock.pipeline.sources.postgres import Away, Patience, Postgres
from penstock.protocol import headers

# What a column needs of PostgreSQL: `p` partition_id, `s` seq, the rest by their names. A payload
# that is NULL is one that Spark must not read: the column itself never is.
_NEEDS = {
    "queue": "",
    "partition": "p",
    "seq": "s",
    "id": "ps",
    "transactionId": "t",
    "traceId": "c",
    "payload": "d",
    "headers": "h",
}
_SQL = {
    "p": "m.partition_id",
    "s": "m.seq",
    "t": "m.transaction_id",
    "c": "m.trace_id",
    "d": "CASE WHEN m.key_id IS NULL THEN m.payload END",
    "a": "m.created_at",
    "h": packed.HEADERS,
}
FILE = "SELECT pg_relation_filenode('messages'::regclass)::bigint"

# UUIDs become text with a table of all groups of four hexadecimal digits.
_FOURS = np.array([f"{i:04x}".encode() for i in range(1 << 16)], "S4").view("<u4")
_PLACES = (0, 4, 9, 14, 19, 24, 28, 32)  # of each group of four digits in the text
_TEXT = np.dtype(
    {
        "names": [*(f"w{i}" for i in range(8)), *(f"dash{i}" for i in range(4))],
        "formats": ["<u4"] * 8 + ["u1"] * 4,
        "offsets": [*_PLACES, 8, 13, 18, 23],
        "itemsize": 36,
    }
)
Words = npt.NDArray[np.int64] | npt.NDArray[np.uint16] | int


@dataclass
class QueueRange(InputPartition):
    """One task's share: messages with low <= xid < high between two places of (partition, seq)
    order, or in the table's blocks from `after[0]` up to `until[0]` while its file is `file`.
    `packed` says which messages of these blocks PostgreSQL may pack: `all`, `small` ones (others
    are read as rows), or none."""

    low: int
    high: int
    after: tuple[int, int] | None
    until: tuple[int, int] | None
    file: int | None = None
    packed: str = ""


@dataclass(frozen=True)
class QueueRows:
    """Reads the rows of tasks, in the columns asked for. Picklable."""

    postgres: Postgres
    queue: str
    columns: list[str]
    streaming: bool
    encrypted: str  # fail or null

    def read(
        self, installation: int, task: QueueRange, conditions: list[str]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the messages of the task that meet the conditions."""
        # A stream's ranges have an order: one that breaks off can be resumed, if it is known where
        # that was.
        place = "ps" if self.streaming else ""
        needed = sorted(
            {*place, *(need for name in self.columns for need in _NEEDS.get(name, "a"))}
        ) or ["s"]
        names = PartitionNames(self.postgres)
        if task.packed and task.after:
            end = task.until and task.until[0]
            few = packed.query(
                needed, conditions, task.after[0], end, toasted=task.packed == "small"
            )
            for batch in self.postgres.batches(few):
                yield self._shape(installation, packed.unpack(batch), names)
            conditions = [*conditions, packed.rest()]
        if task.packed != "all":
            for batch in self._resumed(task, needed, conditions):
                yield self._shape(installation, batch, names)
        if task.file and self.postgres.rows(FILE)[0][0] != task.file:
            raise Unavailable(
                "the messages were moved (VACUUM FULL, CLUSTER) while they were read by "
                "blocks: read again"
            )

    def _resumed(
        self, task: QueueRange, needed: list[str], conditions: list[str]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the task's messages as rows, even if PostgreSQL goes away in between. A stream's
        range continues where it broke off. A range without an order begins again, as long as
        nothing of it was handed on.
        """
        patience = Patience(self.postgres.patience)
        handed_on = False
        while True:
            try:
                for batch in self.postgres.batches(self._rows(task, needed, conditions)):
                    patience.end()
                    if batch.num_rows:
                        handed_on = True
                        if self.streaming:
                            task = replace(
                                task, after=(batch["p"][-1].as_py(), batch["s"][-1].as_py() + 1)
                            )
                        yield batch
                return
            except Away as error:
                if handed_on and not self.streaming:
                    raise Unavailable(
                        f"{error}: a part was read already, in no order; read again"
                    ) from error
                patience.wait(error)

    def _rows(self, task: QueueRange, needed: list[str], conditions: list[str]) -> str:
        conditions = list(conditions)
        place, form = (
            ("ctid", "'(%d,%d)'::tid") if task.file else ("(m.partition_id, m.seq)", "(%d, %d)")
        )
        if task.after:
            conditions.append(f"{place} >= {form % task.after}")
        if task.until:
            conditions.append(f"{place} < {form % task.until}")
        order = " ORDER BY m.partition_id, m.seq" if self.streaming else ""
        names = ", ".join(f"{_SQL[need]} AS {need}" for need in needed)
        return f"SELECT {names} FROM messages m WHERE {' AND '.join(conditions)}{order}"

    def _shape(
        self, installation: int, batch: pa.RecordBatch, names: "PartitionNames"
    ) -> pa.RecordBatch:
        made = {
            "queue": lambda: pa.repeat(pa.scalar(self.queue), batch.num_rows),
            "partition": lambda: names.of(batch["p"]),
            "seq": lambda: batch["s"],
            "id": lambda: message_ids(installation, batch["p"], batch["s"]),
            "transactionId": lambda: batch["t"],
            "traceId": lambda: uuid_texts(batch["c"]),
            "payload": lambda: self._clear(batch["d"]).cast(pa.string()),
            "createdAt": lambda: batch["a"].cast(TIMESTAMP),
            "headers": lambda: self._headers(batch["h"]),
        }
        schema = pa.schema([QUEUE_COLUMNS.field(name) for name in self.columns])
        return pa.RecordBatch.from_arrays([made[name]() for name in self.columns], schema=schema)

    def _clear(self, payloads: pa.Array) -> pa.Array:
        """Return the payloads; encrypted ones are null, since they are never sent."""
        self._check_clear(payloads.null_count > 0)
        return payloads

    def _headers(self, texts: pa.Array) -> pa.Array:
        """Return the maps of JSON texts; an empty text stands for encrypted headers."""
        if texts.null_count == len(texts):
            return pa.nulls(len(texts), HEADERS)
        values = texts.to_pylist()
        self._check_clear(b"" in values)
        maps = [list(headers.decode(text).items()) if text else None for text in values]
        return pa.array(maps, HEADERS)

    def _check_clear(self, encrypted: bool) -> None:
        if encrypted and self.encrypted == "fail":
            raise InvalidRequest(
                f"queue {self.queue!r} holds encrypted messages and Spark is not given the keys: "
                "consume them through the broker, or set the option encrypted=null to read them "
                "without their payload and headers"
            )


class PartitionNames:
    """The names of partitions, asked for when they are first met."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres
        self._names: dict[int, str] = {}

    def of(self, partitions: pa.Array) -> pa.Array:
        met = partitions.dictionary_encode()
        ids = met.dictionary.to_pylist()
        new = ",".join(str(one) for one in ids if one not in self._names)
        if new:
            rows = self._postgres.rows(
                f"SELECT id, name FROM partitions WHERE id = ANY('{{{new}}}'::bigint[])"
            )
            self._names.update(rows)
        return pa.array([self._names[one] for one in ids], pa.string()).take(met.indices)


def message_ids(installation: int, partitions: pa.Array, seqs: pa.Array) -> pa.Array:
    """Return the ids of messages as text, in the layout of `message_uuid.sql`."""
    partition = partitions.to_numpy(zero_copy_only=False)
    seq = seqs.to_numpy(zero_copy_only=False)
    words: list[Words] = [
        installation >> 16,
        installation & 0xFFFF,
        partition >> 24,
        0x8000 | (partition >> 12) & 0xFFF,
        0x8000 | (partition & 0xFFF) << 2 | seq >> 48,
        (seq >> 32) & 0xFFFF,
        (seq >> 16) & 0xFFFF,
        seq & 0xFFFF,
    ]
    return _texts(words, len(partition))


def uuid_texts(raw: pa.Array) -> pa.Array:
    """Return 16-byte UUIDs as text; null stays null."""
    if raw.null_count == len(raw):
        return pa.nulls(len(raw), pa.string())
    valid = raw.is_valid()
    storage = getattr(raw, "storage", raw).cast(pa.binary())
    words = np.frombuffer(joined_values(storage), ">u2").astype(np.uint16).reshape(-1, 8)
    texts = _texts([words[:, i] for i in range(8)], len(words))
    if not raw.null_count:
        return texts
    at = np.cumsum(valid.to_numpy(zero_copy_only=False)) - 1
    return texts.take(pa.array(at, mask=~valid.to_numpy(zero_copy_only=False)))


def _texts(words: list[Words], count: int) -> pa.Array:
    text = np.empty(count, _TEXT)
    for i, word in enumerate(words):
        text[f"w{i}"] = _FOURS[word]
    for i in range(4):
        text[f"dash{i}"] = ord("-")
    ends = np.arange(0, 36 * (count + 1), 36, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(ends), pa.py_buffer(text)])
