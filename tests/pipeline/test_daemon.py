"""The daemon that Spark's Python workers come from, and how Spark reaches them."""

import importlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest

import penstock.pipeline
from penstock.pipeline.session import socket_settings

PROGRAM = """
import os, sys
from penstock.pipeline import daemon
{before}
os.execv = lambda *a: (print("plain", a[1][2:], *filter(daemon.PLAIN.__eq__, os.environ)),
                       sys.stdout.flush(), os._exit(0))
sys.argv[1:] = ["pyspark.sql.worker.create_data_source"]
import pyspark.daemon
zipped = "pyspark.zip" in pyspark.__file__
pyspark.daemon.manager = lambda: print("forks", zipped, daemon.threads(), flush=True)
daemon.main()
"""


def run(before: str = "") -> str:
    zipped = str(Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip")
    program = PROGRAM.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": zipped},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_workers_come_from_a_process_that_has_all_imported_and_no_threads_that_mind_a_fork() -> (
    None
):
    assert run("daemon.prefer_installed()") in ("forks False []", "forks False ['jemalloc_bg_thd']")


def test_with_another_thread_it_becomes_sparks_own_daemon() -> None:
    thread = (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    assert run(thread) == (
        "plain ['pyspark.daemon', 'pyspark.sql.worker.create_data_source'] PENSTOCK_PLAIN_DAEMON"
    )


def test_processes_that_spark_starts_use_the_installed_pyspark_and_a_sitecustomize_of_the_users(
    tmp_path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    library = Path(pyspark.__file__).parent / "python" / "lib"
    site = Path(penstock.pipeline.__file__).parent / "site"
    path = ":".join(map(str, (library / "pyspark.zip", site, tmp_path)))
    program = [sys.executable, "-c", "import pyspark; print(pyspark.__file__)", "-m"]
    for module, zipped in (("pyspark.sql.worker.x", False), ("other", True)):
        done = subprocess.run(
            [*program, module], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
        )
        mine, file = done.stdout.split()
        assert (mine, "pyspark.zip" in file) == ("mine", zipped)


def test_the_packages_session_is_a_function_although_there_is_a_module_of_that_name() -> None:
    assert callable(importlib.import_module("penstock.pipeline.session").build)
    assert callable(penstock.pipeline.session)


@pytest.mark.spark
def test_a_local_session_reaches_its_workers_over_unix_sockets(spark: Any) -> None:
    def families(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        open_files = [Path(f"/proc/self/fd/{number}") for number in range(3, 64)]
        names = set()
        for file in open_files:
            if file.is_socket():
                one = socket.socket(fileno=int(file.name))
                names.add(one.family.name)
                one.detach()  # the worker goes on with it
        yield pa.RecordBatch.from_pydict({"names": [",".join(sorted(names))]})

    (row,) = spark.range(1).coalesce(1).mapInArrow(families, "names STRING").collect()
    assert row.names == "AF_UNIX"


def test_a_directory_whose_sockets_would_have_too_long_names_is_left_alone() -> None:
    name = ".00000000-0000-0000-0000-000000000000.sock"
    for length in range(60, 80):
        directory = Path("/" + "d" * (length - 1))
        listener = socket.socket(socket.AF_UNIX)
        with listener, pytest.raises(OSError) as refused:
            listener.bind(str(directory / name))  # the directory is missing
        fits = "too long" not in str(refused.value)
        assert bool(socket_settings(directory)) == fits, length
