"""Delta tables that others wrote, as Spark frames: dimension tables to join a stream with."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.errors import NotFound
from penstock.pipeline.lake.storage import Storage

FILES_PER_TASK = 8


def delta_frame(spark: Any, uri: str, options: dict[str, str]) -> Any:
    """Return the current rows of a table. Tasks read the version that the driver opened."""
    storage = Storage(uri, options)
    try:
        table = DeltaTable(storage.uri, storage_options=storage.options)
    except TableNotFoundError:
        raise NotFound(f"{storage.uri} is not a Delta table") from None
    version, where, given = table.version(), storage.uri, storage.options
    schema = pa.schema(table.schema())

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        numbers = {number for batch in batches for number in batch.column(0).to_pylist()}
        if not numbers:
            return
        dataset = DeltaTable(where, version, given).to_pyarrow_dataset()
        wide = dataset.schema
        for number, fragment in enumerate(dataset.get_fragments()):
            if number // FILES_PER_TASK in numbers:
                for rows in fragment.to_batches(schema=wide):
                    yield rows.cast(schema)

    tasks = -(-len(table.file_uris()) // FILES_PER_TASK)
    numbers = spark.range(0, max(1, tasks), 1, max(1, tasks))
    return numbers.mapInArrow(read, from_arrow_schema(schema))
