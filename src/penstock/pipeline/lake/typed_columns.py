"""JSON payloads as columns of the table.

The columns are those of a schema that is given, or of what the records have: scalars in a type of
their own, objects and arrays as their JSON text, so that a new field inside one changes nothing.
They are pinned in the table: later runs use them by themselves, and only add columns. Payloads
stay. A record that does not fit has null in all these columns and says why in `_reason`, so the
table holds every record and `_reason IS NOT NULL` finds those that do not fit.

A field that is called as a column the table has anyway (`offset`, `id`, `date`) gets an underscore
behind its name.
"""

import logging
import re
from typing import Any

import pyarrow as pa

from penstock.errors import Conflict, InvalidRequest
from penstock.pipeline.json_schema import REASON, parsed_fields
from penstock.pipeline.lake.data_files import Kind
from penstock.pipeline.lake.table import Snapshot

log = logging.getLogger("penstock.pipeline")

INFER = "infer"
OUTCOMES = "_outcomes"  # see `penstock.pipeline.lake.outcomes`
# Of what Spark says of JSON values. Whole numbers beyond 64 bits and fractions are doubles.
INFERRED = {
    "BIGINT": "BIGINT",
    "DECIMAL": "DOUBLE",
    "DOUBLE": "DOUBLE",
    "BOOLEAN": "BOOLEAN",
    "STRING": "STRING",
    "OBJECT": "STRING",
    "ARRAY": "STRING",
    "VARIANT": "STRING",
}
MAX_COLUMNS = 1000
# What Delta and Parquet take in a column's name.
NAMEABLE = re.compile(r"[^ ,;{}()\n\t=`.]+").fullmatch


class TypedColumns:
    """The fields of payloads that are columns."""

    def __init__(self, kind: Kind, fields: Any = None) -> None:
        self.kind = kind
        self.fields = fields  # a StructType with the names in the records; None without any

    @classmethod
    def of(cls, snapshot: Snapshot | None, kind: Kind) -> "TypedColumns":
        """Those of a table."""
        from pyspark.sql.types import StructField, StructType

        from penstock.pipeline.lake.frames import spark_schema

        if snapshot is None or REASON not in snapshot.columns().names:
            return cls(kind)
        reserved = _reserved(kind)
        return cls(
            kind,
            StructType(
                [
                    StructField(_field_name(one.name, reserved), one.dataType)
                    for one in spark_schema(snapshot).fields
                    if one.name not in reserved
                ]
            ),
        )

    def declared(self, ddl: str) -> "TypedColumns":
        """With the fields of a schema that was given."""
        from pyspark.errors import PySparkException
        from pyspark.sql.types import StructType

        try:
            more: Any = StructType.fromDDL(ddl)
        except PySparkException as error:
            raise InvalidRequest(
                f"the schema {ddl!r} is not one such as 'id BIGINT, amount DOUBLE': {error}"
            ) from None
        return self.extended(more)

    def extended(self, more: Any) -> "TypedColumns":
        """With further fields of a StructType; Conflict for one that has another type."""
        from pyspark.sql.types import StructField, StructType

        fields = {one.name.lower(): one for one in (self.fields or StructType([])).fields}
        for one in more.fields:
            if not NAMEABLE(one.name):
                raise InvalidRequest(f"{one.name!r} cannot be the name of a column of the table")
            known = fields.setdefault(one.name.lower(), StructField(one.name, one.dataType))
            if known.dataType != one.dataType:
                raise Conflict(
                    f"column {known.name} of the table is {known.dataType.simpleString()} and "
                    f"cannot become {one.dataType.simpleString()}"
                )
        return TypedColumns(self.kind, StructType(list(fields.values())))

    def inferred(self, frame: Any) -> "TypedColumns":
        """With the fields that the records of a frame have and the columns do not."""
        from pyspark.sql import functions as f
        from pyspark.sql.types import (
            BooleanType,
            DoubleType,
            LongType,
            StringType,
            StructField,
            StructType,
        )

        types: dict[str, Any] = {
            "BIGINT": LongType(),
            "DOUBLE": DoubleType(),
            "BOOLEAN": BooleanType(),
            "STRING": StringType(),
        }
        payload = f.try_parse_json(f.col("payload").cast("string"))
        # with an array or a number among them there would be no fields in common
        fields = f.when(f.schema_of_variant(payload).startswith("OBJECT<"), payload)
        text = frame.select(f.schema_of_variant_agg(fields)).collect()[0][0] or ""
        known = {one.name.lower() for one in (self.fields or StructType([])).fields}
        new = []
        for name, kind in object_fields(text):
            if name.lower() in known or kind not in INFERRED:
                continue
            known.add(name.lower())
            if not NAMEABLE(name) or len(known) > MAX_COLUMNS:
                log.warning("field %r of the payloads is not made a column", name)
                continue
            new.append(StructField(name, types[INFERRED[kind]]))
        return self.extended(StructType(new))

    def arrow(self) -> list[pa.Field]:
        """As columns of the table."""
        from pyspark.sql.pandas.types import to_arrow_schema
        from pyspark.sql.types import StringType, StructField, StructType

        if self.fields is None:
            return []
        reserved = _reserved(self.kind)
        named = [
            StructField(_column_name(one.name, reserved), one.dataType)
            for one in self.fields.fields
        ]
        columns = StructType([*named, StructField(REASON, StringType())])
        return list(to_arrow_schema(columns, timezone="UTC"))

    def applied(self, frame: Any) -> Any:
        """The frame with these columns and `_reason` behind its own."""
        if self.fields is None:
            return frame
        reserved = _reserved(self.kind)
        names = {one.name: _column_name(one.name, reserved) for one in self.fields.fields}
        return parsed_fields(frame, self.fields, names)


def _reserved(kind: Kind) -> set[str]:
    """The columns that are no fields of payloads."""
    return {*kind.base, "date", REASON, OUTCOMES}


def _column_name(field: str, reserved: set[str]) -> str:
    taken = {name.lower() for name in reserved}
    return f"{field}_" if field.rstrip("_").lower() in taken else field


def _field_name(column: str, reserved: set[str]) -> str:
    taken = {name.lower() for name in reserved}
    stripped = column.rstrip("_").lower()
    return column[:-1] if stripped in taken and column.endswith("_") else column


def object_fields(text: str) -> list[tuple[str, str]]:
    """Name and type of the fields in `OBJECT<a: BIGINT, b: ARRAY<STRING>>`; types without what is
    in them. Names that are not plain are in backticks.
    """
    if not text.startswith("OBJECT<"):
        return []
    fields = []
    position, inner = 0, text[len("OBJECT<") : -1]
    name_of = re.compile(r"`((?:[^`]|``)*)`: |([^:`]*): ")
    while position < len(inner):
        match = name_of.match(inner, position)
        if match is None:
            raise InvalidRequest(f"the fields of the payloads are not understood: {text[:200]}")
        end = match.end()
        depth = 0
        quoted = False
        while end < len(inner) and (depth or quoted or inner[end] != ","):
            character = inner[end]
            quoted ^= character == "`"
            if not quoted:
                depth += (character in "<(") - (character in ">)")
            end += 1
        kind = re.match(r"[A-Z]+", inner[match.end() : end])
        name = match[1].replace("``", "`") if match[1] is not None else match[2]
        fields.append((name, kind[0] if kind else ""))
        position = end + 2
    return fields
