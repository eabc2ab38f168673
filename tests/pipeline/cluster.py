"""A standalone cluster from the installed PySpark (one master, two workers, on loopback), and what
to kill of it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.support import guard
from tests.support.wait import until

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
ENV = {
    **os.environ,
    "SPARK_LOCAL_IP": HOST,
    "SPARK_DAEMON_MEMORY": "256m",
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_NO_DAEMONIZE": "1",
}
SMALL = {  # for what runs here
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.driver.memory": "512m",
    "spark.driver.host": HOST,
    "spark.driver.bindAddress": HOST,
}


def on_cores(cores: int) -> dict[str, str]:
    """The settings of an application that gets 1, 2 or 4 cores: one or two of each worker."""
    return {
        **SMALL,
        "spark.executor.cores": str(max(1, cores // 2)),
        "spark.cores.max": str(cores),
    }


def kill_all(processes: list[psutil.Process]) -> None:
    """Kill processes and all that came from them. They are frozen first: a process that is started
    after the list was made would be left behind."""
    collected: list[psutil.Process] = []
    for process in processes:
        try:
            process.suspend()
            collected += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    for process in collected:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(collected, timeout=20)


class Cluster:
    """Use as a context manager; `url` is its master."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Cluster":
        try:
            master = self._start("master", "org.apache.spark.deploy.master.Master", "--port", "0")
            self.url = until(
                lambda: re.search(r"spark://[\d.]+:\d+", master.read_text()), 120, "the master"
            )[0]
            for number in range(2):
                place = str(self.directory / f"work-{number}")
                arguments = ("--cores", "2", "--memory", "700m", "--work-dir", place, self.url)
                self._start(f"worker-{number}", "org.apache.spark.deploy.worker.Worker", *arguments)
            until(lambda: master.read_text().count("Registering worker") == 2, 120, "two workers")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, name: str, kind: str, *arguments: str) -> Path:
        path = self.directory / f"{name}.log"
        program = str(Path(sys.executable).parent / "spark-class")
        command = [program, kind, "--host", HOST, "--webui-port", "0", *arguments]
        with path.open("wb") as log:
            self._processes.append(subprocess.Popen(command, env=ENV, stdout=log, stderr=log))
        guard.watch(self._processes[-1].pid)
        return path

    def executors(self) -> list[psutil.Process]:
        """The executors' JVMs."""
        return [
            process
            for process in self._descendants()
            if "CoarseGrainedExecutorBackend" in _command(process)
        ]

    def python_workers(self) -> list[psutil.Process]:
        """Python processes that run tasks on executors (or wait for some)."""
        return [
            process
            for process in self._descendants()
            if "penstock.pipeline.daemon" in _command(process)
        ]

    def _descendants(self) -> list[psutil.Process]:
        collected: list[psutil.Process] = []
        for process in self._processes:
            try:
                collected += psutil.Process(process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                continue
        return collected

    def __exit__(self, *failure: object) -> None:
        kill_all(
            [psutil.Process(process.pid) for process in self._processes if process.poll() is None]
        )
        for process in self._processes:
            process.wait()


class ClusterDriver:
    """A process that runs programs of `once_driver` on the cluster, in one JVM."""

    def __init__(self, master: str, log: Path, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.pipeline.once_driver", master]
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                env={**ENV, **environment},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        guard.watch(self._process.pid)

    def run(self, program: str, cores: int, **arguments: str) -> Any:
        """The program's result; RuntimeError with what it raised. It gives its cores back when the
        next one begins."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([program, cores, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._log.read_text()[-6000:]
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer.get("result")

    def release(self) -> None:
        """Give all cores back to the cluster."""
        self.run("", 0)

    def close(self) -> None:
        if self._process.poll() is None:
            kill_all([psutil.Process(self._process.pid)])
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
