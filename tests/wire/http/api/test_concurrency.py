"""Requests side by side: none waits for a large one, each gets its own results."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.support.broker import BrokerProcess

PROBE = """
import http.client, psutil, select, sys, time
connection, broker, longest = http.client.HTTPConnection(sys.argv[1]), psutil.Process(int(sys.argv[2])), 0.0
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    began, used = time.monotonic(), sum(broker.cpu_times()[:2])
    connection.request("GET", "/health/live")
    assert connection.getresponse().read() is not None
    waited = time.monotonic() - began
    if waited > longest:
        longest = max(longest, min(waited, sum(broker.cpu_times()[:2]) - used))
print(longest)
"""


@contextmanager
def longest_wait(broker: BrokerProcess) -> Iterator[list[float]]:
    """How long /health/live waited at most while the block ran; asked by a process that does
    nothing else. Only the time that the broker worked counts: the machine may be busy with others.
    """
    assert broker.process is not None
    address = broker.url.removeprefix("http://")
    with subprocess.Popen(
        [sys.executable, "-c", PROBE, address, str(broker.process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as probe:
        assert probe.stdout is not None
        assert probe.stdin is not None
        waits: list[float] = []
        try:
            assert probe.stdout.readline() == "ready\n"
            yield waits
        finally:
            probe.stdin.close()
        waits.append(float(probe.stdout.readline()))


def test_a_request_with_many_items_keeps_nobody_waiting_and_one_with_too_many_is_refused(
    broker, api, queue
):
    """A million items took eight seconds, during which nothing else was answered."""
    item = b'{"queue":"%b","payload":{"n":1}}' % queue.encode()
    operation = b'{"type":"push","items":[%b]}' % item
    ack = b'{"transactionId":"t","partitionId":"p"}'
    million = {
        "push": b'{"items":[%b]}' % b",".join([item] * 1_000_000),
        "ack/batch": b'{"acknowledgments":[%b]}' % b",".join([ack] * 1_000_000),
        "transaction": b'{"operations":[%b]}' % b",".join([operation] * 500_000),
    }
    with longest_wait(broker) as waits:
        for path, body in million.items():
            assert "at most 10000 (queues.max_items)" in api.post(path, body, 413)["error"]
        items = [{"queue": queue, "payload": {"queue": n}} for n in range(10_001)]
        api.post("push", {"items": items}, 413)
        stored = api.post("push", {"items": items[:10_000]}, 201)
        assert [result["index"] for result in stored] == list(range(10_000))
        assert {result["status"] for result in stored} == {"queued"}
        messages = api.pop(queue, batch=10_000)
        assert [message["data"]["queue"] for message in messages] == list(range(10_000))
        acked = api.ack(*messages)
        assert [result["index"] for result in acked] == list(range(10_000))
        assert all(result["success"] for result in acked)
        pushes = [{"type": "push", "queue": queue, "payload": n} for n in range(5_000)]
        assert len(api.post("transaction", {"operations": pushes})["results"]) == 5_000
        assert api.post("push", {"items": items[:5000], "bufferMs": 10}, 201)["pushed"]
    assert waits[0] < 2.0, waits


def test_concurrent_requests_get_their_own_results(broker, queue):
    """They are merged into shared calls behind the scenes; a malformed one among them fails alone."""
    failures: list[str] = []

    def work(number: int) -> None:
        with httpx.Client(base_url=broker.url, timeout=30) as client:
            for turn in range(10):
                names = [f"{number}-{turn}-{item}" for item in range(3)]
                items = [{"queue": queue, "payload": name, "transactionId": name} for name in names]
                answer = client.post("/api/v1/push", json={"items": items})
                if [
                    row["transaction_id"] for row in answer.json()
                ] != names or answer.status_code != 201:
                    failures.append(answer.text)
                if [row["index"] for row in answer.json()] != [0, 1, 2]:
                    failures.append(answer.text)
                bad = client.post(
                    "/api/v1/push", json={"items": [{"queue": queue, "traceId": "bad"}]}
                )
                if bad.status_code != 400:
                    failures.append(bad.text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
