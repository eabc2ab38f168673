"""The same pipeline file, unchanged, on a real standalone cluster (a master, two workers, on
loopback), and Ctrl-C.
"""

import json
import signal
import subprocess
import sys
import uuid
from typing import Any

import pytest

from penstock.net.topic_link import TopicLink
from penstock.protocol import frames
from tests.pipeline.cluster import ENV, on_cores
from tests.pipeline.support import batch_rows
from tests.pipeline.test_lake import grow
from tests.support import guard


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
trigger: 200 milliseconds
checkpoint: {tmp_path}/checkpoint
broker: {tcp}
url: {server.url}
spark: {json.dumps(on_cores(2))}
""")
    command = [
        sys.executable,
        "-m",
        "penstock",
        "pipeline",
        "run",
        str(file),
        "--master",
        cluster.url,
    ]
    with (tmp_path / "errors").open("w") as errors:
        run = subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=errors, text=True)
    guard.watch(run.pid)
    reports: list[dict[str, Any]] = []
    assert run.stdout is not None
    for line in run.stdout:
        reports.append(json.loads(line))
        if reports[-1]["rows"] == 200 and reports[-2]["rows"] < 200:
            run.send_signal(signal.SIGINT)  # Ctrl-C: it ends after its batch, and well
    assert run.wait(60) == 0, (tmp_path / "errors").read_text()
    last = reports[-1]
    assert (last["state"], last["rows"], last["master"]) == ("finished", 200, cluster.url)
    assert "stopping after this batch" in (tmp_path / "errors").read_text()
    found = [json.loads(row["payload"]) for row in batch_rows(broker=tcp, topic=f"even-{tag}")]
    assert sorted(row["twice"] for row in found) == [4 * i for i in range(100)]
    assert any(
        (cluster.directory / f"work-{number}").rglob("stderr") for number in range(2)
    )  # executors ran there


@pytest.mark.spark
def test_a_cluster_whose_machines_know_no_bucket_archives_to_one_and_reads_it(
    driver, bucket, write_topic, tmp_path
) -> None:
    """The driver's variables reach the tasks; no jar of an S3 connector is there."""
    topics, checkpoint = str(tmp_path / "topics"), str(tmp_path / "checkpoint")
    grow(write_topic, tmp_path / "topics", range(120))
    answers = driver.run("bucket", 2, lake=bucket, topics=topics, checkpoint=checkpoint)
    everything = list(range(120))
    assert answers == [120, everything, everything, 120]
