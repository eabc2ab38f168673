"""`--master sc://...`: a pipeline file on a real Spark Connect server.

Needs `penstock[connect]`, which brings gRPC; without it there is only the error to see.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.errors import ConfigError, Unavailable
from penstock.pipeline.link import TopicLink
from penstock.pipeline.session import build
from penstock.wire import frames
from tests.pipeline.cluster import ENV, HOST, die_with_parent, kill_all
from tests.pipeline.support import batch_rows
from tests.support.wait import until

CLIENT = importlib.util.find_spec("grpc") is not None


@pytest.mark.skipif(CLIENT, reason="a Spark Connect client is installed")
def test_without_a_client_the_error_says_what_to_install() -> None:
    with pytest.raises(Unavailable, match=r"pip install 'penstock\[connect\]'"):
        build("x", "sc://127.0.0.1:1")


def test_settings_of_the_server_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"spark\.executor\.memory belongs to the Spark Connect server"):
        build("x", "sc://127.0.0.1:1", {"spark.executor.memory": "1g"})


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "spark-submit"), "--master", "local[2]"]
    for setting in (f"spark.connect.grpc.binding.port={port}", "spark.ui.enabled=false", f"spark.driver.host={HOST}"):
        command += ["--conf", setting]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, env={**ENV, "SPARK_DAEMON_MEMORY": "1g"}, stdout=log, stderr=log, preexec_fn=die_with_parent
        )

    def answers() -> bool:
        assert server.poll() is None, (tmp_path / "server.log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex((HOST, port)) == 0

    try:
        until(answers, 180, "the Spark Connect server")
        yield f"sc://{HOST}:{port}"
    finally:
        if server.poll() is None:
            kill_all([psutil.Process(server.pid)])
        server.wait()


@pytest.mark.skipif(not CLIENT, reason="needs penstock[connect]")
@pytest.mark.spark
def test_a_pipeline_file_runs_on_a_connect_server_as_it_is(server, tcp, connect, tmp_path) -> None:
    tag = uuid.uuid4().hex[:8]
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch(f"orders-{tag}", [b'{"id": %d}' % i for i in range(200)]))
    file = tmp_path / "pipeline.yaml"

    def run(step: str) -> subprocess.CompletedProcess[str]:
        file.write_text(f"""
name: connect-{tag}
sources:
  orders: {{topic: orders-{tag}, format: json, schema: "id BIGINT"}}
steps:
  - {{name: made, sql: "{step}"}}
sink: {{topic: made-{tag}}}
checkpoint: {tmp_path}/checkpoint{len(step)}
broker: {tcp}
url: {server.url}
""")
        command = [sys.executable, "-m", "penstock", "pipeline", "run", str(file), "--master", connect]
        env = {key: value for key, value in os.environ.items() if not key.startswith("SPARK")}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)

    done = run("SELECT id, id * 2 AS twice FROM orders WHERE id % 2 = 0")
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["state"], last["rows"], last["master"]) == ("finished", 200, connect)
    found = [json.loads(row["payload"])["twice"] for row in batch_rows(broker=tcp, topic=f"made-{tag}")]
    assert found == [4 * i for i in range(100)]
