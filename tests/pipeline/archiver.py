"""The archive job without Spark: its tasks run here, one after the other.

As a program it runs the job in children that are killed at their n-th step: `STEPS` are the calls
that others can see the effects of, and a step is the moment before and after each. For every line
`<root> <topics> <step>` on standard input it prints `killed` or `done`.
"""

import importlib
import os
import signal
import sys
from functools import wraps
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from penstock.pipeline.jobs import archive
from penstock.pipeline.jobs.archive import Archiver, ArchiveResult, Origin
from penstock.pipeline.lake import commits, data_files, maintenance
from penstock.pipeline.lake.data_files import DataFile, FileWriter
from penstock.pipeline.lake.maintenance import Merger, Upkeep, merge
from penstock.pipeline.lake.storage import Storage
from penstock.pipeline.lake.table import LakeTable
from penstock.pipeline.options import TopicSourceOptions, read_options
from penstock.pipeline.source_columns import TOPIC_COLUMNS
from penstock.pipeline.sources.topic import TopicPlan, TopicReader

TOPIC = "orders"
NEVER = 1 << 30  # a step that no run gets to
STEPS = [
    (Storage, "sync"),
    (Storage, "delete"),
    (Storage, "copy"),
    (data_files._Day, "flush"),
    (LakeTable, "create"),
    (LakeTable, "_commit"),
    (DeltaTable, "create_checkpoint"),
    (DeltaTable, "cleanup_metadata"),
    (LakeTable, "vacuum"),
    (Archiver, "mark"),
]


class LocalArchiver(Archiver):
    """Tasks of a topic in this process."""

    def frame(self, spark: Any, read: dict[str, str]) -> TopicReader:
        return TopicReader(TopicPlan(read_options(TopicSourceOptions, read), TOPIC_COLUMNS.names))

    def write(self, reader: Any, writer: FileWriter) -> list[DataFile]:
        return [file for task in reader.partitions() for file in writer.write(reader.read(task))]

    def merger(self, spark: Any) -> Merger:
        return merge_here


def merge_here(writer: FileWriter, groups: list[list[DataFile]]) -> list[DataFile]:
    return [file for group in groups for file in merge(writer, group)]


def archiver(root: Path | str, topics: Path, **upkeep: Any) -> LocalArchiver:
    origin = Origin(topic=TOPIC, directory=str(topics))
    return LocalArchiver(str(root), origin, Upkeep(**{"file_bytes": 1 << 20, **upkeep}))


def run(root: Path | str, topics: Path) -> ArchiveResult:
    job = archiver(root, topics)
    job.convert()
    done = job.run(None)
    done.maintained = job.maintain(None)
    return done


def _die_at(number: int) -> None:
    left = number

    def step() -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def stepping(call: Any) -> Any:
        @wraps(call)
        def wrapped(*given: Any, **named: Any) -> Any:
            step()
            answer = call(*given, **named)
            step()
            return answer

        return wrapped

    for owner, name in STEPS:
        setattr(owner, name, stepping(getattr(owner, name)))


def main() -> None:
    archive.RECORDS_PER_STEP, archive.RECORDS_PER_TASK = 40, (15, 15)
    maintenance.MERGED_FILES = 4
    commits.CHECKPOINT_INTERVAL, commits.CLEANUP_INTERVAL = 2, 2
    importlib.import_module("pandas")  # pyarrow does where it is there: once, not in each child
    for line in sys.stdin:
        root, topics, number = line.split()
        child = os.fork()  # nothing has started a thread here
        if not child:
            _die_at(int(number))
            run(root, Path(topics))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status not in (0, signal.SIGKILL):
            sys.exit(f"the run failed with status {status}")
        print("done" if status == 0 else "killed", flush=True)


if __name__ == "__main__":
    main()
