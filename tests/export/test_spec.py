"""Definitions of routes: what they mean, and what is refused before anything runs."""

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config, build, load
from penstock.config.governor_flags import translate_flags
from penstock.config.load import parse_settings
from penstock.config.schema import Exporter, SendQueueSettings
from penstock.errors import ConfigError, InvalidRequest
from penstock.export.manager import Exports
from penstock.export.spec import parse_route, parse_routes
from tests.export.making import exports
from tests.support.certificates import Authority

WEB = {"type": "http", "url": "http://host/in"}


def to(kind: Any, **target: Any) -> dict[str, Any]:
    return {"destination": {"type": kind, **target}}


def of(**source: Any) -> dict[str, Any]:
    return {"source": source}


def web(**target: Any) -> dict[str, Any]:
    return {"destination": WEB | target}


def table(name: str, **more: Any) -> dict[str, Any]:
    return to("postgres", url="postgres://host/db", table=name, **more)


def with_queue(**queue: Any) -> dict[str, Any]:
    return {"destination": WEB, "queue": queue}


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
    defaults = build(SendQueueSettings, seed, "seed")
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
        result: Any = route
        for word in key.split("."):
            result = getattr(result, word)
        assert result == meant, flag


def test_the_command_line_of_metrics_governor_is_taken_as_it_stands():
    flags = {flag: one for flag, one in SEED_FLAGS.items() if flag.startswith("-")}
    for dash, join in (("-", " "), ("--", " "), ("-", "="), ("--", "=")):
        words = ["--http-port", "0"]
        for flag, (_, written, _) in flags.items():
            words += f"{dash}{flag.lstrip('-')}{join}{written}".split()
        expected = ["--http-port", "0"]
        for key, written, _ in flags.values():
            expected += ["--set", f"exporter.queue.{key}={written}"]
        assert translate_flags(words) == expected


