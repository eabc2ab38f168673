"""Errors of sources and sinks reach the user as one sentence.

Spark hands on what a Python process raised as a traceback with the text in its last line, unless
SPARK_HIDE_TRACEBACK is set there. A `PenstockError` says what is wrong and what to do, and where
in our code it was noticed helps nobody; so the process that is about to raise one sets the
variable. It ends with the error. Any other exception keeps its traceback.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from penstock.errors import PenstockError

T = TypeVar("T")

HIDE = "SPARK_HIDE_TRACEBACK"
WORKERS = ("pyspark.", "penstock.pipeline.daemon")  # modules that Spark starts Python with
INTERFACE = (
    *("schema", "reader", "streamReader", "writer", "streamWriter"),
    *("partitions", "read", "initialOffset", "latestOffset", "reportLatestOffset"),
    *("getDefaultReadLimit", "prepareForTriggerAvailableNow", "write", "commit", "abort"),
)


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
