"""Brokers with a tier: killed in an upload, lost with their disk, and started from the tier."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli import app
from penstock.cli import topic as _commands  # noqa: F401 - they register themselves
from penstock.net.topic_link import TopicLink
from penstock.protocol import frames
from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess
from tests.support.cli import CliRunner
from tests.support.object_stores import BUCKET, CREDENTIALS, Faults, faulty_proxy, s3_server
from tests.support.wait import until

TOPICS = 10


@pytest.fixture
def store() -> Iterator[tuple[dict[str, str], Faults]]:
    with s3_server() as server, faulty_proxy(server) as (url, faults):
        yield {**CREDENTIALS, "AWS_ENDPOINT_URL": url}, faults


def penstock(env: dict[str, str], *words: str) -> str:
    done = CliRunner(env=env).invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def records(topic: int, first: int, count: int) -> list[bytes]:
    return [b"%d:%d:" % (topic, n) + b"p" * (n % 50) for n in range(first, first + count)]


def address(broker: BrokerProcess) -> str:
    return "{}:{}".format(*broker.tcp)


def contents(link: TopicLink, topic: str, end: int) -> bytes:
    """The log, byte for byte, up to an offset."""
    parts, at = [], 0
    while at < end:
        fetched = link.fetch(topic, at, 1 << 20)
        assert fetched.next_offset > at
        parts.append(bytes(fetched.raw))
        at = fetched.next_offset
    return b"".join(parts)


def tier(broker: BrokerProcess) -> dict[str, Any]:
    return httpx.get(f"{broker.url}/api/v1/tier", timeout=30).json()


def first_event(broker: BrokerProcess, path: str) -> dict[str, Any]:
    with httpx.stream("GET", broker.url + path, timeout=60) as stream:
        line = next(line for line in stream.iter_lines() if line.startswith("data:"))
    return json.loads(line.removeprefix("data:"))


def test_a_cold_start_from_the_tier_has_every_byte_and_every_group(
    postgres, tmp_path: Path, store: tuple[dict[str, str], Faults], soak: bool
) -> None:
    """The long form: 10 topics with 5 million records."""
    env, faults = store
    each = 500_000 if soak else 300
    step = 5_000 if soak else 100
    settings = {
        "topics__tier": f"s3://{BUCKET}/tier",
        "topics__segment_bytes": (4 << 20) if soak else 8_000,
        "topics__tier_delay": 0,
        "topics__tier_interval": "200ms",
        "topics__local_retention__bytes": 1,
    }
    faults.slow_seconds = 1.0
    faults.choose = lambda method, path: (
        "slow" if method in ("PUT", "POST") and ".log" in path else None
    )
    database = fresh_database(postgres)
    lost = BrokerProcess(tmp_path / "lost", database_url=database, env=env, **settings).start()
    try:
        with TopicLink(address(lost)) as link:
            for number in range(TOPICS):
                link.create(f"topic {number}")
                for first in range(0, each, step):
                    batch = records(number, first, step)
                    link.append(frames.produce_batch(f"topic {number}", batch))
        until(lambda: faults.count("slow"), 180, "an upload is under way")
        lost.kill()
        faults.never()
        lost.start()
        with TopicLink(address(lost)) as link:
            for number in range(TOPICS):
                link.commit(f"topic {number}", "g", number * 11)
            expected = {n: contents(link, f"topic {n}", each) for n in range(TOPICS)}
            incarnations = {n: link.info(f"topic {n}").incarnation for n in range(TOPICS)}
        penstock(env, "topic", "tier", "flush", "--url", lost.url)
        report = until(lambda: _all_remote(tier(lost)), 180, "the local files are gone")
        assert report["pending_bytes"] == 0
        with TopicLink(address(lost)) as link:
            assert contents(link, "topic 3", each) == expected[3], "readers do not notice"
            link.append(frames.produce_batch("topic 0", [b"only on the lost machine"]))
        before = tier(lost)["passes"]  # the one under way may have begun before that record
        until(lambda: tier(lost)["passes"] > before + 1, 180, "the state is written")
    finally:
        lost.kill()
    tier_setting = f"topics.tier={settings['topics__tier']}"
    checked = penstock(env, "topic", "verify", "--tier", "--set", tier_setting)
    assert checked.count(": sound: ") == TOPICS
    adopted = BrokerProcess(
        tmp_path / "new", database_url=database, env=env, topics__adopt=True, **settings
    )
    with adopted, TopicLink(address(adopted)) as link:
        for number in range(TOPICS):
            name = f"topic {number}"
            assert contents(link, name, each) == expected[number]
            assert link.info(name).incarnation == incarnations[number]
            group = httpx.get(f"{adopted.url}/topics/{name}/groups/g").json()
            assert group["committed"] == number * 11
        (named,) = (one for one in tier(adopted)["adopted"]["topics"] if one["topic"] == "topic 0")
        assert (named["lost_from"], named["lost_to"]) == (each, each + 1)
        assert "topic topic 0: offsets" in adopted.log
        listed = httpx.get(f"{adopted.url}/topics/topic 1/consume?offset=5&max_messages=2").json()
        assert [one["payload"].encode() for one in listed] == records(1, 5, 2)
        event = first_event(adopted, "/topics/topic 2/stream?offset=7")
        assert event["payload"].encode() == records(2, 7, 1)[0]


def _all_remote(report: dict[str, Any]) -> dict[str, Any] | None:
    return report if report["local_bytes"] < report["tier_bytes"] / 10 else None


def test_an_owner_that_was_frozen_comes_back_to_a_tier_that_is_not_its_own(
    postgres, tmp_path: Path, store: tuple[dict[str, str], Faults]
) -> None:
    """It is stopped in the middle of an upload; meanwhile another machine starts from the tier."""
    env, faults = store
    settings = {
        "topics__tier": f"s3://{BUCKET}/frozen",
        "topics__segment_bytes": 8_000,
        "topics__tier_delay": 0,
        "topics__tier_interval": "100ms",
        "topics__local_retention__bytes": 1,
    }
    frozen = BrokerProcess(
        tmp_path / "frozen", database_url=fresh_database(postgres), env=env, **settings
    )
    with frozen, TopicLink(address(frozen)) as link:
        link.create("t")
        link.append(frames.produce_batch("t", records(0, 0, 300)))
        penstock(env, "topic", "tier", "flush", "--url", frozen.url)
        faults.slow_seconds = 1.0
        faults.choose = lambda method, path: "slow" if method == "PUT" else None
        link.append(frames.produce_batch("t", records(0, 300, 300)))
        until(lambda: faults.count("slow"), 60, "an upload is under way")
        assert frozen.process is not None
        os.kill(frozen.process.pid, signal.SIGSTOP)
        faults.never()
        try:
            other = BrokerProcess(
                tmp_path / "next",
                database_url=fresh_database(postgres),
                env=env,
                topics__adopt=True,
                **settings,
            )
            with other, TopicLink(address(other)) as adopted:
                end = adopted.info("t").next_offset
                adopted.append(frames.produce_batch("t", records(0, 0, 300)))
                os.kill(frozen.process.pid, signal.SIGCONT)
                problem = until(lambda: tier(frozen)["problem"], 120, "it is told")
                assert "take-over" in problem
                assert not tier(frozen)["owner"]
                link.append(frames.produce_batch("t", [b"appends go on"]))
                penstock(env, "topic", "tier", "flush", "--url", other.url)
                assert adopted.info("t").next_offset == end + 300
                assert contents(adopted, "t", 300) == contents(link, "t", 300)
                given = f"topics.tier={settings['topics__tier']}"
                assert ": sound: " in penstock(env, "topic", "verify", "--tier", "--set", given)
        finally:
            frozen.process.send_signal(signal.SIGCONT)  # also when it has ended
