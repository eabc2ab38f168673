"""JSON payloads as typed columns. A record that does not fit never fails the query: it is marked,
or led elsewhere.

One rule: a payload is exactly one JSON object (RFC 8259), and each of its fields keeps its value in
the column's type, or the record does not fit and none of its fields is used. Spark's `from_json`
alone is laxer: it ignores what follows the first value, takes the last of two equal keys, makes
1e999 an infinity and rounds decimals. So:

- the payload is read a second time, as a variant, which refuses equal keys and broken strings. What
  is read is `[payload,hash of payload]`: only if the hash comes back as the second element was the
  payload one whole value.
- decimals are read with all the digits that 38 leave room for, and must be equal to themselves in
  the column's type.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

from pyspark.sql import functions as f
from pyspark.sql import types as t

from penstock.pipeline.source_columns import CORRUPT, META, REASON, origin_columns

STRICT = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": CORRUPT,
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
    "dateFormat": "yyyy-MM-dd",  # without it `2026-01-05 garbage` is a date
}
MAX_DIGITS = 38  # of Spark's decimals
SHOWN_CHARACTERS = 100  # characters of a value in a reason


def typed(frame: Any, schema: str) -> Any:
    """Return the payload's fields as columns, with the origin of each record, `_corrupt` (the text
    of a record that does not fit) and `_reason` (why). With keys, `_tombstone` says whether the
    record deletes its key.

    `frame` is what a topic or queue source gives; its other columns stay, with an underscore before
    their names, unless the schema has a field of that name.
    """
    target: Any = t.StructType.fromDDL(schema)
    kind = "queue" if "queue" in frame.columns else "topic"
    origin = origin_columns(kind, target.names)
    if kind == "topic":
        taken = {name.lower() for name in target.names}
        keyed = (name for name in ("partition", "key", "headers") if f"_{name}" not in taken)
        origin += [name for name in keyed if name in frame.columns]
    judged = _judged(frame, target, [f.col(name).alias(f"_{name}") for name in origin])
    reason, more = f.col(REASON), []
    if "key" in origin:
        # A record with a key and without a value deletes the key: it fits, and all its fields are
        # null.
        empty = f.coalesce(f.length("_text") == 0, f.lit(True)) & f.col("_key").isNotNull()
        reason, more = f.when(~empty, reason), [empty.alias("_tombstone")]
    return judged.select(
        *(f.col(f"_fields.`{field.name}`").alias(field.name) for field in target.fields),
        f.when(reason.isNotNull(), f.coalesce("_text", f.lit(""))).alias(CORRUPT),
        reason.alias(REASON),
        *(f"_{name}" for name in origin),
        *more,
    )


def parsed_fields(frame: Any, target: Any, names: dict[str, str]) -> Any:
    """Return the frame's own columns, the payload's fields under the given names, and `_reason`."""
    judged = _judged(frame, target, [f.col(name) for name in frame.columns])
    return judged.select(
        *frame.columns,
        *(f.col(f"_fields.`{one.name}`").alias(names[one.name]) for one in target.fields),
        REASON,
    )


def _judged(frame: Any, target: Any, kept: list[Any]) -> Any:
    """Return the columns to keep, `_text`, `_fields` with the payload's fields, and `_reason`."""
    text = f.col("payload").cast("string")
    parsed = f.from_json(
        "_text",
        t.StructType([*_widened(target).fields, t.StructField(CORRUPT, t.StringType())]),
        STRICT,
    )
    hashed = f.xxhash64("_text").cast("string")
    pair = f.try_parse_json(f.concat(f.lit("["), f.col("_text"), f.lit(","), hashed, f.lit("]")))
    # Out of a generator, or a filter over the columns would be pushed below them and parse
    # everything once more.
    once = f.inline(f.array(f.struct(parsed.alias("_parsed"), pair.alias("_pair"))))
    read = frame.select(text.alias("_text"), *kept).select("*", once)
    whole = f.try_variant_get("_pair", "$[1]", "string").eqNullSafe(hashed)
    judged = read.withColumn(REASON, _reason(target, whole))
    fields = f.col("_parsed").dropFields(CORRUPT).cast(target)
    return judged.withColumn("_fields", f.when(f.col(REASON).isNull(), fields))


def _widened(kind: Any) -> Any:
    """Return the type with room for all digits of decimals, and with all columns nullable."""
    if isinstance(kind, t.StructType):
        return t.StructType(
            [t.StructField(one.name, _widened(one.dataType)) for one in kind.fields]
        )
    if isinstance(kind, t.ArrayType):
        return t.ArrayType(_widened(kind.elementType))
    if isinstance(kind, t.MapType):
        return t.MapType(kind.keyType, _widened(kind.valueType))
    if isinstance(kind, t.DecimalType):
        return t.DecimalType(MAX_DIGITS, MAX_DIGITS - (kind.precision - kind.scale))
    return kind


