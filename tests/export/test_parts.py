"""Breaker, backoff, worker numbers, sizes, and what answers mean: each alone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.serve import parse_settings
from penstock.config import build, load
from penstock.config.schema import CircuitBreaker, SendQueue
from penstock.errors import ConfigError
from penstock.export.backoff import Backoff
from penstock.export.breaker import Breaker
from penstock.export.destinations import Denied, Refused, Retry, TooBig
from penstock.export.destinations.http import check_status, parse_retry_after
from penstock.export.sendqueue.limits import memory_limit, memory_used, sizes
from penstock.export.spec import parse_route
from penstock.export.workers import next_workers
from tests.export.making import FakeClock


def test_the_breaker_opens_probes_once_and_wakes_everybody_when_it_closes():
    async def body() -> None:
        clock = FakeClock()
        breaker = Breaker("r", CircuitBreaker(threshold=3, reset_timeout=30.0), clock)
        for _ in range(3):
            (await breaker.admit()).failure()
        assert breaker.state == "open"
        waiting = [asyncio.ensure_future(breaker.admit()) for _ in range(5)]
        await asyncio.sleep(0)
        await clock.advance(29)
        assert not any(each.done() for each in waiting)
        await clock.advance(2)
        [probe] = [each.result() for each in waiting if each.done()]
        assert breaker.state == "half_open"
        probe.failure()
        await clock.advance(29)
        assert sum(each.done() for each in waiting) == 1
        await clock.advance(2)
        probe = next(
            each.result() for each in waiting if each.done() and each.result() is not probe
        )
        with probe:
            pass  # its holder died without a word: the slot must come back
        await asyncio.sleep(0.01)
        permits = [each.result() for each in waiting if each.done()]
        assert len(permits) == 3, "another worker has the probe slot now"
        for permit in permits:
            permit.success()
        await asyncio.gather(*waiting)
        assert breaker.state == "closed"

    asyncio.run(body())


def test_a_success_in_between_starts_the_count_again():
    async def body() -> None:
        breaker = Breaker("r", CircuitBreaker(threshold=2), FakeClock())
        for _ in range(5):
            (await breaker.admit()).failure()
            (await breaker.admit()).success()
        assert breaker.state == "closed"
        disabled = Breaker("r", CircuitBreaker(enabled=False, threshold=1), FakeClock())
        (await disabled.admit()).failure()
        assert disabled.state == "closed"

    asyncio.run(body())


def test_backoff_grows_with_full_jitter_up_to_its_cap_and_honours_retry_after():
    clock = FakeClock()
    made = {"base": 5.0, "multiplier": 2.0, "longest": 60.0, "clock": clock}
    most = Backoff(enabled=True, random=lambda: 1.0, **made)
    assert [most.failed() for _ in range(6)] == [5, 10, 20, 40, 60, 60]
    half = Backoff(enabled=True, random=lambda: 0.5, **made)
    assert [half.failed() for _ in range(3)] == [2.5, 5, 10]
    half.succeeded()
    assert half.failed() == 2.5
    assert half.failed(retry_after=120) == 120
    assert half.remaining == 120
    half.reset()
    assert half.remaining == 0
    plain = Backoff(enabled=False, random=lambda: 0.1, **made)
    assert [plain.failed() for _ in range(3)] == [5, 5, 5]


def test_workers_follow_backlog_and_latency_and_give_way():
    steady = {"least": 1, "most": 16, "throttled": False}
    assert next_workers(4, backlog=1000, arrivals=0, latency=1.0, **steady) == 8  # at most twofold
    assert (
        next_workers(8, backlog=1000, arrivals=0, latency=0.05, **steady) == 7
    )  # five are enough: one at a time
    assert next_workers(8, backlog=0, arrivals=0, latency=0.05, **steady) == 7
    assert next_workers(1, backlog=0, arrivals=0, latency=0.05, **steady) == 1
    assert next_workers(2, backlog=0, arrivals=30, latency=0.1, **steady) == 3
    assert (
        next_workers(8, least=1, most=16, backlog=1000, arrivals=0, latency=1.0, throttled=True)
        == 4
    )
    assert next_workers(16, backlog=10_000, arrivals=0, latency=5.0, **steady) == 16


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        (200, None),
        (204, None),
        (400, Refused),
        (409, Refused),
        (422, Refused),
        (404, Denied),
        (405, Denied),
        (410, Denied),
        (415, Denied),
        (401, Denied),
        (403, Denied),
        (302, Denied),
        (413, TooBig),
        (408, Retry),
        (425, Retry),
        (429, Retry),
        (500, Retry),
        (502, Retry),
        (503, Retry),
    ],
)
def test_what_an_answer_means(status: int, meaning: type[Exception] | None):
    if meaning is None:
        check_status(status, {}, b"")
    else:
        with pytest.raises(meaning):
            check_status(status, {}, b"why")


def test_retry_after_is_seconds_or_a_date():
    assert parse_retry_after("120") == 120
    assert parse_retry_after(
        "Wed, 21 Oct 2026 07:28:00 GMT", now=1792567680.0 - 90
    ) == pytest.approx(90)
    assert parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert parse_retry_after("soon") is None


def test_the_memory_limit_is_the_tightest_cgroup(tmp_path: Path):
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal:       8388608 kB\n")
    write("proc/self/statm", "1000 500 0 0 0 0 0\n")
    assert memory_limit(tmp_path) == 8 << 30
    write("proc/self/cgroup", "0::/pod/app\n")
    write("sys/fs/cgroup/pod/app/memory.max", "max\n")
    write("sys/fs/cgroup/pod/memory.max", str(1 << 30))
    write("sys/fs/cgroup/pod/memory.current", str(123 << 20))
    assert memory_limit(tmp_path) == 1 << 30
    assert memory_used(tmp_path) == 123 << 20
    write("proc/self/cgroup", "4:memory:/docker/x\n1:cpu:/\n")
    write("sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", str(512 << 20))
    assert memory_limit(tmp_path) == 512 << 20
    found = sizes(SendQueue(memory_percent=0.1, memory_limit_ratio=0.5), 1 << 30)
    assert found.max_bytes == int((1 << 30) * 0.05)
    assert found.chunk_size == found.max_bytes // 8
    assert sizes(SendQueue(), 8 << 30).max_bytes == 1 << 30


def test_the_seeds_block_loads_as_it_stands_and_routes_override_it():
    seed = {
        "type": "disk",
        "enabled": True,
        "path": "./queue",
        "max_size": 10000,
        "max_bytes": "1Gi",
        "full_behavior": "drop_oldest",
        "inmemory_blocks": 2048,
        "chunk_size": "512Mi",
        "meta_sync_interval": "1s",
        "write_buffer_size": "256Ki",
        "compression": "snappy",
        "always_queue": True,
        "workers": 0,
        "backoff": {"enabled": True, "multiplier": 2.0},
        "circuit_breaker": {"enabled": True, "threshold": 5, "reset_timeout": "30s"},
        "pipeline_split": {
            "enabled": False,
            "preparer_count": 0,
            "sender_count": 0,
            "channel_size": 256,
        },
        "adaptive_workers": {"enabled": False, "min_workers": 1, "max_workers": 0},
    }
    defaults = build(SendQueue, seed, "seed")
    assert (defaults.max_bytes, defaults.circuit_breaker.reset_timeout) == (1 << 30, 30.0)
    web = {"destination": {"type": "http", "url": "http://x/", "compression": "zstd"}}
    pushed = parse_route("r", web | {"queue": {"circuit_breaker": {"threshold": 9}}}, defaults)
    assert pushed.queue.circuit_breaker.threshold == 9
    assert pushed.queue.circuit_breaker.reset_timeout == 30.0
    assert (pushed.queue.compression, pushed.queue.full_behavior) == ("zstd", "drop_oldest")
    assert (
        parse_route("r", web | {"source": {"topic": "t"}}, defaults).queue.full_behavior == "block"
    )


SEED_FLAGS = {  # the seed's command line: our key, a value as one writes it, what it means
    "-queue-enabled": ("enabled", "false", False),
    "-queue-type": ("type", "memory", "memory"),
    "-queue-path": ("path", "./elsewhere", Path("elsewhere")),
    "-queue-max-size": ("max_size", "20000", 20_000),
    "-queue-max-bytes": ("max_bytes", "2Gi", 2 << 30),
    "-queue-full-behavior": ("full_behavior", "block", "block"),
    "-queue-always-queue": ("always_queue", "true", True),
    "-queue-workers": ("workers", "7", 7),
    "-queue-inmemory-blocks": ("inmemory_blocks", "99", 99),
    "-queue-chunk-size": ("chunk_size", "512Mi", 512 << 20),
    "-queue-meta-sync": ("meta_sync_interval", "2s", 2.0),
    "-queue-stale-flush": ("stale_flush", "5m", 300.0),
    "-queue-write-buffer-size": ("write_buffer_size", "128Ki", 128 << 10),
    "-queue-compression": ("compression", "none", "none"),
    "-queue-retry-interval": ("retry_interval", "1s", 1.0),
    "-queue-max-retry-delay": ("max_retry_delay", "10m", 600.0),
    "-queue-backoff-enabled": ("backoff.enabled", "false", False),
    "-queue-backoff-multiplier": ("backoff.multiplier", "3.5", 3.5),
    "-queue-circuit-breaker-enabled": ("circuit_breaker.enabled", "false", False),
    "-queue-circuit-breaker-threshold": ("circuit_breaker.threshold", "9", 9),
    "-queue-circuit-breaker-reset-timeout": ("circuit_breaker.reset_timeout", "30s", 30.0),
    "-queue-memory-percent": ("memory_percent", "0.10", 0.1),
    "-memory-limit-ratio": ("memory_limit_ratio", "0.5", 0.5),
    "-queue-adaptive-enabled": ("adaptive_enabled", "false", False),
    "-queue-target-utilization": ("target_utilization", "0.7", 0.7),
    "pipeline_split.enabled": ("pipeline_split.enabled", "true", True),
    "pipeline_split.preparer_count": ("pipeline_split.preparer_count", "3", 3),
    "pipeline_split.sender_count": ("pipeline_split.sender_count", "4", 4),
    "pipeline_split.channel_size": ("pipeline_split.channel_size", "5", 5),
    "max_concurrent_sends": ("max_concurrent_sends", "6", 6),
    "global_send_limit": ("global_send_limit", "8", 8),
    "adaptive_workers.enabled": ("adaptive_workers.enabled", "true", True),
    "adaptive_workers.min_workers": ("adaptive_workers.min_workers", "2", 2),
    "adaptive_workers.max_workers": ("adaptive_workers.max_workers", "32", 32),
}


def test_every_flag_of_the_seed_is_reachable_and_reaches_the_routes():
    pairs = [f"exporter.queue.{key}={written}" for key, written, _ in SEED_FLAGS.values()]
    config = load(environ={}, flags=parse_settings(pairs)).config
    web = {"destination": {"type": "http", "url": "http://x/"}}
    route = parse_route("r", web, config.exporter.queue).queue
    for flag, (key, _, meant) in SEED_FLAGS.items():
        found: Any = route
        for word in key.split("."):
            found = getattr(found, word)
        assert found == meant, flag


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({}, "destination.type"),
        ({"destination": {"type": "http"}}, "destination.url is missing"),
        (
            {"destination": {"type": "http", "url": "http://x", "tiemout": 3}},
            "did you mean timeout",
        ),
        (
            {"destination": {"type": "http", "url": "http://x"}, "queue": {"always_queue": False}},
            "always_queue",
        ),
        (
            {"destination": {"type": "http", "url": "http://x"}, "queue": {"max_bytes": "many"}},
            "expected a size",
        ),
        (
            {
                "destination": {"type": "topic", "topic": "t"},
                "source": {"topic": "a", "queue": "b"},
            },
            "not both",
        ),
    ],
)
def test_a_wrong_definition_is_refused_with_what_is_wrong(tree: dict, text: str):
    with pytest.raises(ConfigError, match=text):
        parse_route("r", tree, SendQueue())
