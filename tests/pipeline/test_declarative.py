"""examples/declarative: a project for `spark-pipelines`, run twice by the Connect server of the
session that all tests share. Its catalog lasts over both runs, as one of a cluster does.
"""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from penstock.net.topic_link import TopicLink
from penstock.protocol import frames
from tests.pipeline.support import batch_rows
from tests.pipeline.test_connect import connect_address

PROJECT = Path(__file__).parents[2] / "examples" / "declarative"


@pytest.mark.spark
def test_a_declarative_pipeline_writes_each_order_once_over_two_runs(
    spark: Any, tcp: str, tmp_path: Path
) -> None:
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project)
    spec = project / "spark-pipeline.yml"
    text = spec.read_text().replace("/tmp/penstock-declarative", str(tmp_path / "storage"))
    text = text.replace("127.0.0.1:12345", tcp).replace("orders: orders", f"orders: {topic}")
    spec.write_text(text + f"database: shop_{topic.replace('-', '_')}\n")
    database = f"shop_{topic.replace('-', '_')}"
    spark.sql(f"CREATE DATABASE {database} LOCATION '{tmp_path}/warehouse'")
    environment = {name: value for name, value in os.environ.items() if name[:5] != "SPARK"}
    environment["SPARK_REMOTE"] = connect_address(spark)

    def run(first: int, last: int) -> None:
        orders = [{"id": i, "customer": f"c{i % 2}", "total": 60.0 * i} for i in range(first, last)]
        with TopicLink(tcp, 20) as link:
            link.append(frames.produce_batch(topic, [json.dumps(o).encode() for o in orders]))
        done = subprocess.run(
            [sys.executable, "-m", "pyspark.pipelines.cli", "run", "--spec", str(spec)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        run(0, 3)
        run(3, 5)
        large = [
            json.loads(row["payload"]) for row in batch_rows(broker=tcp, topic=f"{topic}-large")
        ]
        assert sorted(order["id"] for order in large) == [2, 3, 4]
        assert spark.table(f"{database}.orders").count() == 5
        sums = {
            row["customer"]: row["total"] for row in spark.table(f"{database}.customers").collect()
        }
        assert sums == {"c0": 360.0, "c1": 240.0}
    finally:
        spark.sql(f"DROP DATABASE {database} CASCADE")
