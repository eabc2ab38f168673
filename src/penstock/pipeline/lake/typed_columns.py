"""JSON payloads as columns of the table.

The columns are those of a schema that is given, or of what the records have: scalars in a type of
their own, objects and arrays as their JSON text, so that a new field inside one changes nothing.
They are pinned in the table: later runs use them by themselves, and only add columns. Payloads
stay. A record that does not fit has null in all these columns and says why in `_reason`, so the
table holds every record and `_reason IS NOT NULL` finds those that do not fit.

A field that is called as a column the table has anyway (`offset`, `id`, `date`) gets an underscore
behind its name.
"""

import json
import logging
import re
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from penstock.errors import Conflict, InvalidRequest
from penstock.pipeline.json_schema import parsed_fields
from penstock.pipeline.lake.data_files import Kind
from penstock.pipeline.lake.table import Snapshot
from penstock.pipeline.source_columns import REASON

log = logging.getLogger("penstock.pipeline")

INFER = "infer"
OUTCOMES = "_outcomes"  # see `penstock.pipeline.lake.outcomes`
# Spark's types of JSON values. Integers beyond 64 bits and fractions are doubles.
INFERRED = {
    "BIGINT": "long",
    "DECIMAL": "double",
    "DOUBLE": "double",
    "BOOLEAN": "boolean",
    "STRING": "string",
    "OBJECT": "string",
    "ARRAY": "string",
    "VARIANT": "string",
}
MAX_COLUMNS = 1000
# Names of columns that Delta and Parquet accept.
NAMEABLE = re.compile(r"[^ ,;{}()\n\t=`.]+").fullmatch


class TypedColumns:
    """The fields of payloads that are columns."""

    def __init__(self, kind: Kind, fields: Any = None) -> None:
        self.kind = kind
        self.fields = fields  # a StructType with the names in the records; None without any
        # the columns that are not fields of payloads
        self.reserved = {*kind.columns.names, "date", REASON, OUTCOMES}
        self._taken = {name.lower() for name in self.reserved}

    @classmethod
    def of(cls, snapshot: Snapshot | None, kind: Kind) -> "TypedColumns":
        """Return the columns of a table."""
        if snapshot is None or REASON not in snapshot.columns().names:
            return cls(kind)
        typed = cls(kind, StructType())
        for one in spark_schema(snapshot).fields:
            if one.name not in typed.reserved:
                typed.fields.add(typed.field_name(one.name), one.dataType)
        return typed

    def declared(self, ddl: str) -> "TypedColumns":
        """Return these columns and the fields of the given schema."""
        try:
            more: Any = StructType.fromDDL(ddl)
        except PySparkException as error:
            raise InvalidRequest(
                f"the schema {ddl!r} is not one such as 'id BIGINT, amount DOUBLE': {error}"
            ) from None
        return self.extended(more)

    def extended(self, more: Any) -> "TypedColumns":
        """Return these columns and those of a StructType. Raise Conflict if a type differs."""
        fields = {one.name.lower(): one for one in (self.fields or StructType([])).fields}
        for one in more.fields:
            if not NAMEABLE(one.name):
                raise InvalidRequest(f"{one.name!r} cannot be the name of a column of the table")
            column = fields.setdefault(one.name.lower(), StructField(one.name, one.dataType))
            if column.dataType != one.dataType:
                raise Conflict(
                    f"column {column.name} of the table is {column.dataType.simpleString()} and "
                    f"cannot become {one.dataType.simpleString()}"
                )
        return TypedColumns(self.kind, StructType(list(fields.values())))

    def inferred(self, frame: Any) -> "TypedColumns":
        """Return these columns and the fields of a frame's records that are not among them."""
        inferred = frame.sparkSession.sql(
            """SELECT key, schema_of_variant_agg(value) AS type
                 FROM {frame}, LATERAL variant_explode(try_parse_json(CAST(payload AS STRING)))
                WHERE key IS NOT NULL GROUP BY key ORDER BY key""",
            frame=frame,
        )
        names = {one.name.lower() for one in (self.fields or StructType([])).fields}
        new = StructType()
        for name, full_type in inferred.collect():
            kind = re.split("[<(]", full_type)[0]  # without what is in it
            if name.lower() in names or kind not in INFERRED:
                continue
            names.add(name.lower())
            if not NAMEABLE(name) or len(names) > MAX_COLUMNS:
                log.warning("field %r of the payloads is not made a column", name)
                continue
            new.add(name, INFERRED[kind])
        return self.extended(new)

    def arrow(self) -> list[pa.Field]:
        """Return the columns as fields of the table."""
        if self.fields is None:
            return []
        columns = StructType()
        for one in self.fields.fields:
            columns.add(self.column_name(one.name), one.dataType)
        return list(to_arrow_schema(columns.add(REASON, "string"), timezone="UTC"))

    def applied(self, frame: Any) -> Any:
        """Return the frame with these columns and `_reason` after its own."""
        if self.fields is None:
            return frame
        names = {one.name: self.column_name(one.name) for one in self.fields.fields}
        return parsed_fields(frame, self.fields, names)

    def column_name(self, field: str) -> str:
        """Return the name of a field's column; a reserved name gets another underscore."""
        return f"{field}_" if field.rstrip("_").lower() in self._taken else field

    def field_name(self, column: str) -> str:
        return column.removesuffix("_") if column.rstrip("_").lower() in self._taken else column


def spark_schema(snapshot: Snapshot) -> Any:
    return StructType.fromJson(json.loads(snapshot.delta.schema().to_json()))
