"""Find the key of each record and the latest record per key: shared by all ways of `compact`."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import functions as f

from penstock.errors import InvalidRequest
from penstock.net.addresses import resource
from penstock.net.broker_caller import BrokerCaller
from penstock.pipeline.jobs import Say

COUNTS = (
    *("records_before", "records", "bytes_before", "bytes"),
    *("tombstones", "keyless", "broken", "swaps"),
)
RECORD_OVERHEAD_BYTES = 12 + 16  # header and index row of a record


@dataclass(frozen=True)
class Keys:
    """How to read a record's key, and whether the record deletes it."""

    path: str | None = None
    sql: str | None = None
    tombstone_path: str | None = None
    tombstone_sql: str | None = None

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.sql):
            raise InvalidRequest(
                "compact takes a key: a JSON path such as '$.id', or a SQL expression"
            )
        if self.tombstone_path and self.tombstone_sql:
            raise InvalidRequest(
                "a tombstone is named by a JSON path or by a SQL expression, not both"
            )
        for path in (self.path, self.tombstone_path):
            if path and not path.startswith("$"):
                raise InvalidRequest(f"a JSON path begins with $, as in $.id; {path!r} does not")

    @property
    def digest(self) -> str:
        """Identify this choice of keys and tombstones in identities and manifests."""
        parts = (self.path, self.sql, self.tombstone_path, self.tombstone_sql)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    def read(self, frame: Any) -> Any:
        """Return the columns key, offset, timestamp, payload, tombstone, broken and own (the offset
        of a record without a key).
        """
        text = f.col("payload").cast("string")
        # Strict, and the whole record: half a JSON object, or one in another encoding, must not
        # pass for an update.
        valid = f.is_valid_utf8(text) & f.try_parse_json(text).isNotNull()
        whole = f.when(valid, text)
        empty = f.length("payload") == 0
        broken = f.lit(False)
        if self.path or self.tombstone_path:
            broken = ~empty & ~f.coalesce(valid, f.lit(False))
        if self.path:
            key = f.get_json_object(whole, self.path)
        else:
            key = f.expr(str(self.sql)).cast("string")
        if self.tombstone_path:
            tombstone = f.get_json_object(whole, self.tombstone_path) == "true"
        else:
            tombstone = f.expr(self.tombstone_sql) if self.tombstone_sql else empty
        try:
            columns = frame.select(
                key.alias("key"),
                "offset",
                "timestamp",
                "payload",
                f.coalesce(tombstone, f.lit(False)).alias("tombstone"),
                broken.alias("broken"),
            )
        except AnalysisException as error:
            raise InvalidRequest(
                f"the SQL of the key or the tombstone: {str(error).splitlines()[0]}"
            ) from None
        return columns.withColumn("own", f.when(f.col("key").isNull(), f.col("offset")))


@dataclass
class Compacted:
    """The counts of a compaction or of a dry run. Records that are left out are superseded, or
    tombstones. `first` and `end` are those of partition 0, the rest is the sum over all partitions.
    """

    topic: str
    to: str
    first: int = 0
    end: int = 0  # offsets looked at: from first up to, not including, end
    records_before: int = 0
    records: int = 0
    bytes_before: int = 0
    bytes: int = 0
    tombstones: int = 0  # left out
    keyless: int = 0  # without a key: kept
    broken: int = 0  # of these, no valid JSON
    swaps: int = 0
    executed: bool = True

    def add(self, other: "Compacted") -> None:
        """Add the counts of another partition."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def bytes_saved(self) -> int:
        return self.bytes_before - self.bytes


@dataclass
class KeyedRecords:
    """The topic to be compacted. `state` is what the broker says of it when the job begins."""

    spark: Any
    caller: BrokerCaller
    topic: str
    keys: Keys
    connection: dict[str, str]  # broker, directory and token, for Spark's reads and writes
    dry_run: bool
    say: Say
    state: Any = None

    def __post_init__(self) -> None:
        self.state = self.describe()

    def ask(self, method: str, *path: str, body: Any = None, timeout: float = 60.0) -> Any:
        """Send a request about this topic, which may be repeated."""
        return self.caller.json(
            method, resource("/topics", self.topic, *path), body, timeout=timeout
        )

    def describe(self) -> Any:
        return self.ask("GET")

    def rows(self, start: int, end: int) -> Any:
        """Return the records in [start, end) with their keys."""
        offsets = {
            "topic": self.topic,
            "firstPartition": "true",
            "startingOffsets": json.dumps({self.topic: start}),
            "endingOffsets": json.dumps({self.topic: end}),
        }
        frame = self.spark.read.format("penstock").options(**self.connection, **offsets)
        return self.keys.read(frame.load())


def latest_rows(rows: Any, content: str = "payload") -> Any:
    """Return one row per key (and per record without a key), with the number and the bytes of the
    records behind it. `content` is the payload, or `size`: the bytes it takes.
    """
    sized = rows.withColumn("size", f.length("payload") + RECORD_OVERHEAD_BYTES)
    grouped = sized.groupBy("key", "own").agg(
        f.max("offset").alias("offset"),
        f.max_by(f.struct("timestamp", content, "tombstone", "broken"), "offset").alias("last"),
        f.count(f.lit(1)).alias("records"),
        f.sum("size").alias("bytes"),
    )
    return grouped.select("key", "offset", "last.*", "records", "bytes")
