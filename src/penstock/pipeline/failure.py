"""Describe a failure in one sentence, without the stacks of Spark and Python.

Spark reports an exception of a Python process as a traceback, unless SPARK_HIDE_TRACEBACK is set in
that process. A process sets it just before it raises a `PenstockError` and ends. Other exceptions
keep their tracebacks.
"""

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from penstock.errors import ConfigError, PenstockError

T = TypeVar("T")

FULL = "No space left on device"
WRITING = re.compile(r"writing rows to (?:file:)?(\S+?)\.?\s")
HIDE = "SPARK_HIDE_TRACEBACK"
WORKERS = ("pyspark.", "penstock.pipeline.daemon")  # modules that Spark starts Python with
INTERFACE = (
    *("schema", "reader", "streamReader", "writer", "streamWriter"),
    *("partitions", "read", "initialOffset", "latestOffset", "reportLatestOffset"),
    *("getDefaultReadLimit", "prepareForTriggerAvailableNow", "write", "commit", "abort"),
)


class PipelineFailed(PenstockError):
    """A query ended with an error; the text is the cause."""


def step_failed(name: str, error: Exception) -> ConfigError:
    """Describe why a step could not be built, with the line of the user's function that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if "site-packages" not in frame.filename][-1:]
    users = [frame for frame in last if "/penstock/pipeline/" not in frame.filename]
    place = "".join(f" ({frame.filename}, line {frame.lineno})" for frame in users)
    kind = "" if type(error).__module__.startswith("pyspark") else f"{type(error).__name__}: "
    return ConfigError(f"step {name}: {kind}{cause(error)}{place}")


def _chain(error: BaseException | None) -> Iterator[str]:
    """Yield Spark's message and those of its causes, which have the reason of a failed write."""
    for _ in range(8):
        if error is None:
            return
        yield str(error)
        error = getattr(error, "_cause", None) or error.__cause__


def cause(error: BaseException) -> str:
    """Return the innermost reason, in a line or two: a task's Python error, or Spark's own message.
    A `PenstockError` says it already, and may name the query that failed.
    """
    if isinstance(error, PenstockError):
        return str(error)
    text = "\n".join(_chain(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("penstock.")]
    if ours:
        return ours[-1].partition(": ")[2] or ours[-1]
    if FULL in text:
        place = "the checkpoint, the target or Spark's own files (spark.local.dir)"
        if target := WRITING.search(text):
            place = target[1]
        return f"the disk is full: no space is left for {place}. Free some and run it again"
    raised = [line for line in lines if "Error: " in line or "Exception: " in line]
    python = [line for line in raised if not line.startswith("at ")]
    reasons = [type(error).__name__, *lines[:1], *python]
    return reasons[-1].removeprefix("Caused by: ")[:2000]


def plain_errors(kind: type[T]) -> type[T]:
    """Decorate a class that Spark calls: errors of its methods are shown without a traceback."""
    for name in INTERFACE:
        if (method := vars(kind).get(name)) is not None:
            setattr(kind, name, _plain(method))
    return kind


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        try:
            result = method(*args, **options)
        except PenstockError:
            _hide_traceback()
            raise
        return _each(result) if isinstance(result, Iterator) else result

    return call


def _each(results: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from results
    except PenstockError:
        _hide_traceback()
        raise


def _hide_traceback() -> None:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name.startswith(WORKERS):
        os.environ[HIDE] = "1"