def _misfit(
    value: Any, kind: Any, leaf: type | tuple[type, ...], test: Callable[[Any, Any], Any]
) -> Any:
    """Return whether `test` holds for a value of type `leaf` inside; None if there can be none."""
    if isinstance(kind, leaf):
        return f.coalesce(test(value, kind), f.lit(False))
    if isinstance(kind, t.StructType):
        parts = (_misfit(value.getField(one.name), one.dataType, leaf, test) for one in kind.fields)
        inside = [part for part in parts if part is not None]
        return functools.reduce(operator.or_, inside) if inside else None
    if isinstance(kind, t.ArrayType | t.MapType):
        inner = kind.elementType if isinstance(kind, t.ArrayType) else kind.valueType
        if _misfit(f.lit(None), inner, leaf, test) is None:
            return None
        values = value if isinstance(kind, t.ArrayType) else f.map_values(value)
        return f.coalesce(
            f.exists(values, lambda one: _misfit(one, inner, leaf, test)), f.lit(False)
        )
    return None


def _not_finite(value: Any, _kind: Any) -> Any:
    return f.isnan(value) | (f.abs(value) == f.lit(float("inf")))


def _rounded(value: Any, kind: Any) -> Any:
    return value != value.try_cast(kind)


def _reason(target: Any, whole: Any) -> Any:
    """Return why a record does not fit; null if it does. Only bad records cost much."""
    text, parsed = f.col("_text"), f.col("_parsed")
    alone = f.try_parse_json(text)
    sound = parsed.isNotNull() & parsed[CORRUPT].isNull()
    reason = f.when(text.isNull() | (f.trim(text) == ""), "the payload is empty")
    reason = reason.when(~f.is_valid_utf8(text), "the payload is not valid UTF-8")
    reason = reason.when(
        ~whole,
        f.when(alone.isNotNull(), "something follows the JSON value")
        .when(sound, "the JSON has a key twice, or half of a surrogate pair in a string")
        .otherwise("the payload is not JSON"),
    )
    for field in target.fields:
        name, kind = field.name, field.dataType
        value, ddl = parsed.getField(name), kind.simpleString()
        if (infinite := _misfit(value, kind, (t.DoubleType, t.FloatType), _not_finite)) is not None:
            reason = reason.when(infinite, f"field {name}: a number is too large for {ddl}")
        if (rounded := _misfit(value, kind, t.DecimalType, _rounded)) is not None:
            if isinstance(kind, t.DecimalType) and (given := _given(name)) is not None:
                # 38 digits leave no room beyond a DECIMAL(38, n): the variant has the number as it
                # was written
                beyond = f.rlike(given, f.lit(rf"^-?[0-9]+\.[0-9]{{{kind.scale}}}[0-9]*[1-9]"))
                rounded = rounded | f.coalesce(beyond, f.lit(False))
            reason = reason.when(rounded, f"field {name}: a number has more digits than {ddl}")
    return reason.when(~sound, _mismatch(target))


def _given(name: str) -> Any:
    """Return a field's value as text, as the record has it; None for a name without a path."""
    if set(name) & set("'\\"):
        return None
    return f.try_variant_get("_pair", f"$[0]['{name}']", "string")


def _mismatch(target: Any) -> Any:
    """Return the field of a wrong type: it has a value in the record and none in the columns."""
    kind = f.schema_of_variant(f.try_variant_get("_pair", "$[0]", "variant"))
    reason = f.when(~f.startswith(kind, f.lit("OBJECT")), "the payload is not a JSON object")
    for field in target.fields:
        if (given := _given(field.name)) is not None:
            lost = given.isNotNull() & f.col("_parsed").getField(field.name).isNull()
            what = f.concat(
                f.lit(f"field {field.name}: not {field.dataType.simpleString()}: "),
                f.substring(given, 1, SHOWN_CHARACTERS),
            )
            reason = reason.when(lost, what)
    return reason.otherwise("the payload does not match the schema")


def dead_letters(frame: Any, source: str) -> Any:
    """Return the records of a `typed` frame that did not fit, as JSON with reason and origin."""
    meta_columns = {f"_{meta}" for names in META.values() for meta in names}
    origin = [f.col(name).alias(name[1:]) for name in frame.columns if name in meta_columns]
    bad = frame.where(f.col(CORRUPT).isNotNull())
    return bad.select(dead_letter(source, origin, f.col(CORRUPT)))


def dead_letter(source: str, origin: list[Any], payload: Any) -> Any:
    """Return the column `payload` of a dead letter: JSON with the reason and the origin."""
    reason, where = f.col(REASON).alias("reason"), f.lit(source).alias("source")
    return f.to_json(f.struct(reason, where, *origin, payload.alias("payload"))).alias("payload")
