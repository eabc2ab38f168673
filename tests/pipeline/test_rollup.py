"""rollup and dlq-report: every number against a ledger of what was really done."""

import asyncio
import json
import random
import time
import urllib.request
import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from penstock.latency import ERROR, LAST, Latencies, bucket_of, seconds_of
from penstock.pipeline.jobs.rollup import rollup
from penstock.pipeline.link import TopicLink
from penstock.wire import frames


def call(url: str, method: str = "GET", body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read() or b"null")


class Ledger:
    """A queue, and what was done to it."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url, self.queue = url, f"q-{uuid.uuid4().hex[:8]}"
        self.counts: Counter[str] = Counter()
        self.took: list[float] = []  # seconds from push to ack, by the broker's own created time
        call(f"{url}/api/v1/configure", "POST", {"queue": self.queue, "options": {"retryDelay": 1, **options}})

    def push(self, count: int) -> None:
        payloads = [{"n": "x" * random.randint(1, 50)} for _ in range(count)]
        items = [{"queue": self.queue, "partition": f"p{i % 3}", "payload": p} for i, p in enumerate(payloads)]
        call(f"{self.url}/api/v1/push", "POST", {"items": items})
        self.counts["pushed"] += count
        self.counts["bytes"] += sum(len(json.dumps(p)) for p in payloads)

    def pop(self, group: str = "g", batch: int = 10) -> list[dict[str, Any]]:
        query = f"batch={batch}&partitions=10&wait=true&timeout=5000&consumerGroup={group}&subscriptionMode=all"
        return call(f"{self.url}/api/v1/pop/queue/{self.queue}?{query}")["messages"]

    def ack(
        self, messages: list[dict[str, Any]], status: str = "completed", error: str | None = None, group: str = "g"
    ) -> None:
        acks = [
            {"transactionId": m["transactionId"], "partitionId": m["partitionId"], "leaseId": m["leaseId"],
             "status": status, "error": error} for m in messages
        ]  # fmt: skip
        sent = time.time()
        call(f"{self.url}/api/v1/ack/batch", "POST", {"acknowledgments": acks, "consumerGroup": group})
        if status == "completed":
            middle = (sent + time.time()) / 2
            self.took += [middle - datetime.fromisoformat(m["createdAt"]).timestamp() for m in messages]
        self.counts[status] += len(messages)


def test_percentiles_are_within_the_stated_error_whatever_is_added_up() -> None:
    draw = random.Random(7)
    parts = [[draw.lognormvariate(-3, 2) for _ in range(500)] for _ in range(4)]
    together = Latencies()
    for part in parts:
        counted = Counter(map(bucket_of, part))
        together.add(counted.keys(), counted.values())
    every = sorted(value for part in parts for value in part)
    for percent in (1, 50, 95, 99, 100):
        truth = every[max(0, -(-len(every) * percent // 100) - 1)]
        assert together.percentile(percent) == pytest.approx(max(truth, 1e-4), rel=ERROR + 1e-9)
    assert together.total == 2000
    assert Latencies().percentile(50) is None
    assert (bucket_of(0), bucket_of(-1), bucket_of(1e9)) == (0, 0, LAST)
    assert all(bucket_of(seconds_of(bucket)) == bucket for bucket in range(1, LAST))


def test_the_database_sorts_into_the_same_buckets(server) -> None:
    draw = random.Random(3)
    latencies = sorted((round(10 ** draw.uniform(-4.3, 7), 6) for _ in range(400)), reverse=True)

    async def ask() -> tuple[list[int], int, list[int]]:
        connection = await asyncpg.connect(server.database_url, server_settings={"search_path": "penstock"})
        seconds = [timedelta(seconds=value) for value in latencies]
        one_by_one = await connection.fetch("SELECT latency_bucket(x) FROM unnest($1::interval[]) x", seconds)
        now = datetime.now(UTC)
        created = [now - took for took in seconds]
        first = await connection.fetchval("SELECT latency_bucket($1::timestamptz - $2)", now, created[-1])
        counts = await connection.fetchval("SELECT latency_counts($1, $2)", created, now)
        alone = await connection.fetchval("SELECT latency_counts($1, $2)", [now] * 3, now)
        assert alone is None
        await connection.close()
        return [row[0] for row in one_by_one], first, counts

    buckets, first, counts = asyncio.run(ask())
    assert buckets == [bucket_of(value) for value in latencies]
    spread = {first + place: count for place, count in enumerate(counts) if count}
    assert spread == dict(Counter(buckets))


@pytest.mark.spark
def test_a_rollup_agrees_with_the_ledger_and_a_second_run_changes_nothing(server, tcp, spark, tmp_path) -> None:
    ledger = Ledger(server.url, retryLimit=1)
    topic = f"t-{uuid.uuid4().hex[:8]}"
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch(topic, [b"abc", b"", b"defgh"]))
    ledger.push(40)
    ledger.ack(ledger.pop(batch=20))
    ledger.ack(ledger.pop(batch=6), "retry")
    ledger.push(10)
    failed = ledger.pop(batch=4)
    ledger.ack(failed, "failed", "boom")
    waiting = {message["transactionId"] for message in failed}
    while waiting:  # each comes once more, is given up, and everything else that comes with it is done
        popped = ledger.pop(batch=5)
        again = [message for message in popped if message["transactionId"] in waiting]
        ledger.ack(again, "failed", "boom")
        ledger.ack([message for message in popped if message not in again])
        waiting -= {message["transactionId"] for message in again}
    acked = ledger.counts["completed"]
    since = datetime.now(UTC) - timedelta(minutes=10)
    until = datetime.now(UTC) + timedelta(minutes=1)
    where = {"database": server.database_url, "broker": tcp, "since": since, "until": until}
    done = rollup(spark, **where)
    assert done.queues >= 1
    assert done.topics >= 1
    query = f"from={since:%FT%TZ}&to={until:%FT%TZ}&interval=day"
    ask = f"{server.url}/api/v1/analytics?{query}"
    (of_queue,) = [p for p in call(f"{ask}&queue={ledger.queue}")["points"] if p["kind"] == "queue"]
    assert (of_queue["pushed"], of_queue["bytes"]) == (50, ledger.counts["bytes"])
    first = call(f"{ask}&queue={ledger.queue}&group=g")
    (of_group,) = first["points"]
    assert (of_group["queue"], of_group["group"], of_group["topic"]) == (ledger.queue, "g", None)
    assert {name: of_group[name] for name in ("acked", "failed", "retried", "deadLetters", "dropped", "lag")} == {
        "acked": acked, "failed": 8, "retried": 6 + 4, "deadLetters": 4, "dropped": 0, "lag": 50 - acked - 4,
    }  # fmt: skip
    took = sorted(ledger.took)
    assert of_group["latency"]["count"] == acked == len(took)
    for percent in (50, 95, 99):
        truth = took[-(-len(took) * percent // 100) - 1] * 1000
        assert of_group["latency"][f"p{percent}"] == pytest.approx(truth, rel=ERROR, abs=60)  # the way of the answer
    (of_topic,) = call(f"{ask}&topic={topic}")["points"]
    assert (of_topic["pushed"], of_topic["bytes"], of_topic["latency"], of_topic["lag"]) == (3, 8, None, None)

    again = rollup(spark, **where)
    assert again.rows == done.rows
    assert call(f"{ask}&queue={ledger.queue}&group=g") == first
    call(f"{server.url}/api/v1/queues/{ledger.queue}/clear", "DELETE")  # its bytes can be read no more
    rollup(spark, queues=[ledger.queue], **{**where, "broker": None})
    (kept,) = [p for p in call(f"{ask}&queue={ledger.queue}")["points"] if p["kind"] == "queue"]
    assert (kept["pushed"], kept["bytes"]) == (50, ledger.counts["bytes"])
    assert call(f"{ask}&queue={ledger.queue}&group=g")["points"][0]["lag"] == 0
