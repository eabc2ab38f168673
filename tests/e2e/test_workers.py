"""Several processes behind one port: from outside nobody can tell."""

import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess
from tests.support.wait import until


@pytest.fixture(scope="module")
def broker(postgres, tmp_path_factory):
    directory = tmp_path_factory.mktemp("workers")
    with BrokerProcess(directory, database_url=fresh_database(postgres), workers=3) as process:
        yield process


def each_on_a_fresh_connection(broker: BrokerProcess, method: str, path: str, times: int = 24, **more):
    """The kernel spreads connections, not requests: this many reach every process."""
    with httpx.Client(headers={"Connection": "close"}, verify=False) as client:
        return [client.request(method, broker.url + path, **more) for _ in range(times)]


def worker_processes(broker: BrokerProcess) -> list[int]:
    return [int(pid) for pid in re.findall(r"worker \d is ready \(process (\d+)\)", broker.log)]


def test_topics_are_served_whichever_process_accepts_the_connection(broker):
    answers = each_on_a_fresh_connection(broker, "POST", "/topics/t/produce", json={"payload": "x"})
    assert [answer.status_code for answer in answers] == [201] * 24
    assert sorted(answer.json()["offset"] for answer in answers) == list(range(24))
    for answer in each_on_a_fresh_connection(broker, "GET", "/topics/t/next_offset"):
        assert answer.json() == {"topic": "t", "next_offset": 24}


def test_health_metrics_and_documents_are_the_same_from_every_process(broker):
    for answer in each_on_a_fresh_connection(broker, "GET", "/health"):
        assert set(answer.json()["listeners"]) == {"HTTP", "TCP", "WebSocket"}
    documents = each_on_a_fresh_connection(broker, "GET", "/openapi.json")
    assert len({answer.content for answer in documents}) == 1
    assert {answer.status_code for answer in each_on_a_fresh_connection(broker, "GET", "/nowhere")} == {404}


def test_a_stream_through_a_worker_is_pushed_as_it_happens(broker):
    httpx.post(f"{broker.url}/topics/s/produce", json={"payload": "first"})
    for turn in range(6):
        with httpx.stream("GET", f"{broker.url}/topics/s/stream?offset=latest", timeout=20) as stream:
            assert stream.headers["content-type"] == "text/event-stream"
            lines = stream.iter_lines()
            offset = httpx.post(f"{broker.url}/topics/s/produce", json={"payload": f"turn {turn}"}).json()["offset"]
            assert next(line for line in lines if line.startswith("id:")) == f"id: {offset}"


def test_a_worker_that_dies_is_started_again(broker):
    first = worker_processes(broker)
    os.kill(first[0], signal.SIGKILL)
    until(lambda: len(worker_processes(broker)) == len(first) + 1, timeout=60)
    assert {answer.status_code for answer in each_on_a_fresh_connection(broker, "GET", "/health")} == {200}


def test_a_killed_owner_leaves_no_worker_behind_and_a_stop_reaches_every_process(broker):
    workers = worker_processes(broker)
    broker.kill()
    until(lambda: not any(is_alive(pid) for pid in workers), timeout=20)
    broker.start()
    restarted = worker_processes(broker)[len(workers) :]
    assert len(restarted) == 2
    assert broker.stop() == 0
    assert not any(is_alive(pid) for pid in restarted)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
