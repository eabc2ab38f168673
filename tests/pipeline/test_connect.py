"""`--master sc://...`: a pipeline file on a real Spark Connect server. The tests' own session is
the server as well: a JVM of its own would cost a minute of this machine."""

import importlib.util
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, Unavailable
from penstock.net.topic_link import TopicLink
from penstock.pipeline.session import build
from penstock.protocol import frames
from tests.pipeline.support import batch_rows


def test_without_a_client_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"pip install 'penstock\[connect\]'"):
        build("x", "sc://127.0.0.1:1")


def test_settings_of_the_server_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"spark\.executor\.memory belongs to the Spark Connect server"
    ):
        build("x", "sc://127.0.0.1:1", {"spark.executor.memory": "1g"})


def connect_address(spark: Any) -> str:
    """Where the session of these tests answers Spark Connect."""
    service = spark._jvm.java.lang.Class.forName(
        "org.apache.spark.sql.connect.service.SparkConnectService$"
    )
    return f"sc://127.0.0.1:{service.getField('MODULE$').get(None).localPort()}"


@pytest.mark.spark
def test_a_pipeline_file_runs_on_a_connect_server_as_it_is(
    server, tcp, spark, tmp_path: Path
) -> None:
    tag = uuid.uuid4().hex[:8]
    connect = connect_address(spark)
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch(f"orders-{tag}", [b'{"id": %d}' % i for i in range(200)]))

    def run(name: str, step: str, *more: str) -> subprocess.Popen[str]:
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"""
name: {name}-{tag}
sources:
  orders: {{topic: orders-{tag}, format: json, schema: "id BIGINT"}}
steps:
  - {{name: made, sql: "{step}"}}
sink: {{topic: {name}-{tag}}}
checkpoint: {tmp_path}/{name}
broker: {tcp}
url: {server.url}
""")
        command = [
            sys.executable,
            "-m",
            "penstock",
            "pipeline",
            "run",
            str(file),
            "--master",
            connect,
            *more,
        ]
        env = {key: value for key, value in os.environ.items() if not key.startswith("SPARK")}
        return subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    with (
        run("made", "SELECT id, id * 2 AS twice FROM orders WHERE id % 2 = 0") as good,
        run(
            "sums", "SELECT id % 2 AS odd, count(*) AS n FROM orders GROUP BY id % 2", "--no-check"
        ) as shuffled,
    ):
        out, err = good.communicate(timeout=300)
        _, refused = shuffled.communicate(timeout=300)
    assert good.returncode == 0, out + err
    last = json.loads(out.splitlines()[-1])
    assert (last["state"], last["rows"], last["master"]) == ("finished", 200, connect)
    records = [
        json.loads(row["payload"])["twice"] for row in batch_rows(broker=tcp, topic=f"made-{tag}")
    ]
    assert records == [4 * i for i in range(100)]
    assert shuffled.returncode == 1
    assert "in no fixed order" in " ".join(refused.split())
