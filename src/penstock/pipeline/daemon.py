"""The process that forks the Python workers of Spark's tasks, with everything they need imported
beforehand.

Spark's own daemon imports nothing, so that no thread exists when it forks; every worker then
imports PySpark, pyarrow and us, from a zip file that Python compiles each time: a second of
CPU per worker. This one takes the installed PySpark instead of the same version's zip and imports
before it forks (`spark.python.daemon.module` names it). A thread that happens to hold a lock at a
fork would leave the worker waiting for ever, so no library may start one: numpy's BLAS is set not
to, jemalloc's (in pyarrow) is made for forks, and should there be another, this process becomes
Spark's own daemon instead. Workers that plan a read or a write always come from Spark's daemon;
`site/` is for those.
"""

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ZIP = "pyspark.zip"
TASKS = "pyspark.worker"
PLAIN = "PENSTOCK_PLAIN_DAEMON"  # set in the environment of Spark's own daemon: do not replace it
# Takes part in forks: it holds no lock then, and is recreated in the child.
HARMLESS = {"jemalloc_bg_thd"}


def prefer_installed() -> None:
    """Put the zip behind the installed PySpark, if there is one: the same code, but compiled."""
    from importlib.machinery import PathFinder

    others = [entry for entry in sys.path if not entry.endswith(ZIP)]
    if PathFinder.find_spec("pyspark", others) is not None:
        sys.path.sort(key=lambda entry: entry.endswith(ZIP))


def preload(worker: str) -> None:
    """Import what a worker of this kind imports, and our sources and sinks."""
    import importlib

    importlib.import_module(worker)
    if worker == TASKS:  # pyarrow imports it for columns when it is there; plans have none
        importlib.import_module("pandas")
    with _without("polars"):
        import adbc_driver_postgresql.dbapi  # noqa: F401

    import penstock.pipeline.sinks.queue
    import penstock.pipeline.sinks.topic
    import penstock.pipeline.sources.queue
    import penstock.pipeline.sources.topic  # noqa: F401


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
    """Hide a module from imports: ADBC imports polars if it can, which starts threads, and does not
    need it beside pyarrow. Workers can still import it.
    """
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


def threads() -> list[str]:
    """Return the names of all other threads, including those of C libraries."""
    own = str(threading.get_native_id())
    tasks = Path("/proc/self/task").glob("*")  # none where the directory does not exist
    return [(task / "comm").read_text().strip() for task in tasks if task.name != own]


def main() -> None:
    """Fork workers for Spark, or become its own daemon if a thread forbids that."""
    plain = [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]]
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    prefer_installed()
    with contextlib.redirect_stdout(sys.stderr):  # Spark reads a port from it
        given = "".join(sys.argv[1:2])
        preload(given if given.startswith("pyspark") else TASKS)
    if not HARMLESS.issuperset(threads()):
        os.environ[PLAIN] = "1"
        os.execv(sys.executable, plain)
    from pyspark.daemon import manager

    # Spark collects garbage after every task and plan: freezing the imported modules saves 25 ms.
    gc.collect()
    gc.freeze()
    manager()


if __name__ == "__main__":
    main()
