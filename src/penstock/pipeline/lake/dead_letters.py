"""Records that do not fit the table's columns, copied to a topic as dead letters, each once.

They are in the table anyway, with the reason in `_reason`. A commit names its files that have any
(`MISFITS`), and what a commit brought is written after it, under an identity made of its run: so it
is written once, however often a killed run is repeated. How far this got is an application
transaction of the table of its own, the version of the last commit that is done.
"""

from typing import Any

from pyspark.sql import functions as f

from penstock.pipeline.json_schema import dead_letter
from penstock.pipeline.lake.commits import RUN
from penstock.pipeline.lake.data_files import DataFile
from penstock.pipeline.lake.frames import archived_frame
from penstock.pipeline.lake.table import MISFITS, LakeTable, Snapshot
from penstock.pipeline.sinks.identity import append_once
from penstock.pipeline.source_columns import REASON

REPORTED = "penstock:dead-letters"
MAX_COMMITS = 1000  # searched for records that do not fit


def write_dead_letters(
    spark: Any, table: LakeTable, snapshot: Snapshot, topic: str, reach: dict[str, str]
) -> None:
    """Write those of all commits that are not done yet."""
    reported = snapshot.delta.transaction_version(REPORTED)
    since = -1 if reported is None else reported
    behind = min(snapshot.version - since, MAX_COMMITS)
    if behind <= 0:
        return
    commits = snapshot.delta.history(behind)
    pending = [one for one in commits if one["version"] > since and one.get(MISFITS)]
    for commit in sorted(pending, key=lambda one: int(one["version"])):
        files = [
            DataFile(path, 0, 0, path.split("/")[0].removeprefix("date="), 0, 0)
            for path in commit[MISFITS]
        ]
        rows = archived_frame(spark, table, snapshot, files).where(f"{REASON} IS NOT NULL")
        order, letters = _letters(rows, table)
        append_once(letters, order, f"archive:{commit[RUN]}", topic=topic, **reach)
        table.mark(REPORTED, commit["version"])


def _letters(rows: Any, table: LakeTable) -> tuple[list[str], Any]:
    """Return the columns that order the rows, and the rows as dead letters."""
    names = [name for name in table.kind.columns.names if name not in ("payload", "headers")]
    source = f"archive of {table.kind.name} {table.name}"
    letter = dead_letter(source, [f.col(name) for name in names], f.col("payload").cast("string"))
    order = ["offset"] if table.kind.name == "topic" else ["partition", "seq"]
    return order, rows.select(*order, letter)
