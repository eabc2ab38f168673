"""What /metrics shows: the figures of queues, groups, topics and the database, in a form that
Prometheus likes, as docs/reference/metrics.md says.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess
from tests.support.wait import until

MAX_SERIES = 6
ROW = re.compile(r"^\| `((?:penstock|process)_\w+)` \| (\w+) \| ([^|]*) \| (.*) \|$", re.M)
CONDITIONAL = {  # shown only with tokens or TLS
    "penstock_auth_known_tokens",
    "penstock_auth_refused_total",
    "penstock_tls_certificate_expires_seconds",
}
Samples = dict[str, float]


@pytest.fixture(scope="module")
def broker(postgres, tmp_path_factory) -> Iterator[BrokerProcess]:
    url = fresh_database(postgres)
    with BrokerProcess(
        tmp_path_factory.mktemp("metrics"),
        database_url=url,
        metrics__max_series=MAX_SERIES,
        topics__tier=f"file://{tmp_path_factory.mktemp('tier')}",
    ) as process:
        process.database_url = url
        yield process


@pytest.fixture(scope="module")
def client(broker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.url, timeout=30) as client:
        yield client


def push(client: httpx.Client, queue: str, count: int) -> None:
    items = [{"queue": queue, "payload": number} for number in range(count)]
    client.post("/api/v1/push", json={"items": items}).raise_for_status()


def pop(client: httpx.Client, queue: str, **query: object) -> list[dict[str, str]]:
    answer = client.get(f"/api/v1/pop/queue/{queue}", params={"batch": 100, **query})
    return answer.json()["messages"] if answer.content else []


def scrape(client: httpx.Client) -> Samples:
    """Not from the cache of the scrape before."""
    samples: Samples = client.get("/metrics.json").json()["metrics"]
    return samples


@pytest.fixture(scope="module")
def text(client) -> str:
    """A scrape with some of everything."""
    client.post("/api/v1/configure", json={"queue": "orders", "options": {"retryLimit": 0}})
    push(client, "orders", 10)
    messages = pop(client, "orders", consumerGroup="billing", batch=6)
    keys = ("transactionId", "partitionId", "leaseId")
    statuses = ["completed", "completed", "completed", "failed"]
    acks = [
        {**{key: message[key] for key in keys}, "status": status}
        for message, status in zip(messages, statuses, strict=False)
    ]
    body = {"acknowledgments": acks, "consumerGroup": "billing"}
    client.post("/api/v1/ack/batch", json=body).raise_for_status()
    push(client, "unread", 2)
    client.post("/topics/events/produce", json={"payload": "x"}).raise_for_status()
    client.post("/topics/events/produce", json={"payload": "y"}).raise_for_status()
    client.post("/topics/events/groups/audit/commit", json={"offset": 1}).raise_for_status()
    route = {
        "name": "out",
        "source": {"topic": "events"},
        "destination": {"type": "http", "url": "http://127.0.0.1:9/"},
    }
    client.post("/api/v1/routes", json=route).raise_for_status()
    return client.get("/metrics").text


def value(text: str, name: str, **labels: str) -> float:
    (result,) = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    return result


def test_queues_groups_topics_and_the_database_are_there(text):
    orders = {"queue": "orders"}
    for name in ("waiting", "depth"):  # the second is the former name
        assert value(text, f"penstock_queue_{name}", **orders) == 6
    assert value(text, "penstock_queue_stored", **orders) == 10
    assert value(text, "penstock_queue_leased", **orders) == 2
    assert value(text, "penstock_queue_dead_letters", **orders) == 1
    assert value(text, "penstock_queue_oldest_age_seconds", **orders) > 0
    billing = {**orders, "group": "billing"}
    for name in ("waiting", "lag"):
        assert value(text, f"penstock_queue_group_{name}", **billing) == 6
    assert value(text, "penstock_queue_group_lag_seconds", **billing) > 0
    assert value(text, "penstock_queue_group_leased", **billing) == 2
    assert value(text, "penstock_queue_group_dead_letters", **billing) == 1
    assert value(text, "penstock_queue_group_completed_total", **billing) == 3
    assert value(text, "penstock_queue_group_failed_total", **billing) == 1
    assert value(text, "penstock_queue_group_members", **billing) == 1
    # before the first one, so that the first one alerts
    assert value(text, "penstock_queue_group_dropped_total", **billing) == 0
    assert value(text, "penstock_queue_waiting", queue="unread") == 2
    assert value(text, "penstock_queue_oldest_age_seconds", queue="unread") > 0
    assert value(text, "penstock_topic_stored_records", topic="events") == 2
    assert value(text, "penstock_topic_size_bytes", topic="events") > 0
    assert value(text, "penstock_topic_oldest_age_seconds", topic="events") > 0
    audit = {"group": "audit", "topic": "events"}
    assert value(text, "penstock_topic_group_lag", **audit) == 1
    assert value(text, "penstock_topic_group_lag_seconds", **audit) > 0
    assert value(text, "penstock_topic_group_leases", **audit) == 0
    assert value(text, "penstock_database_connections") > 0
    assert value(text, "penstock_database_wal_bytes_total") > 0
    assert value(text, "penstock_buffer_pending", kind="failover") == 0


def test_prometheus_finds_nothing_wrong(text):
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert re.fullmatch(r"(penstock|process)_[a-z0-9_]+", family.name), family.name
        assert not re.search(r"_(counter|gauge|histogram|ms|kb|mb|minutes|hours)\b", family.name)
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name.endswith("_total"), sample.name
            elif family.type == "gauge":
                assert not re.search(r"_(total|count|sum|bucket)$", sample.name), sample.name
    if promtool := shutil.which("promtool"):
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=text, text=True, capture_output=True, timeout=60
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_page_lists_every_metric_as_it_is(text):
    page = Path("docs/reference/metrics.md").read_text()
    documented = {
        name: (kind, labels, meaning) for name, kind, labels, meaning in ROW.findall(page)
    }
    labels: dict[str, set[str]] = {}
    kinds: dict[str, tuple[str, str]] = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        kinds[name] = (family.type, family.documentation)
        labels[name] = {label for s in family.samples for label in s.labels} - {"le"}
    for name, (kind, meaning) in sorted(kinds.items()):
        row = f"| `{name}` | {kind} | {', '.join(sorted(labels[name]))} | {meaning} |"
        assert name in documented, f"docs/reference/metrics.md needs: {row}"
        assert documented[name][::2] == (kind, meaning), (
            f"docs/reference/metrics.md should say: {row}"
        )
        if labels[name]:
            listed = set(documented[name][1].split(", ")) - {""}
            assert listed == labels[name], f"docs/reference/metrics.md should say: {row}"
    assert documented.keys() - kinds.keys() == CONDITIONAL


async def test_a_database_that_does_not_answer_costs_only_its_own_figures(client, text, broker):
    async def held() -> str:
        connection = await asyncpg.connect(broker.database_url)
        async with connection.transaction():
            await connection.execute("LOCK TABLE penstock.tallies IN ACCESS EXCLUSIVE MODE")
            scrapes: list[str] = []

            def blocked() -> bool:
                scrapes.append(client.get("/metrics").text)
                return "penstock_queue_waiting{" not in scrapes[-1]

            until(blocked, 60)
        await connection.close()
        return scrapes[-1]

    blocked = await held()
    assert value(blocked, "penstock_database_up") == 1
    assert value(blocked, "penstock_queue_pushed_total", queue="orders") == 10
    until(lambda: "penstock_queue_waiting{" in client.get("/metrics").text, 60, "it is back")


def test_queues_beyond_the_limit_are_added_up(client, text):
    for number in range(2 * MAX_SERIES):
        push(client, f"many-{number}", number + 1)
    expected = 12 + sum(number + 1 for number in range(2 * MAX_SERIES))

    def stored() -> Samples:
        prefix = "penstock_queue_stored{"
        return {key: n for key, n in scrape(client).items() if key.startswith(prefix)}

    until(lambda: sum(stored().values()) == expected, 30, "the scrape is not from the cache")
    samples = stored()
    assert len(samples) == MAX_SERIES + 1
    assert samples['penstock_queue_stored{queue="orders"}'] == 10  # an old one keeps its own
    assert 'penstock_queue_stored{queue="(other)"}' in samples
    pushed = {
        k: n for k, n in scrape(client).items() if k.startswith("penstock_queue_pushed_total")
    }
    assert len(pushed) == MAX_SERIES + 1
    assert sum(pushed.values()) == expected


def test_deleted_queues_and_topics_make_room_for_the_figures_of_new_ones(postgres, tmp_path):
    url = fresh_database(postgres)
    with (
        BrokerProcess(tmp_path, database_url=url, metrics__max_series=MAX_SERIES) as process,
        httpx.Client(base_url=process.url, timeout=30) as client,
    ):
        for number in range(2 * MAX_SERIES):
            push(client, f"short-lived-{number}", 1)
            client.post(f"/topics/short-lived-{number}/produce", json={"payload": "1"})
        until(lambda: any("short-lived" in name for name in scrape(client)), 30, "they are shown")
        for number in range(2 * MAX_SERIES):
            client.delete(f"/api/v1/queues/short-lived-{number}").raise_for_status()
            client.delete(f"/topics/short-lived-{number}").raise_for_status()
        push(client, "new", 3)
        client.post("/topics/new/produce", json={"payload": "1"}).raise_for_status()
        until(lambda: 'penstock_queue_stored{queue="new"}' in scrape(client), 30, "a new scrape")
        samples = scrape(client)
        assert samples['penstock_queue_pushed_total{queue="new"}'] == 3
        assert samples['penstock_topic_records_total{topic="new"}'] == 1
        assert not [name for name in samples if "short-lived" in name]
