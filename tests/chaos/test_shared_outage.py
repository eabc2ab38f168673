"""A broker with shared topics while the database is down: what is refused, and what still works."""

from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import httpx
import pytest

from tests.support.broker import BrokerProcess
from tests.support.postgres import Postgres
from tests.support.wait import until

pytestmark = pytest.mark.xdist_group("shared-topics")
SECONDS = 120.0


@pytest.fixture
def server() -> Iterator[Postgres]:
    server = Postgres("one")
    try:
        server.create()
        yield server
    finally:
        server.remove()


def test_appends_are_refused_while_local_topics_and_reads_from_memory_continue(
    server: Postgres, tmp_path: Path
) -> None:
    url = f"postgresql://postgres@{server.address}/postgres?sslmode=disable"
    settings = {"database__acquire_timeout": 2, "topics__tier_interval": 0.2}
    settings |= {"topics__tier_delay": 0, "topics__shared_tier": f"file://{tmp_path / 'tier'}"}
    with (
        BrokerProcess(tmp_path / "broker", database_url=url, **settings) as broker,
        httpx.Client(base_url=broker.url, timeout=SECONDS) as http,
    ):

        def produce(topic: str, value: str) -> httpx.Response:
            return http.post(f"/topics/{topic}/produce", json={"payload": value})

        def stored(topic: str) -> list[str]:
            answer = http.get(f"/topics/{topic}/consume").raise_for_status()
            return [one["payload"] for one in answer.json()]

        http.post("/topics/shared?placement=shared").raise_for_status()
        http.post("/topics/local").raise_for_status()
        for topic in ("shared", "local"):
            produce(topic, "before").raise_for_status()
        objects = "SELECT count(*) FROM penstock.shared_batches WHERE object IS NOT NULL"
        until(lambda: server.sql(objects) == 1, SECONDS, "the record is in object storage")

        failures: list[confluent_kafka.KafkaError | None] = []
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": broker.kafka,
                "message.timeout.ms": int(SECONDS * 1000),
                "log_level": 0,
            }
        )
        server.kill()
        until(lambda: produce("shared", "refused").status_code == 503, SECONDS, "it is noticed")
        refused = produce("shared", "refused")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        produce("local", "during").raise_for_status()
        assert stored("local") == ["before", "during"]
        assert stored("shared") == ["before"]
        # The error that Kafka's client gets is one that it tries again after.
        producer.produce("shared", b"kafka", on_delivery=lambda error, _: failures.append(error))
        assert producer.flush(2) == 1

        server.start()
        until(lambda: produce("shared", "after").status_code == 201, SECONDS, "it is back")
        assert producer.flush(SECONDS) == 0
        assert failures == [None]
        assert sorted(stored("shared")) == ["after", "before", "kafka"]
