"""30,000 queues: listings are read in pages, answers are bounded, and pushes do not wait for them."""

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest

from penstock.client import Client
from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess
from tests.support.wait import Stopwatch, until

QUEUES = 30_000
FILL = f"""
  WITH q AS (
    INSERT INTO queues (name, namespace, task)
    SELECT 'queue-' || lpad(n::text, 5, '0'), 'ns-' || n % 10, 'task-' || n % 7
      FROM generate_series(1, {QUEUES}) n RETURNING id
  ), p AS (INSERT INTO partitions (queue_id, name) SELECT id, 'Default' FROM q
  ), g AS (
    INSERT INTO groups (queue_id, name) SELECT id, '__QUEUE_MODE__' FROM q RETURNING id, queue_id
  )
  INSERT INTO tallies (queue_id, group_id, pushed, consumed, done)
  SELECT queue_id, 0, 10, 0, 0 FROM g UNION ALL SELECT queue_id, id, 0, 4, 4 FROM g"""


@pytest.fixture(scope="module")
def broker(postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    url = fresh_database(postgres, migrated=True)

    async def fill() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute("SET search_path TO penstock")
        await connection.execute(FILL)
        await connection.execute("ANALYZE")
        await connection.close()

    asyncio.run(fill())
    directory: Path = tmp_path_factory.mktemp("many")
    with BrokerProcess(directory, database_url=url) as broker:
        yield broker


class Pushes:
    """Pushes one message after the other, and remembers how long each took."""

    def __init__(self, url: str) -> None:
        self._url, self._stop = url, threading.Event()
        self.seconds: list[float] = []
        self._thread = threading.Thread(target=self._push)

    def _push(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._stop.is_set():
                began = time.perf_counter()
                answer = http.post(
                    "/api/v1/push", json={"items": [{"queue": "queue-00001", "payload": 1}]}
                )
                assert answer.status_code == 201
                self.seconds.append(time.perf_counter() - began)

    def __enter__(self) -> "Pushes":
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def http(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.url, timeout=60) as client:
        yield client


def timed(http: httpx.Client, path: str, **params: object) -> tuple[float, httpx.Response]:
    watch = Stopwatch()
    answer = http.get(path, params=params)
    seconds = watch.seconds
    assert answer.status_code == 200, answer.text
    return seconds, answer


@pytest.mark.parametrize("path", ["/api/v1/consumer-groups", "/api/v1/analytics/queue-lag"])
def test_a_page_of_groups_takes_less_than_200_ms(http, path):
    seconds, names = [], []
    for _ in range(3):
        after = {"afterQueue": names[-1], "afterGroup": "~"} if names else {}
        took, answer = timed(http, path, limit=1000, **after)
        seconds.append(took)
        page = answer.json()
        groups = page if isinstance(page, list) else page["groups"]
        names += [group.get("queue") or group["queueName"] for group in groups]
    assert names == [f"queue-{n:05}" for n in range(1, 3001)]
    assert min(seconds) < 0.2


@pytest.mark.parametrize("path", ["/api/v1/resources/queues", "/api/v1/status/queues"])
def test_a_listing_is_read_in_pages_by_cursor_each_in_less_than_200_ms(http, path):
    names, seconds = [], []
    params: dict[str, object] = {"limit": 1000}
    while True:
        took, answer = timed(http, path, **params)
        seconds.append(took)
        page = answer.json()
        names += [queue["name"] for queue in page["queues"]]
        if page["next"] is None:
            break
        params["cursor"] = page["next"]
    assert sorted(names) == [f"queue-{n:05}" for n in range(1, QUEUES + 1)]
    assert min(seconds) < 0.2, statistics.quantiles(seconds)


def test_a_cursor_goes_with_a_filter_and_a_wrong_one_is_refused(http):
    params = {"namespace": "ns-3", "limit": 7}
    _, first = timed(http, "/api/v1/resources/queues", **params)
    _, second = timed(http, "/api/v1/resources/queues", **params, cursor=first.json()["next"])
    numbers = [
        int(queue["name"].removeprefix("queue-"))
        for page in (first, second)
        for queue in page.json()["queues"]
    ]
    assert numbers == list(range(29_993, 29_993 - 140, -10))
    for cursor in ("-1", "xyz", "", "1" * 30, "ffffffff"):
        answer = http.get("/api/v1/resources/queues", params={"cursor": cursor})
        assert (answer.status_code, "`next`" in answer.json()["error"]) == (400, True)


def test_without_a_limit_a_client_of_queen_gets_the_newest_ten_thousand(http):
    _, answer = timed(http, "/api/v1/resources/queues")
    queues = answer.json()["queues"]
    assert (len(queues), queues[0]["name"]) == (10_000, "queue-30000")
    assert queues[0]["messages"]["pending"] == 6


def test_summaries_name_some_queues_and_count_all_of_them(http):
    _, answer = timed(http, "/api/v1/status")
    status = answer.json()
    assert (len(status["queues"]), status["queueCount"]) == (200, QUEUES)
    assert status["messages"]["completed"] == 4 * QUEUES
    assert len(answer.content) < 200_000
    _, answer = timed(http, "/api/v1/resources/overview")
    overview = answer.json()
    assert [overview[name] for name in ("queues", "namespaces", "tasks")] == [QUEUES, 10, 7]
    _, answer = timed(http, "/api/v1/resources/namespaces")
    namespaces = answer.json()["namespaces"]
    assert [one["queues"] for one in namespaces] == [QUEUES // 10] * 10


def test_a_scrape_is_small_and_adds_up_to_all_queues(http):
    def scraped() -> dict[str, float]:
        lines = http.get("/metrics").text.splitlines()
        prefix = "penstock_queue_group_completed_total{"
        found = [line.rpartition(" ") for line in lines if line.startswith(prefix)]
        return {labels: float(value) for labels, _, value in found}

    values: dict[str, float] = {}

    def complete() -> bool:
        values.update(scraped())
        return bool(values)

    until(complete)  # a slow machine may need longer than one scrape waits
    assert len(values) == 1001
    assert sum(values.values()) == 4 * QUEUES


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/resources/queues",
        "/api/v1/status",
        "/api/v1/resources/overview",
        "/api/v1/resources/namespaces",
        "/api/v1/queues",
        "/metrics",
    ],
)
def test_pushes_do_not_wait_for_who_looks(broker, http, path):
    def measure() -> tuple[float, float]:
        with Pushes(broker.url) as pushes:
            until(lambda: len(pushes.seconds) > 20)
            before = len(pushes.seconds)
            took, _ = timed(http, path)
            until(lambda: len(pushes.seconds) > before + 3)
        return max(pushes.seconds[before:]), took

    measured = []
    for _ in range(4):  # other work on the machine delays a push now and then, not each time
        worst, took = measure()
        measured.append((worst, took))
        if worst < max(0.3, took / 4):  # a push that waits for the event loop waits for most of it
            return
    pytest.fail(f"slowest push and time of the listing: {measured}")


async def test_the_client_reads_all_pages(broker):
    async with Client(broker.url) as client:
        names = [queue.name for queue in await client.admin.queues()]
        groups = {group.queue for group in await client.admin.groups()}
    assert len(groups) == QUEUES
    assert len(names) == len(set(names)) == QUEUES
