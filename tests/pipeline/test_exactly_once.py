"""Exactly once to the end: what was written stays written once, whether or not its messages still
exist, on however few cores a batch is continued, and though sums of floats differ.
"""

import uuid
from typing import Any

import pytest

from penstock.net.broker_caller import BrokerCaller
from penstock.net.topic_link import TopicLink
from tests.conftest import fresh_database
from tests.pipeline.once_driver import PER_TASK, TASKS
from tests.pipeline.support import batch_rows
from tests.pipeline.test_changed_rows import RECORDS, Flow
from tests.support.broker import BrokerProcess
from tests.support.wait import until

pytestmark = pytest.mark.spark


@pytest.fixture
def flow(spark, server, tcp, tmp_path) -> Flow:
    return Flow(spark, server, tcp, tmp_path)


@pytest.fixture
def tag() -> str:
    return uuid.uuid4().hex[:8]


class Consumer:
    """Consumes a queue whose messages are deleted as soon as they are acknowledged."""

    def __init__(self, url: str, queue: str) -> None:
        self._caller = BrokerCaller(url, patience=30)
        self._queue = queue
        options = {"completedRetentionSeconds": 1, "retentionEnabled": True, "leaseTime": 300}
        self._caller.json("POST", "/api/v1/configure", {"queue": queue, "options": options})
        self.payloads: list[Any] = []

    def consume_all(self) -> None:
        """Consume what is there, and wait until retention has deleted it."""
        until(self._is_empty, 60, "retention")

    def _is_empty(self) -> bool:
        path = f"/api/v1/pop/queue/{self._queue}?batch=1000&partitions=100"
        if popped := self._caller.json("GET", path):
            self.payloads += [message["data"] for message in popped["messages"]]
            acks = [
                {name: message[name] for name in ("transactionId", "partitionId", "leaseId")}
                for message in popped["messages"]
            ]
            self._caller.json("POST", "/api/v1/ack/batch", {"acknowledgments": acks})
        return not self._caller.json("GET", f"/api/v1/messages?queue={self._queue}")["messages"]


def test_rows_that_were_consumed_and_deleted_are_not_written_again(
    spark, postgres, scratch, tmp_path
) -> None:
    settings = {"queues__retention_interval": "200ms"}
    url = fresh_database(postgres)
    with BrokerProcess(scratch / "data", database_url=url, **settings) as server:
        server.database_url = url
        host, port = server.tcp
        flow = Flow(spark, server, f"{host}:{port}", tmp_path)
        consumer = Consumer(server.url, f"out-{flow.tag}")
        flow.append(0, RECORDS)
        value, cut = "CAST(payload AS STRING)", {"minPartitions": "4"}
        broken = f"IF(offset = {RECORDS - 1}, raise_error('broken step'), {value}) AS payload"
        assert "broken step" in str(flow.run("queue", broken, **cut))
        consumer.consume_all()
        assert 0 < len(consumer.payloads) < RECORDS
        assert flow.run("queue", f"{value} AS payload", **cut) is None  # tasks that are done
        consumer.consume_all()
        (flow.directory / "queue" / "commits" / "0").unlink()  # the driver was lost after its batch
        (flow.directory / "queue" / "commits" / ".0.crc").unlink(missing_ok=True)
        assert flow.run("queue", f"{value} AS payload", **cut) is None
        consumer.consume_all()
        assert sorted(consumer.payloads) == list(range(RECORDS))


@pytest.mark.parametrize("kind", ["topic", "queue"])
def test_a_batch_goes_on_though_values_differ_from_run_to_run(flow: Flow, kind: str) -> None:
    """Rows are known by the columns of orderBy."""
    flow.append(0, RECORDS)
    cut = {"minPartitions": "4"}
    key, last = "CAST(offset AS INT) AS k", RECORDS - 1
    broken = f"IF(offset = {last}, raise_error('broken step'), '1') AS payload"
    flow.order = "k"
    assert "broken step" in str(flow.run(kind, key, broken, **cut))
    assert 0 < len(flow.written(kind)) < RECORDS
    for text in ("2", "3"):
        assert flow.run(kind, key, f"'{text}' AS payload", **cut) is None
        assert len(written := flow.written(kind)) == RECORDS
        (flow.directory / kind / "commits" / "0").unlink()  # the driver was lost after its batch
        (flow.directory / kind / "commits" / ".0.crc").unlink(missing_ok=True)
    assert set(written) == {"1", "2"}
    refused = flow.run(kind, "CAST(offset AS INT) + 1 AS k", "'4' AS payload", **cut)
    assert "other rows" in str(refused)


def test_ties_are_written_in_the_same_order_whatever_order_they_come_in(spark, tcp, tag) -> None:
    for run, texts in enumerate(("bca", "acb")):
        rows = spark.createDataFrame([(1, text) for text in texts], "k INT, payload STRING")
        sink = {"topic": f"ties-{tag}", "broker": tcp, "appId": f"{tag}-{run}", "orderBy": "k"}
        rows.coalesce(1).write.format("penstock").mode("append").options(**sink).save()
    assert [row["payload"] for row in batch_rows(broker=tcp, topic=f"ties-{tag}")] == [
        *(b"a", b"b", b"c"),
        *(b"a", b"b", b"c"),
    ]


def test_a_batch_that_was_begun_on_two_cores_is_continued_on_one(driver, tcp, tag) -> None:
    """The first task has not written, and would wait for three others on the only core."""
    with pytest.raises(RuntimeError, match="broken step"):
        driver.run("begin", 2, broker=tcp, tag=tag)
    with TopicLink(tcp, 20) as link:
        assert link.info(f"out-{tag}").next_offset == (TASKS - 1) * PER_TASK
    driver.run("go on", 1, broker=tcp, tag=tag)
    written = [int(row["payload"]) for row in batch_rows(broker=tcp, topic=f"out-{tag}")]
    assert sorted(written) == list(range(TASKS * PER_TASK))


def test_sums_of_floats_are_written_once_though_they_differ(driver, tcp, tag) -> None:
    different = driver.run("sums", 2, broker=tcp, tag=tag)
    assert len(batch_rows(broker=tcp, topic=f"out-{tag}")) == 5
    assert different > 1  # what it wrote differed