def test_a_flag_that_is_true_or_false_may_stand_alone():
    assert translate_flags(["-queue-always-queue", "--no-topics", "--queue-enabled"]) == [
        *("--set", "exporter.queue.always_queue=true", "--no-topics"),
        *("--set", "exporter.queue.enabled=true"),
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-queue-max-sise", "1"], "did you mean -queue-max-size"),
        (["-queue-max-size"], "needs a value"),
        (["-queue-max-size", "--no-topics"], "needs a value"),
    ],
)
def test_a_wrong_flag_is_said(words: list[str], text: str):
    with pytest.raises(ConfigError, match=text):
        translate_flags(words)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({}, "destination.type"),
        (to(["http"]), "destination.type must be one of"),
        (to("http"), "destination.url is missing"),
        (web(tiemout=3), "did you mean timeout"),
        (web(url="lake.example/in"), "destination.url must be an address such as https://host/"),
        (web(url="127.0.0.1:8080/in"), "destination.url must be an address"),
        (web(url="http://host:99999/"), "destination.url must be an address"),
        (web(url="http://[::1/"), "destination.url must be an address"),
        (web(url="http://host/a b"), "%XX"),
        (web(url="http://host/\r\nX: y"), "%XX"),
        (web(timeout=0), "timeout"),
        (web(connections=0), "connections"),
        (web(header_prefix="X-"), "header_prefix needs format: raw"),
        (web(format="raw", header_prefix="X-"), "header_prefix needs source.envelope: true"),
        (to("postgres", url="host/db", table="t"), "such as postgresql://"),
        (to("broker", url="host:1", topic="t"), "such as https://"),
        (to("topic", topic="../up"), "destination.topic: a topic name must not contain"),
        (web() | of(topic="../up"), "source.topic: a topic name must not contain"),
        (web() | of(topic="t", start="yesterday"), "earliest, latest or an offset"),
        (web() | of(topic="t", start="9" * 5000), "larger than any offset"),
        (web() | of(group="g"), "names no topic, queue, kafka, otlp or remote_write"),
        (to("topic", topic="t") | of(topic="t"), "would feed itself"),
        (to("topic", topic="t") | of(topic="a", queue="b"), "one of topic, queue and kafka"),
        (web() | of(queue="a\0b"), "source.queue: queue contains a NUL"),
        (web() | of(queue="q", group="a\0b"), "source.group: consumerGroup contains a NUL"),
        (
            to("queue", queue="q") | of(topic="t", envelope=True),
            "envelope is for messages of a queue",
        ),
        (table("ev\0ents"), "destination.table contains a control character: 'ev\\x00ents'"),
        (table("events\n"), "destination.table contains a control character"),
        (table("t", column="a\x7f"), "destination.column contains a control character"),
        (table("a..b"), "1 to 63 bytes"),
        (table("t" * 64), "1 to 63 bytes"),
        (to("queue", queue="a\0b"), "destination.queue contains a control character"),
        (to("queue", queue="q", partition="\t"), "destination.partition contains a control"),
        (to("queue", queue="q", partition=""), "partition must not be empty"),
        (with_queue(always_queue=False), "always_queue"),
        (with_queue(max_bytes="many"), "expected a size"),
        (with_queue(memory_percent=150), "a share between 0 and 1"),
        (with_queue(memory_percent="120%"), "a share between 0 and 1"),
        (with_queue(target_utilization=-0.1), "a share between 0 and 1"),
        (with_queue(memory_percent="nan"), "a share between 0 and 1"),
        (with_queue(max_bytes=0), "max_bytes must be above 0"),
        (with_queue(catchup_rate=-1), "catchup_rate"),
        (with_queue(backoff={"multiplier": "inf"}), "a number"),
        (with_queue(circuit_breaker={"threshold": 0}), "circuit_breaker.threshold"),
        (
            with_queue(adaptive_workers={"enabled": True, "min_workers": 9, "max_workers": 2}),
            "below min_workers",
        ),
        (with_queue(path="/elsewhere"), "queue.path is set for all routes"),
        (with_queue(enabled=False), "queue.enabled is set for all routes"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_defined(tree: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=re.escape(text)):
        parse_route("r", tree, SendQueueSettings())


def test_a_share_may_be_written_as_a_percentage():
    assert (
        parse_route("r", with_queue(memory_percent="10%"), SendQueueSettings()).queue.memory_percent
        == 0.1
    )


def test_all_mistakes_of_all_routes_are_reported_at_once_and_no_password_with_them():
    routes = {
        "a": {
            "destination": {"type": "postgres", "url": "mysql://me:s3cret@host/db", "table": "t"}
        },
        "b/c": web(),
        "d": web(url="nowhere") | {"batch": {"records": 0}},
    }
    defaults = Exporter(queue=SendQueueSettings(always_queue=False))
    with pytest.raises(ConfigError) as refused:
        parse_routes(Config(routes=routes, exporter=defaults))
    text = str(refused.value)
    for part in (
        "always_queue",
        "route a: destination.url",
        "'b/c' is not a route name",
        "d: destination.url",
        "d: batch.",
    ):
        assert part in text
    assert "s3cret" not in text


@pytest.mark.parametrize(
    "target",
    [
        {"ca": "nothing.pem", "url": "https://host/"},
        {"headers": {"X": "a\r\nY: b"}},
    ],
)
async def test_what_only_making_it_shows_to_be_wrong_is_the_callers_mistake_too(
    tmp_path: Path, target: dict[str, Any]
):
    async with exports(tmp_path, {}) as running:
        with pytest.raises(InvalidRequest, match="route r"):
            await running.create("r", web(**target))
        assert running.names() == []


async def test_over_the_api_a_ca_is_a_text_or_a_file_of_one_directory_and_answers_say_nothing_of_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    allowed = tmp_path / ".penstock" / "certificates"
    allowed.mkdir(parents=True)
    pem = Authority().write(allowed, "ca")[0].read_text()
    (allowed / "text.pem").write_text("root:x:0:0")
    (allowed / "directory").mkdir()
    outside = tmp_path / "outside.pem"
    outside.write_text(pem)

    async def refusal(running: Exports, ca: str) -> str:
        with pytest.raises(InvalidRequest) as refused:
            await running.create("r", web(url="https://host/", ca=ca))
        return str(refused.value)

    async with exports(tmp_path, {}) as running:
        wrong = [
            "missing.pem",
            "text.pem",
            "directory",
            str(outside),
            "/nowhere/x",
            "/etc/passwd",
            "../x",
            "a\0b",
        ]
        answers = {await refusal(running, ca) for ca in [*wrong, "-----BEGIN nothing"]}
        assert len(answers) == 1, answers
        assert "exporter.certificates" in answers.pop()
        assert "missing.pem" in caplog.text, "the operator is told"
        for number, ca in enumerate(["ca.pem", pem]):
            await running.create(f"r{number}", web(url="https://host/", ca=ca))
    async with exports(
        tmp_path, {}
    ) as running:  # they start again, as does one that an older version accepted
        assert running.names() == ["r0", "r1"]
        await running.delete("r0")
        await running.delete("r1")
        named = {
            "type": "postgres",
            "url": "postgres://host/db?sslrootcert=/etc/passwd",
            "table": "t",
        }
        with pytest.raises(InvalidRequest, match=r"names files of the broker \(sslrootcert\)"):
            await running.create("r", {"destination": named})
    async with exports(tmp_path, {"mine": web(url="https://host/", ca=str(outside))}):
        pass  # what the operator writes into the configuration may name any file
    with pytest.raises(AssertionError, match="No such file"):
        async with exports(tmp_path, {"mine": web(url="https://host/", ca="/nowhere/x")}):
            pass
