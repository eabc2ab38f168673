"""The same pipeline file, unchanged, on a real standalone cluster: one master, two workers, on loopback."""

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.pipeline.link import TopicLink
from penstock.wire import frames
from tests.pipeline.support import batch_rows
from tests.support.wait import until

HOST = "127.0.0.1"


class Cluster:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._env = {
            **os.environ,
            "SPARK_LOCAL_IP": HOST,
            "SPARK_DAEMON_MEMORY": "256m",
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_NO_DAEMONIZE": "1",
        }

    def __enter__(self) -> "Cluster":
        master = self._start("master", "org.apache.spark.deploy.master.Master", "--port", "0")
        found = until(lambda: re.search(r"spark://[\d.]+:\d+", master.read_text()), 120, "the master")
        self.url = found[0]
        for number in range(2):
            place = str(self._directory / f"work-{number}")
            arguments = ("--cores", "1", "--memory", "700m", "--work-dir", place, self.url)
            self._start(f"worker-{number}", "org.apache.spark.deploy.worker.Worker", *arguments)
        until(lambda: master.read_text().count("Registering worker") == 2, 120, "two workers")
        return self

    def _start(self, name: str, kind: str, *arguments: str) -> Path:
        path = self._directory / f"{name}.log"
        command = [
            str(Path(sys.executable).parent / "spark-class"),
            kind,
            "--host",
            HOST,
            "--webui-port",
            "0",
            *arguments,
        ]
        with path.open("wb") as log:
            self._processes.append(subprocess.Popen(command, env=self._env, stdout=log, stderr=log))
        return path

    def __exit__(self, *failure: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as running:
        yield running


@pytest.mark.spark
def test_a_pipeline_file_runs_on_a_cluster_as_it_is(server, tcp, cluster, tmp_path) -> None:
    tag = uuid.uuid4().hex[:8]
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch(f"orders-{tag}", [b'{"id": %d}' % i for i in range(200)]))
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"""
name: cluster-{tag}
sources:
  orders: {{topic: orders-{tag}, format: json, schema: "id BIGINT", options: {{minPartitions: 4}}}}
steps:
  - {{name: even, sql: "SELECT id, id * 2 AS twice FROM orders WHERE id % 2 = 0"}}
sink: {{topic: even-{tag}}}
checkpoint: {tmp_path}/checkpoint
broker: {tcp}
url: {server.url}
spark: {{spark.executor.memory: 512m, spark.executor.cores: 1, spark.driver.memory: 512m}}
""")
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "pipeline", "run", str(file), "--master", cluster.url],
        env={**os.environ, "SPARK_LOCAL_IP": HOST},
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["state"], last["rows"], last["master"]) == ("finished", 200, cluster.url)
    found = [json.loads(row["payload"]) for row in batch_rows(broker=tcp, topic=f"even-{tag}")]
    assert sorted(row["twice"] for row in found) == [4 * i for i in range(100)]
    assert any((tmp_path / f"work-{number}").rglob("stderr") for number in range(2))  # executors ran there
