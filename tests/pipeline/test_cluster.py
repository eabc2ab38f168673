"""The same pipeline file, unchanged, on a real standalone cluster: one master, two workers, on loopback."""

import json
import subprocess
import sys
import uuid

import pytest

from penstock.pipeline.link import TopicLink
from penstock.wire import frames
from tests.pipeline.cluster import ENV, SMALL
from tests.pipeline.support import batch_rows


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
spark: {json.dumps(SMALL)}
""")
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "pipeline", "run", str(file), "--master", cluster.url],
        env=ENV,
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
    assert any((cluster.directory / f"work-{number}").rglob("stderr") for number in range(2))  # executors ran there
