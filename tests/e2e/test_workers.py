"""Several processes behind one port: from outside nobody can tell."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import fresh_database
from tests.support.broker import ServeProcess
from tests.support.wait import until


@pytest.fixture(scope="module")
def broker(postgres, tmp_path_factory):
    directory = tmp_path_factory.mktemp("workers")
    with ServeProcess(
        directory,
        database_url=fresh_database(postgres),
        workers=3,
        queues__retention_interval="200ms",
    ) as process:
        yield process


def each_on_a_fresh_connection(
    broker: ServeProcess, method: str, path: str, times: int = 24, **more
):
    """The kernel spreads connections, not requests: this many reach every process."""
    with httpx.Client(headers={"Connection": "close"}, verify=False) as client:
        return [client.request(method, broker.url + path, **more) for _ in range(times)]


def worker_processes(broker: ServeProcess) -> list[int]:
    return [int(pid) for pid in re.findall(r"worker \d is ready \(process (\d+)\)", broker.log)]


def test_topics_are_served_whichever_process_accepts_the_connection(broker):
    answers = each_on_a_fresh_connection(broker, "POST", "/topics/t/produce", json={"payload": "x"})
    assert [answer.status_code for answer in answers] == [201] * 24
    assert sorted(answer.json()["offset"] for answer in answers) == list(range(24))
    for answer in each_on_a_fresh_connection(broker, "GET", "/topics/t/next_offset"):
        assert answer.json() == {"topic": "t", "next_offset": 24}


def test_health_metrics_and_documents_are_the_same_from_every_process(broker):
    for answer in each_on_a_fresh_connection(broker, "GET", "/health"):
        assert set(answer.json()["listeners"]) == {"HTTP", "TCP", "Kafka", "WebSocket"}
    documents = each_on_a_fresh_connection(broker, "GET", "/openapi.json")
    assert len({answer.content for answer in documents}) == 1
    assert {
        answer.status_code for answer in each_on_a_fresh_connection(broker, "GET", "/nowhere")
    } == {404}
    items = [{"queue": "counted", "payload": number} for number in range(7)]
    each_on_a_fresh_connection(broker, "POST", "/api/v1/push", 9, json={"items": items})

    def depths() -> set[float]:
        scrapes = each_on_a_fresh_connection(broker, "GET", "/metrics.json", 9)
        metrics = [answer.json()["metrics"] for answer in scrapes]
        return {one.get('penstock_queue_waiting{queue="counted"}', 0.0) for one in metrics}

    # not added up over processes; what each of them did is
    until(lambda: depths() == {63.0}, 30, "the scrape is not from the cache")
    metrics = httpx.get(f"{broker.url}/metrics.json").json()["metrics"]
    assert metrics['penstock_queue_pushed_total{queue="counted"}'] == 63


def test_a_stream_through_a_worker_is_pushed_as_it_happens(broker):
    httpx.post(f"{broker.url}/topics/s/produce", json={"payload": "first"})
    for turn in range(6):
        with httpx.stream(
            "GET", f"{broker.url}/topics/s/stream?offset=latest", timeout=20
        ) as stream:
            assert stream.headers["content-type"] == "text/event-stream"
            lines = stream.iter_lines()
            offset = httpx.post(
                f"{broker.url}/topics/s/produce", json={"payload": f"turn {turn}"}
            ).json()["offset"]
            assert next(line for line in lines if line.startswith("id:")) == f"id: {offset}"


def test_every_process_is_seen_whichever_answers(broker):
    def workers(path: str) -> list[dict[str, Any]]:
        return httpx.get(f"{broker.url}/api/v1/{path}").json()["workers"]

    until(lambda: sorted(one["workerId"] for one in workers("status")) == [0, 1, 2])
    for answer in each_on_a_fresh_connection(broker, "GET", "/api/v1/analytics/worker-metrics", 8):
        reply = answer.json()
        assert sorted(one["workerId"] for one in reply["workers"]) == [0, 1, 2]
        assert len({one["pid"] for one in reply["workers"]}) == 3
        assert all(one["memoryBytes"] > 1 << 20 for one in reply["workers"])
        assert {row["workerId"] for row in reply["series"]} == {0, 1, 2}
    assert [one["workerId"] for one in workers("analytics/system-metrics?workerId=2")] == [2]
    assert workers("analytics/system-metrics?hostname=elsewhere") == []
    for answer in each_on_a_fresh_connection(broker, "GET", "/internal/api/shared-state/stats", 8):
        assert answer.json()["serverHealth"]["serversAlive"] == 3
    peers = httpx.get(f"{broker.url}/internal/api/inter-instance/stats").json()
    assert len(peers["peers"]) == 2
    assert peers["serverId"] not in peers["peers"]


def test_waiting_pops_are_counted_per_queue_and_process_and_woken_by_a_notification(broker):
    def parked() -> dict[str, float]:
        answer = httpx.get(
            f"{broker.url}/api/v1/analytics/queue-parked-replicas?queue=parked"
        ).json()
        return (
            {row["workerId"]: row["parkedCount"] for row in answer["series"]}
            if answer["replicas"]
            else {}
        )

    with ThreadPoolExecutor(1) as pool:
        url = f"{broker.url}/api/v1/pop/queue/parked?wait=true&timeout=20000"
        waiting = pool.submit(httpx.get, url, timeout=30)
        until(lambda: sum(parked().values()) == 1)
        woken = httpx.post(
            f"{broker.url}/internal/api/notify", json={"queue": "parked", "partition": "Default"}
        )
        assert woken.json() == {"status": "ok"}
        httpx.post(f"{broker.url}/api/v1/push", json={"items": [{"queue": "parked", "payload": 1}]})
        assert waiting.result().json()["messages"][0]["data"] == 1
    for body in ({}, {"queue": ""}, {"queue": 1}):
        assert httpx.post(f"{broker.url}/internal/api/notify", json=body).status_code == 400


def test_what_retention_deleted_is_told_over_time(broker):
    options = {"retentionEnabled": True, "retentionSeconds": 1}
    httpx.post(
        f"{broker.url}/api/v1/configure",
        json={"queue": "aged", "namespace": "n", "options": options},
    )
    httpx.post(
        f"{broker.url}/api/v1/push",
        json={"items": [{"queue": "aged", "payload": n} for n in range(5)]},
    )

    def retention(**query: str) -> dict[str, Any]:
        return httpx.get(f"{broker.url}/api/v1/analytics/retention", params=query).json()

    until(lambda: retention(queue="aged")["totals"]["retentionMsgs"] == 5)
    report = retention(queue="aged", groupBy="namespace")
    assert report["totals"] == {
        "retentionMsgs": 5,
        "completedRetentionMsgs": 0,
        "evictionMsgs": 0,
        "ttlMsgs": 0,
        "totalMsgs": 5,
        "eventCount": report["totals"]["eventCount"],
    }
    assert sum(point["totalMsgs"] for point in report["series"]) == 5
    assert report["rows"] == [{"key": "n", "queues": 1, "totals": report["totals"]}]
    assert retention(queue="other")["series"] == []
    assert "rows" not in retention()
    assert httpx.get(f"{broker.url}/api/v1/analytics/retention?groupBy=colour").status_code == 400


def test_a_change_through_any_process_is_recorded_with_the_address_of_the_client(broker):
    for answer in each_on_a_fresh_connection(broker, "POST", "/topics/audited", times=12):
        assert answer.status_code == 201
    entries = httpx.get(f"{broker.url}/api/v1/audit?filter=topic.create").json()["entries"]
    whos = [one["who"] for one in entries if one["object"] == "audited"]
    assert whos == ["127.0.0.1"] * 12


def test_what_a_client_says_of_its_address_is_not_recorded(broker):
    forged = {"X-Forwarded-For": "admin@example.com"}
    for _ in range(12):
        httpx.post(f"{broker.url}/topics/forged", headers=forged).raise_for_status()
    entries = httpx.get(f"{broker.url}/api/v1/audit?filter=topic.create").json()["entries"]
    assert [one["who"] for one in entries if one["object"] == "forged"] == ["127.0.0.1"] * 12


def test_a_worker_that_dies_is_started_again(broker):
    first = worker_processes(broker)
    os.kill(first[-1], signal.SIGKILL)
    until(lambda: len(worker_processes(broker)) == len(first) + 1, timeout=60)
    assert {
        answer.status_code for answer in each_on_a_fresh_connection(broker, "GET", "/health")
    } == {200}


def test_a_killed_owner_leaves_no_worker_behind_and_a_stop_reaches_every_process(broker):
    workers = worker_processes(broker)
    broker.kill()
    until(lambda: not any(is_alive(pid) for pid in workers))
    broker.start()
    restarted = worker_processes(broker)[len(workers) :]
    assert len(restarted) == 2
    assert broker.stop() == 0
    assert not any(is_alive(pid) for pid in restarted)
    broker.start()  # for the tests after this one


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
