"""Record a pipeline's steps in its checkpoint, and reject changed steps that would reuse its state.

    <checkpoint>/steps/<n>.json     the steps from the n-th change on; the last one counts

Aggregates, joins and deduplication keep state between batches. Spark compares only the columns of
that state, so a count that is changed to a sum would continue from the old count. So once a batch
is committed, the steps that keep state, and all steps that they read from, must not change. Other
steps, and pipelines without state, may change; the change is recorded.

The texts of the steps are stored and compared word by word. Layout, comments and the case of words
are ignored. For a Python step, the source of its function is compared, but not what it calls.
"""

import ast
import inspect
import json
import logging
import re
import textwrap
from datetime import UTC, datetime
from typing import Any

from pyspark.sql.types import StructType

from penstock.errors import ConfigError
from penstock.pipeline.pipeline_file import PipelineFile, PipelineStep
from penstock.pipeline.spark_plan import stateful_nodes
from penstock.pipeline.validation import load_function

log = logging.getLogger("penstock.pipeline")

# Tokens of SQL: quoted text, comments, white space, words, and single characters.
TOKEN = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`|--[^\n]*|/\*.*?\*/|\s+|\w+|.""", re.DOTALL
)


def record_steps(
    spark: Any, pipeline: PipelineFile, made: dict[str, Any], inputs: dict[str, list[str]]
) -> None:
    """Record the steps. Raises ConfigError if other steps have made the checkpoint's state.

    `made` has the frame of each view, and `inputs` the views that each step reads.
    """
    if not hasattr(spark, "_jvm"):
        log.info(
            "steps are not compared over Spark Connect: the server owns the checkpoint's files"
        )
        return
    files = CheckpointFiles(spark, (pipeline.checkpoint or "").rstrip("/"))
    now = _describe(pipeline, made, inputs)
    number, before = files.last()
    if before is not None and files.committed():
        differences = changes(before, now)
        if differences:
            raise ConfigError(
                f"the checkpoint {pipeline.checkpoint} holds state that other steps have made: "
                f"{'; '.join(differences)}. The new steps would continue from that state. Either "
                "restore the earlier steps, or give the pipeline a new `checkpoint`: it then reads "
                "from startingOffsets and writes to the sink again"
            )
    if before is None or any(before.get(key) != now[key] for key in now):
        if before is not None:
            log.warning("pipeline %s: its steps changed; new data uses the new steps", now["name"])
        files.add(number + 1, {**now, "at": datetime.now(UTC).isoformat(timespec="seconds")})


def _describe(
    pipeline: PipelineFile, made: dict[str, Any], inputs: dict[str, list[str]]
) -> dict[str, Any]:
    steps = {step.name: {"sql": step.sql} if step.sql else _python(step) for step in pipeline.steps}
    sources = {name: {"schema": source.schema} for name, source in pipeline.views.items()}
    return {
        "name": pipeline.name,
        "steps": steps,
        "sources": sources,
        "state": sorted(_state(pipeline, made, inputs)),
        "outputs": sorted(pipeline.outputs),
    }


def _python(step: PipelineStep) -> dict[str, str]:
    try:
        source = textwrap.dedent(
            inspect.getsource(load_function(step.python or "", f"step {step.name}"))
        )
    except (OSError, TypeError):
        source = ""  # not written in Python: compare only its name
    return {"python": step.python or "", "source": source}


def _state(pipeline: PipelineFile, made: dict[str, Any], inputs: dict[str, list[str]]) -> set[str]:
    """Return the steps and sources that the state of any sink's query depends on."""
    counts = {name: stateful_nodes(frame) for name, frame in made.items()}
    last = next(reversed(made))
    stateful: set[str] = set()
    for view in {sink.view or last for sink in pipeline.outputs.values()}:
        for name in ancestors(view, inputs):
            if name in inputs and counts[name] > sum(counts[one] for one in inputs[name]):
                stateful |= ancestors(name, inputs)
    return stateful


def ancestors(view: str, inputs: dict[str, list[str]], stop: str | None = None) -> set[str]:
    """Return a view and all its direct and indirect inputs, but no inputs of `stop`."""
    reached: set[str] = set()
    rest = [view]
    while rest:
        one = rest.pop()
        if one not in reached:
            reached.add(one)
            rest += inputs.get(one, []) if one != stop else []
    return reached


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe the changes to steps and sources that state depends on."""
    differences = []
    known = "outputs" in before  # older files record only the state of the last view
    for name in sorted({*before["state"], *(now["state"] if known else ())}):
        old, new = before["steps"].get(name), now["steps"].get(name)
        if name in before["sources"] and name in now["sources"]:
            differences += _retyped(name, before["sources"][name], now["sources"][name])
        elif old is None or new is None:
            differences.append(f"{name} is {'new' if old is None else 'gone'}")
        elif not _same(old, new):
            differences.append(f"step {name} was {_shown(old)} and is {_shown(new)}")
    # the same texts, but other steps depend on state now
    if not differences and known and before["state"] != now["state"]:
        differences.append(
            f"state depended on {_listed(before['state'])}"
            f" and would depend on {_listed(now['state'])}"
        )
    return differences


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "nothing"


def _retyped(name: str, *sources: dict[str, Any]) -> list[str]:
    """Describe columns whose type changed. An added column is harmless; a missing one fails."""
    schemas = (source["schema"] for source in sources)
    before, now = (_types(ddl) for ddl in schemas)
    return [
        f"column {column} of source {name} was {before[column]} and is {kind}"
        for column, kind in now.items()
        if column in before and before[column] != kind
    ]


def _types(ddl: str | None) -> dict[str, str]:
    columns: Any = StructType.fromDDL(ddl) if ddl else StructType()
    return {column.name: column.dataType.simpleString().upper() for column in columns}


def _same(old: dict[str, str], new: dict[str, str]) -> bool:
    return old == new or _parsed(old) == _parsed(new)


def _parsed(step: dict[str, str]) -> tuple[str, ...]:
    if "sql" in step:
        return (_parsed_sql(step["sql"]),)
    return step["python"], _parsed_python(step["source"])


def _parsed_sql(sql: str) -> str:
    words = (word for word in TOKEN.findall(sql) if word.strip() and word[:2] not in ("--", "/*"))
    return " ".join(word if word[0] in "'\"`" else word.lower() for word in words)


