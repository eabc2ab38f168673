"""Backups of real brokers under load, restored and counted; to a directory and to an S3 server."""

import os
import threading
from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from penstock.cli import app
from penstock.cli import backup as _commands  # noqa: F401 - they register themselves
from penstock.log.layout import METADATA, parse_metadata, parse_sealed
from penstock.log.verify import verify
from penstock.net.topic_link import TopicLink
from penstock.protocol import frames
from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess
from tests.support.cli import CliRunner
from tests.support.disk import small_disk
from tests.support.object_stores import CREDENTIALS, s3_server
from tests.support.wait import until


def penstock(*words: str, code: int = 0, **env: str) -> str:
    """Run a command here; what it printed."""
    done = CliRunner(env=env).invoke(app, list(words))
    assert done.exit_code == code, done.output
    return done.output


def address(broker: BrokerProcess) -> str:
    host, port = broker.tcp
    return f"{host}:{port}"


class Load:
    """Pushes, acknowledgements and appends, and which of them were answered."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self._stop = threading.Event()
        self.pushed: list[int] = []
        self.acked: set[int] = set()
        self.appended = 0
        self._threads = [
            threading.Thread(target=work, daemon=True)
            for work in (self._push, self._take, self._append)
        ]

    def __enter__(self) -> "Load":
        with TopicLink(address(self._broker), 30) as link:
            link.create("log")
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _push(self) -> None:
        with httpx.Client(base_url=self._broker.url, timeout=60) as client:
            number = 0
            while not self._stop.wait(0.002):
                items = [
                    {"queue": "q", "partition": str(n % 3), "payload": n}
                    for n in range(number, number + 5)
                ]
                client.post("/api/v1/push", json={"items": items}).raise_for_status()
                self.pushed += range(number, number + 5)
                number += 5

    def _take(self) -> None:
        """Every second batch is acknowledged, the rest stays under its lease."""
        with httpx.Client(base_url=self._broker.url, timeout=60) as client:
            while not self._stop.wait(0.02):
                popped = client.get("/api/v1/pop/queue/q?batch=10&consumerGroup=g")
                messages = popped.json()["messages"] if popped.status_code == 200 else []
                if messages:
                    acks = [
                        {
                            "transactionId": m["transactionId"],
                            "partitionId": m["partitionId"],
                            "leaseId": m["leaseId"],
                            "status": "completed",
                        }
                        for m in messages
                    ]
                    body = {"acknowledgments": acks, "consumerGroup": "g"}
                    client.post("/api/v1/ack/batch", json=body).raise_for_status()
                    self.acked |= {message["data"] for message in messages}

    def _append(self) -> None:
        with TopicLink(address(self._broker), 60) as link:
            while not self._stop.wait(0.002):
                first = self.appended
                payloads = [b"%d" % n for n in range(first, first + 20)]
                link.append(frames.produce_batch("log", payloads))
                self.appended += 20


@pytest.fixture(scope="module")
def loaded(postgres, tmp_path_factory) -> Iterator[tuple[BrokerProcess, dict[str, str]]]:
    """A broker that has a route nobody receives, and small segments."""
    url = fresh_database(postgres)
    settings = {"database__url": url, "topics__segment_bytes": 20_000}
    with BrokerProcess(tmp_path_factory.mktemp("broker"), **settings) as broker:
        route = {
            "name": "away",
            "source": {"topic": "log"},
            "destination": {"type": "http", "url": "http://127.0.0.1:1/"},
        }
        with TopicLink(address(broker), 30) as link:
            link.create("log")
        httpx.post(f"{broker.url}/api/v1/routes", json=route).raise_for_status()
        yield (
            broker,
            {"PENSTOCK_DATABASE_URL": url, "PENSTOCK_DATA_DIRECTORY": str(broker.data_dir)},
        )


def drained(broker: BrokerProcess, group: str) -> list[int]:
    values: list[int] = []
    with httpx.Client(base_url=broker.url, timeout=60) as client:
        while True:
            popped = client.get(
                f"/api/v1/pop/queue/q?batch=1000&partitions=10&autoAck=true&consumerGroup={group}"
                "&subscriptionMode=all"
            )
            if popped.status_code != 200 or not popped.json()["messages"]:
                return values
            values += [message["data"] for message in popped.json()["messages"]]


def appended_to(broker: BrokerProcess, topic: str, end: int) -> list[str]:
    payloads: list[str] = []
    while len(payloads) < end:
        query = f"offset={len(payloads)}&max_messages=1000"
        answer = httpx.get(f"{broker.url}/topics/{topic}/consume?{query}").json()
        payloads += [message["payload"] for message in answer]
    return payloads


def test_a_backup_under_load_has_all_that_was_acknowledged_before_and_nothing_half(
    loaded, postgres, tmp_path
) -> None:
    broker, env = loaded
    place = tmp_path / "copy"
    with Load(broker) as load:
        until(lambda: len(load.acked) > 100 and load.appended > 3000, 60)
        pushed, acked, appended = len(load.pushed), set(load.acked), load.appended
        assert "1 topics and all queues" in penstock("backup", str(place), **env)
        later = load.appended
    refused = penstock("backup", str(place), code=1, **env)
    assert "already has a backup" in refused
    assert "━" not in refused  # a progress bar is for a terminal
    assert "sound" in penstock("restore", str(place), "--check")

    url = fresh_database(postgres, empty=True)
    there = {"PENSTOCK_DATABASE_URL": url, "PENSTOCK_DATA_DIRECTORY": str(tmp_path / "data")}
    penstock("restore", str(place), **there)
    assert "is not empty" in penstock("restore", str(place), code=1, **there)
    with BrokerProcess(tmp_path / "data", database__url=url) as again:
        everything = drained(again, "check")
        assert len(everything) == len(set(everything)) >= pushed
        assert set(everything) >= set(range(pushed))
        assert not acked & set(drained(again, "g"))  # acknowledged before: not delivered again
        with TopicLink(address(again), 30) as link:
            end = link.info("log").next_offset
        assert appended <= end <= later + 20
        assert [int(payload) for payload in appended_to(again, "log", end)] == list(range(end))
        routes = httpx.get(f"{again.url}/api/v1/routes").json()
        assert [route["name"] for route in routes["routes"]] == ["away"]


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """A real S3 endpoint, and what finds it."""
    with s3_server() as endpoint:
        yield {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}


def test_a_backup_goes_to_an_object_store_and_comes_back_with_every_offset(
    loaded, s3, postgres, tmp_path
) -> None:
    broker, env = loaded
    before = TopicLink(address(broker), 30)
    before.append(frames.produce_batch("log", [b"the last"]))
    end = before.info("log").next_offset
    before.close()
    penstock("backup", "s3://bucket/backups/one", **env, **s3)
    assert "sound" in penstock("restore", "s3://bucket/backups/one", "--check", **s3)
    there = {
        "PENSTOCK_DATABASE_URL": fresh_database(postgres, empty=True),
        "PENSTOCK_DATA_DIRECTORY": str(tmp_path / "data"),
    }
    penstock("restore", "s3://bucket/backups/one", **there, **s3)
    for name in os.listdir(broker.data_dir / "log"):
        if parse_sealed(name):  # byte for byte
            copy = tmp_path / "data" / "log" / name
            assert copy.read_bytes() == (broker.data_dir / "log" / name).read_bytes()
    assert verify(tmp_path / "data" / "log").sound
    metadata = (tmp_path / "data" / "log" / METADATA).read_bytes()
    assert parse_metadata(metadata) == end
    assert "is not a backup" in penstock("restore", "s3://bucket/none", code=1, **there, **s3)


def test_what_is_damaged_or_incomplete_is_not_restored_and_a_broker_does_not_start_on_it(
    loaded, postgres, tmp_path
) -> None:
    _, env = loaded
    place = tmp_path / "copy"
    penstock("backup", str(place), **env)
    victim = place / "queues.dump"
    content = victim.read_bytes()
    victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    there = {
        "PENSTOCK_DATABASE_URL": fresh_database(postgres, empty=True),
        "PENSTOCK_DATA_DIRECTORY": str(tmp_path / "data"),
    }
    assert "is damaged" in penstock("restore", str(place), "--check", code=1)
    assert "is damaged" in penstock("restore", str(place), code=1, **there)
    refused = BrokerProcess(tmp_path / "data", database__url=there["PENSTOCK_DATABASE_URL"])
    with pytest.raises(RuntimeError, match="a restore into"):
        refused.start()
    assert "was interrupted" in penstock("restore", str(place), code=1, **there)
    (place / "manifest.json").unlink()
    assert "is not a backup" in penstock("restore", str(place), code=1, **there)


def test_a_topic_in_a_tier_is_restored_with_the_tier_or_without_it(postgres, tmp_path) -> None:
    """Without it only if the backup was told to take along what lies there."""
    tier_address = f"file://{tmp_path}/tier"
    settings = {"topics__tier_delay": 0, "topics__tier_interval": "100ms"}
    settings |= {"topics__local_retention__bytes": 1, "topics__segment_bytes": 4000}
    url = fresh_database(postgres)
    env = {"PENSTOCK_DATABASE_URL": url, "PENSTOCK_DATA_DIRECTORY": str(tmp_path / "broker")}
    env |= {"PENSTOCK_TOPICS_TIER": tier_address}
    owner = BrokerProcess(
        tmp_path / "broker", database_url=url, topics__tier=tier_address, **settings
    )
    with owner:
        with TopicLink(address(owner), 30) as link:
            link.create("log")
            for first in range(0, 1000, 50):
                payloads = [b"%d" % n for n in range(first, first + 50)]
                link.append(frames.produce_batch("log", payloads))
        until(lambda: _local(owner) < 3, 60, "sealed segments have left the disk")
        assert f"read from {tier_address}" in penstock("backup", str(tmp_path / "with"), **env)
        assert "read from" not in penstock("backup", "--tier", str(tmp_path / "all"), **env)
        for copy, tier in (("with", tier_address), ("all", "")):
            there = fresh_database(postgres, empty=True)
            data = tmp_path / f"from {copy}"
            penstock(
                "restore",
                str(tmp_path / copy),
                PENSTOCK_DATABASE_URL=there,
                PENSTOCK_DATA_DIRECTORY=str(data),
            )
            assert verify(data / "log").sound
            before = sorted((tmp_path / "tier").rglob("*.json"))
            owned = (tmp_path / "tier/owner.json").read_bytes()
            again = BrokerProcess(data, database_url=there, topics__tier=tier, **settings)
            with again:
                assert [int(one) for one in appended_to(again, "log", 1000)] == list(range(1000))
                with TopicLink(address(again), 30) as link:
                    link.append(frames.produce_batch("log", [b"more"]))
                    assert link.info("log").next_offset == 1001
                if tier:
                    state = until(partial(_fenced, again), 60, "it does not write to the tier")
                    assert "take-over" in state
            assert sorted((tmp_path / "tier").rglob("*.json")) == before
            assert (tmp_path / "tier/owner.json").read_bytes() == owned


def _local(broker: BrokerProcess) -> int:
    return sum(1 for name in os.listdir(broker.data_dir / "log") if name.startswith("data"))


def _fenced(broker: BrokerProcess) -> str:
    return httpx.get(f"{broker.url}/api/v1/tier").json()["problem"] or ""


def test_a_place_without_room_is_refused_and_holds_no_backup(loaded, tmp_path) -> None:
    _, env = loaded
    with small_disk(tmp_path / "small", "64k") as place:
        assert "No space left" in penstock("backup", str(place), code=1, **env)
        assert not (place / "manifest.json").exists()
        assert "is not a backup" in penstock("restore", str(place), "--check", code=1)
