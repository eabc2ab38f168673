"""JSON payloads as typed columns. A record that does not fit never fails the query: it is marked, or led elsewhere."""

from typing import Any

from penstock.pipeline.check import META

CORRUPT = "_corrupt"


def typed(frame: Any, schema: str) -> Any:
    """The payload's fields as columns, `_corrupt` with the text of a record that does not fit, and where it came from.

    `frame` is what a topic or queue source gives; its other columns stay, with an underscore before their names.
    """
    from pyspark.sql import functions as f

    kind = "queue" if "queue" in frame.columns else "topic"
    text = f.col("payload").cast("string")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
    parsed = f.from_json(text, f"{schema}, {CORRUPT} STRING", options)
    # An empty or null payload parses to nothing at all; it is no record of this schema either.
    broken = f.when(f.col("_parsed").isNull(), f.coalesce(f.col("_text"), f.lit(""))).otherwise(
        f.col(f"_parsed.{CORRUPT}")
    )
    meta = [f.col(name).alias(f"_{name}") for name in META[kind]]
    wide = frame.select(parsed.alias("_parsed"), text.alias("_text"), *meta)
    fields = [name for name in wide.schema["_parsed"].dataType.fieldNames() if name != CORRUPT]
    return wide.select(
        *(f.col(f"_parsed.`{name}`").alias(name) for name in fields),
        broken.alias(CORRUPT),
        *(f"_{name}" for name in META[kind]),
    )


def dead_letters(frame: Any, source: str) -> Any:
    """The records of a `typed` frame that did not fit, as JSON with the reason and where they came from."""
    from pyspark.sql import functions as f

    origin = [name for name in frame.columns if name in {f"_{meta}" for names in META.values() for meta in names}]
    record = f.struct(
        f.lit("the payload does not match the schema").alias("reason"),
        f.lit(source).alias("source"),
        *(f.col(name).alias(name[1:]) for name in origin),
        f.col(CORRUPT).alias("payload"),
    )
    return frame.where(f.col(CORRUPT).isNotNull()).select(f.to_json(record).alias("payload"))