def _parsed_python(source: str) -> str:
    try:
        return ast.dump(ast.parse(source))
    except SyntaxError:
        return source


def _shown(step: dict[str, str]) -> str:
    text = " ".join(step["sql"].split()) if "sql" in step else step["python"]
    return f"{text[:200]!r}"


class CheckpointFiles:
    """The checkpoint's directory, on any file system that Spark supports."""

    def __init__(self, spark: Any, root: str) -> None:
        self._jvm = spark._jvm
        self._root = root
        configuration = spark._jsparkSession.sessionState().newHadoopConf()
        self._fs = self._path("").getFileSystem(configuration)

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self._root}/{name}" if name else self._root)

    def _names(self, directory: str) -> list[str]:
        path = self._path(directory)
        entries = self._fs.listStatus(path) if self._fs.exists(path) else []
        return [entry.getPath().getName() for entry in entries]

    def exists(self, name: str) -> bool:
        return bool(self._fs.exists(self._path(name)))

    def committed(self) -> bool:
        return any(
            name.isdigit() for query in self._names("") for name in self._names(f"{query}/commits")
        )

    def last(self) -> tuple[int, dict[str, Any] | None]:
        names = [name.removesuffix(".json") for name in self._names("steps")]
        numbers = [int(name) for name in names if name.isdigit()]
        if not numbers:
            return -1, None
        stream = self._fs.open(self._path(f"steps/{max(numbers)}.json"))
        try:
            text = self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8")
        finally:
            stream.close()
        return max(numbers), json.loads(text)

    def add(self, number: int, steps: dict[str, Any]) -> None:
        aside, target = self._path(f"steps/.{number}.tmp"), self._path(f"steps/{number}.json")
        stream = self._fs.create(aside, True)
        try:
            stream.write(bytearray(json.dumps(steps, indent=1).encode()))
        finally:
            stream.close()
        if not self._fs.rename(aside, target):
            raise ConfigError(f"the checkpoint {self._root} is used by another run at this moment")
