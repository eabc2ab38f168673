"""Routes that take telemetry and deliver it: the real handlers behind a real server, and receivers
that misbehave on order.
"""

import gzip
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf import json_format
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from penstock.config import Config
from penstock.config.schema import HttpServerSettings as HttpSettings
from penstock.config.schema import SendQueueSettings
from penstock.errors import ConfigError, InvalidRequest
from penstock.export.manager import Exports
from penstock.export.spec import parse_route, parse_routes
from penstock.io.fs import Disk
from penstock.metrics import Metrics
from penstock.wire.http.api.export import ExportApi
from penstock.wire.http.api.telemetry import TelemetryApi
from penstock.wire.http.routes import Router, routes_of
from penstock.wire.http.server import HttpServer
from tests.export.making import POOL, exports, status_of
from tests.support.otlp import JSON, PROTOBUF, Answered, Export, OtlpReceiver, one_of_each, traces
from tests.support.remote_write import HEADERS, write_request
from tests.support.wait import eventually

MAX_BODY = 1 << 20
FAST = {"retry_interval": "10ms", "max_retry_delay": "50ms", "meta_sync_interval": "20ms"}
SERIES = ({"__name__": "m"}, [(1.0, 1000)])


def otlp(url: str, source: Any = {"otlp": "all"}, **queue: Any) -> dict[str, Any]:  # noqa: B006
    destination = {"type": "otlp", "url": url, "timeout": "5s"}
    return {"source": source, "destination": destination, "queue": FAST | queue}


def remote_write(url: str, **queue: Any) -> dict[str, Any]:
    destination = {"type": "remote_write", "url": url, "timeout": "5s"}
    return {"source": {"remote_write": True}, "destination": destination, "queue": FAST | queue}


@asynccontextmanager
async def broker(
    directory: Path, routes: dict[str, Any], **more: Any
) -> AsyncIterator[tuple[Exports, httpx.AsyncClient]]:
    async with exports(directory, routes, **more) as running:
        apis = (ExportApi(running), TelemetryApi(running, POOL, MAX_BODY))
        server = HttpServer(Router(routes_of(*apis)), HttpSettings(port=0, max_body=MAX_BODY))
        await server.start()
        try:
            base = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=base, timeout=60) as client:
                yield running, client
        finally:
            await server.stop(1)


async def post(
    client: httpx.AsyncClient, message: Any, path: str = "/v1/traces", **headers: str
) -> httpx.Response:
    body = message if isinstance(message, bytes) else message.SerializeToString()
    return await client.post(path, content=body, headers={"Content-Type": PROTOBUF, **headers})


def accounting(running: Exports, name: str = "t") -> dict[str, Any]:
    return status_of(running.get(name))["queue"]["accounting"]


async def settled(running: Exports, name: str = "t") -> None:
    await eventually(lambda: accounting(running, name)["queued"] == 0)


# Taking


async def test_a_request_arrives_as_it_was_sent(tmp_path: Path):
    plain = traces("a").SerializeToString()
    packed = gzip.compress(plain)
    text = json_format.MessageToJson(traces("b")).encode()
    with OtlpReceiver() as receiver:
        async with broker(tmp_path, {"t": otlp(receiver.url, workers=1)}) as (running, client):
            first = await post(client, plain)
            second = await post(client, packed, **{"Content-Encoding": "gzip"})
            third = await post(client, text, **{"Content-Type": f"{JSON}; charset=utf-8"})
            fourth = await post(client, b"", "/v1/metrics")
            answers = [(one.status_code, one.content) for one in (first, second, third, fourth)]
            assert answers == [(200, b""), (200, b""), (200, b"{}"), (200, b"")]
            types = [one.headers["content-type"] for one in (first, second, third)]
            assert types == [PROTOBUF, PROTOBUF, JSON]
            await settled(running)
            assert accounting(running)["delivered"] == 3  # an empty request is not stored
    assert [one.body for one in receiver.taken] == [plain, packed, text]
    assert [one.headers.get("content-encoding") for one in receiver.taken] == [None, "gzip", None]
    assert receiver.taken[2].headers["content-type"] == f"{JSON}; charset=utf-8"
    assert len({one.headers["idempotency-key"] for one in receiver.taken}) == 3


async def test_signals_go_to_the_routes_that_take_them(tmp_path: Path):
    with OtlpReceiver() as one, OtlpReceiver() as two, OtlpReceiver() as three:
        routes = {
            "spans": otlp(one.url, {"otlp": "traces"}),
            "rest": otlp(two.url, {"otlp": "metrics, logs"}),
            "tenant": otlp(three.url, None),
        }
        async with broker(tmp_path, routes) as (running, client):
            for path, message in one_of_each().items():
                for address in (path, f"/api/v1/routes/tenant{path}"):
                    assert (await post(client, message, address)).status_code == 200
            for name in routes:
                await settled(running, name)
            assert status_of(running.get("tenant"))["source"] == "otlp"
    assert [export.path for export in one.taken] == ["/v1/traces"]
    assert sorted(export.path for export in two.taken) == ["/v1/logs", "/v1/metrics"]
    assert len(three.taken) == 3


async def test_samples_are_written_with_the_headers_of_the_protocol(tmp_path: Path):
    body = write_request(SERIES)
    with OtlpReceiver() as receiver:
        route = remote_write(f"{receiver.url}/api/v1/push?tenant=a")
        async with broker(tmp_path, {"t": route}) as (running, client):
            for path in ("/api/v1/write", "/api/v1/routes/t/write"):
                answer = await client.post(path, content=body, headers=HEADERS)
                assert (answer.status_code, answer.content) == (204, b"")
            await settled(running)
    arrived = [(one.path, one.body) for one in receiver.taken]
    assert arrived == [("/api/v1/push?tenant=a", body)] * 2
    headers = receiver.taken[0].headers
    assert headers["content-encoding"] == "snappy"
    assert headers["content-type"] == PROTOBUF
    assert headers["x-prometheus-remote-write-version"] == "0.1.0"
    assert headers["user-agent"].startswith("penstock/")


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "text"),
    [
        ("/v1/traces", b"hello world", {}, 400, "not protobuf"),
        ("/v1/traces", b"hello", {"Content-Encoding": "gzip"}, 400, "not gzip"),
        ("/v1/traces", b"\x08\x01", {"Content-Encoding": "zstd"}, 415, "gzip is"),
        ("/v1/traces", b"x", {"Content-Type": "text/plain"}, 415, "application/x-protobuf"),
        ("/v1/traces", b"[]", {"Content-Type": JSON}, 400, "not a JSON object"),
        ("/v1/traces", b"\0" * (MAX_BODY + 1), {}, 413, "larger than the limit"),
        (
            "/v1/traces",
            gzip.compress(b"\0" * (MAX_BODY + 1)),
            {"Content-Encoding": "gzip"},
            413,
            "larger than the limit",
        ),
        ("/v1/profiles", b"", {}, 404, "no signal 'profiles'"),
        ("/api/v1/routes/nope/v1/traces", b"\x08\x01", {}, 404, "no route named nope"),
        ("/api/v1/routes/w/v1/traces", b"\x08\x01", {}, 400, "does not take otlp"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
async def test_a_bad_request_gets_a_status_message_in_its_own_type(
    path: str, body: bytes, headers: dict[str, str], status: int, text: str, tmp_path: Path
):
    routes = {"t": otlp("http://127.0.0.1:1"), "w": remote_write("http://127.0.0.1:1/write")}
    async with broker(tmp_path, routes) as (running, client):
        answer = await post(client, body, path, **headers)
        assert answer.status_code == status
        if headers.get("Content-Type", PROTOBUF) == PROTOBUF:
            assert answer.headers["content-type"] == PROTOBUF
            assert text in Status.FromString(answer.content).message
        else:
            assert answer.headers["content-type"] == JSON
            assert text in json_format.Parse(answer.content, Status()).message
        assert accounting(running)["accepted"] == 0


@pytest.mark.parametrize(
    ("body", "headers", "status", "text"),
    [
        (b"hello world", {}, 400, "not a snappy block"),
        (b"\xff\xff\xff\xff\x0f", {}, 413, "larger than the limit"),
        (b"\x05\x10hello", {}, 400, "not protobuf"),
        (b"", {"Content-Encoding": "gzip"}, 415, "must be snappy"),
        (
            b"",
            {"Content-Type": f"{PROTOBUF};proto=io.prometheus.write.v2.Request"},
            415,
            "remote write 1.0",
        ),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
async def test_bad_samples_get_an_error_in_plain_text(
    body: bytes, headers: dict[str, str], status: int, text: str, tmp_path: Path
):
    async with broker(tmp_path, {"t": remote_write("http://127.0.0.1:1/")}) as (running, client):
        answer = await client.post("/api/v1/write", content=body, headers=HEADERS | headers)
        assert answer.status_code == status
        assert answer.headers["content-type"].startswith("text/plain")
        assert text in answer.text
        assert accounting(running)["accepted"] == 0


async def test_without_a_route_for_the_signal_the_exporter_is_told_so(tmp_path: Path):
    async with broker(tmp_path, {"t": otlp("http://127.0.0.1:1", {"otlp": "logs"})}) as (_, client):
        answer = await post(client, traces("a"))
        assert answer.status_code == 404
        assert "no route takes traces" in Status.FromString(answer.content).message
        answer = await client.post("/api/v1/write", content=write_request(SERIES), headers=HEADERS)
        assert answer.status_code == 404
        assert "no route takes samples" in answer.text


@pytest.mark.parametrize("behavior", ["block", "drop_newest"])
async def test_a_full_queue_is_503_with_retry_after(behavior: str, tmp_path: Path):
    route = otlp("http://127.0.0.1:1", max_size=2, full_behavior=behavior, block_timeout="10ms")
    async with broker(tmp_path, {"t": route}) as (running, client):
        for name in ("a", "b"):
            assert (await post(client, traces(name))).status_code == 200
        answer = await post(client, traces("c"))
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert "is full" in Status.FromString(answer.content).message
        assert accounting(running)["queued"] == 2


class FullDisk(Disk):
    """A disk with no byte free."""

    full = False

    def free_bytes(self, path: Path) -> int:
        return 0 if self.full else super().free_bytes(path)


async def test_a_full_disk_is_503_with_retry_after(tmp_path: Path):
    disk = FullDisk()
    async with broker(tmp_path, {"t": otlp("http://127.0.0.1:1")}, fs=disk) as (running, client):
        disk.full = True
        await eventually(lambda: running.get("t").queue.gauges()["queue_disk_available_bytes"] == 0)
        answer = await post(client, traces("c"))
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert "the disk has" in Status.FromString(answer.content).message
        disk.full = False
        await eventually(lambda: running.get("t").queue.gauges()["queue_disk_available_bytes"] > 0)
        assert (await post(client, traces("c"))).status_code == 200


async def test_a_route_that_cannot_start_is_503_with_retry_after(tmp_path: Path):
    with OtlpReceiver() as receiver:
        async with exports(tmp_path, {"t": otlp(receiver.url)}):  # it has the directory
            other = Exports(
                Config(data_directory=tmp_path, routes={"t": otlp(receiver.url)}),
                pool=POOL,
                metrics=Metrics(),
            )
            await other.start()
            assert other.failed
            server = HttpServer(
                Router(routes_of(TelemetryApi(other, POOL, MAX_BODY))), HttpSettings(port=0)
            )
            await server.start()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
                for path in ("/v1/traces", "/api/v1/routes/t/v1/traces"):
                    answer = await post(client, traces("a"), path)
                    assert answer.status_code == 503
                    assert int(answer.headers["retry-after"]) > 0
            await server.stop(1)
            await other.stop()


async def test_a_plain_push_to_such_a_route_is_refused(tmp_path: Path):
    async with broker(tmp_path, {"t": otlp("http://127.0.0.1:1")}) as (running, client):
        answer = await client.post("/api/v1/routes/t/push", json={"records": [1]})
        assert answer.status_code == 400
        assert "/api/v1/routes/t/v1/{signal}" in answer.json()["error"]
        assert accounting(running)["accepted"] == 0


# Definitions


@pytest.mark.parametrize(
    ("source", "destination", "text"),
    [
        ({"otlp": "spans"}, {"type": "otlp", "url": "http://x"}, "not 'spans'"),
        ({"otlp": "all"}, {"type": "http", "url": "http://x"}, "destination of type otlp"),
        ({"remote_write": True}, {"type": "otlp", "url": "http://x"}, "of type remote_write"),
        ({"topic": "a"}, {"type": "otlp", "url": "http://x"}, "not records of a topic"),
        ({"otlp": "all"}, {"type": "otlp", "url": "http://x/v1/traces"}, "base address"),
        ({"otlp": "all"}, {"type": "otlp"}, "url is missing"),
        (
            {"otlp": "all"},
            {"type": "otlp", "url": "http://x", "headers": {"content-type": "x"}},
            "must not contain content-type",
        ),
        (
            {"remote_write": True},
            {"type": "remote_write", "url": "http://x", "headers": {"User-Agent": "x"}},
            "must not contain user-agent",
        ),
        ({}, {"type": "otlp", "url": "x"}, "must be an address"),
    ],
)
def test_what_cannot_work_is_refused(source: Any, destination: Any, text: str):
    with pytest.raises(ConfigError, match=text):
        parse_route("t", {"source": source, "destination": destination}, SendQueueSettings())


async def test_one_route_takes_a_signal(tmp_path: Path):
    routes = {"a": otlp("http://x"), "b": otlp("http://x", {"otlp": "logs"})}
    with pytest.raises(ConfigError, match="route b: logs are taken by route a"):
        parse_routes(Config(data_directory=tmp_path, routes=routes))
    async with exports(tmp_path, {"a": otlp("http://127.0.0.1:1")}) as running:
        with pytest.raises(InvalidRequest, match="traces are taken by route a"):
            await running.create("b", otlp("http://x", {"otlp": "traces"}))
        await running.create("c", otlp("http://127.0.0.1:1", None))


def test_samples_are_sent_one_request_at_a_time_and_exporters_hear_of_a_full_queue():
    defaults = SendQueueSettings(workers=8, drain_order="newest_first")
    samples = parse_route("t", remote_write("http://x"), defaults).queue
    assert (samples.workers, samples.drain_order) == (1, "fifo")
    assert (samples.full_behavior, samples.block_timeout) == ("block", 5.0)
    assert parse_route("t", remote_write("http://x", workers=4), defaults).queue.workers == 4
    spans = parse_route("t", otlp("http://x"), defaults).queue
    assert (spans.workers, spans.full_behavior) == (8, "block")


# Delivering


def refused(status: int, text: str, **more: Any) -> Answered:
    return Answered(status, Status(message=text), **more)


async def letters(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    return (await client.get("/api/v1/routes/t/deadletters")).json()["letters"]


@pytest.mark.parametrize("status", [400, 408, 422, 500, 501])
async def test_what_must_not_be_retried_becomes_a_dead_letter_with_the_reason(
    status: int, tmp_path: Path
):
    def rule(export: Export) -> Answered | None:
        is_bad = export.message.resource_spans[0].scope_spans[0].spans[0].name == "bad"
        return refused(status, "span without a trace id") if is_bad else None

    with OtlpReceiver(rule) as receiver:
        async with broker(tmp_path, {"t": otlp(receiver.url, workers=1)}) as (running, client):
            for name in ("a", "bad", "b"):
                await post(client, traces(name, "together"))
            await settled(running)
            assert len(receiver.seen) == 3  # each was sent once, and none was cut
            assert receiver.spans == ["a", "together", "b", "together"]
            (letter,) = await letters(client)
            assert letter["reason"] == "refused"
            assert f"(/v1/traces) answered {status}" in letter["detail"]
            assert letter["detail"].endswith("span without a trace id")
            assert accounting(running)["deadLettered"] == 1
            receiver.rule = lambda _: None
            assert (await client.post("/api/v1/routes/t/replay")).json() == {"records": 1}
            await settled(running)
            assert receiver.spans[4:] == ["bad", "together"]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_what_may_pass_is_retried_not_before_retry_after(status: int, tmp_path: Path):
    refusals = [refused(status, "later", retry_after="1"), refused(status, "later")]
    times: list[float] = []

    def rule(_: Export) -> Answered | None:
        times.append(time.monotonic())
        return refusals.pop(0) if refusals else None

    with OtlpReceiver(rule) as receiver:
        async with broker(tmp_path, {"t": otlp(receiver.url)}) as (running, client):
            await post(client, traces("a"))
            await settled(running)
            assert receiver.spans == ["a"]
            assert len(times) == 3
            assert times[1] - times[0] >= 1.0
            assert len({one.headers["idempotency-key"] for one in receiver.seen}) == 1
            assert accounting(running)["delivered"] == 1


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_credentials_and_addresses_pause_the_route(status: int, tmp_path: Path):
    with OtlpReceiver(lambda _: refused(status, "no")) as receiver:
        async with broker(tmp_path, {"t": otlp(receiver.url)}) as (running, client):
            await post(client, traces("a"))
            await eventually(lambda: running.get("t").paused)
            assert "/v1/traces" in (running.get("t").paused or "")
            assert accounting(running)["queued"] == 1
            receiver.rule = lambda _: None
            await running.get("t").resume()
            await settled(running)
            assert receiver.spans == ["a"]


@pytest.mark.parametrize("kind", [PROTOBUF, JSON])
async def test_a_partial_success_is_delivered_and_counted(kind: str, tmp_path: Path):
    answer = ExportTraceServiceResponse()
    answer.partial_success.rejected_spans = 7
    answer.partial_success.error_message = "too old"
    metrics = Metrics()
    message = traces("a")
    body = message.SerializeToString()
    if kind == JSON:
        body = json_format.MessageToJson(message).encode()
    with OtlpReceiver(lambda _: Answered(200, answer)) as receiver:
        async with broker(tmp_path, {"t": otlp(receiver.url)}, metrics=metrics) as (
            running,
            client,
        ):
            await post(client, body, **{"Content-Type": kind})
            await settled(running)
            assert accounting(running)["delivered"] == 1
            assert await letters(client) == []
    assert len(receiver.seen) == 1
    assert b'penstock_export_rejected_items_total{route="t"} 7' in metrics.text()


@pytest.mark.parametrize("kind", [PROTOBUF, JSON])
@pytest.mark.parametrize("resources", ["many", "one"])
async def test_a_request_that_is_too_large_is_cut_until_it_fits(
    resources: str, kind: str, tmp_path: Path
):
    names = [f"span {number}" for number in range(13)]
    failures = ["later"]
    request = traces(*names)
    if resources == "one":  # as an SDK sends them
        request = traces(names[0])
        for name in names[1:]:
            request.resource_spans[0].scope_spans[0].spans.add(name=name)

    def rule(export: Export) -> Answered | None:
        scopes = [one.scope_spans[0] for one in export.message.resource_spans]
        if sum(len(scope.spans) for scope in scopes) > 2:
            return Answered(413)
        if receiver.spans[3:] and failures:
            return refused(503, failures.pop())
        return None

    body = request.SerializeToString()
    if kind == JSON:
        body = json_format.MessageToJson(request).encode()
    with OtlpReceiver(rule) as receiver:
        async with broker(tmp_path, {"t": otlp(receiver.url)}) as (running, client):
            await post(client, body, **{"Content-Type": kind})
            await settled(running)
            assert accounting(running)["delivered"] == 1
            assert await letters(client) == []
    assert not failures
    assert receiver.spans == names  # in order and once each, although an attempt failed between
    keys = [one.headers["idempotency-key"] for one in receiver.taken]
    assert len(set(keys)) == len(keys)


async def test_only_what_was_not_delivered_of_a_cut_request_is_a_dead_letter(tmp_path: Path):
    def rule(export: Export) -> Answered | None:
        found = [one.scope_spans[0].spans[0].name for one in export.message.resource_spans]
        if len(found) > 1 or "huge" in found:
            return Answered(413)
        return refused(400, "bad span") if "bad" in found else None

    with OtlpReceiver(rule) as receiver:
        async with broker(tmp_path, {"t": otlp(receiver.url)}) as (running, client):
            await post(client, traces("a", "huge", "bad", "b"))
            await settled(running)
            assert sorted(receiver.spans) == ["a", "b"]
            found = await letters(client)
            assert len(found) == 2
            assert accounting(running) | {"dropped": {}} == {
                "accepted": 1,
                "delivered": 0,
                "deadLettered": 1,
                "dropped": {},
                "queued": 0,
            }
            receiver.rule = lambda _: None
            await client.post("/api/v1/routes/t/replay")
            await settled(running)
            assert sorted(receiver.spans) == ["a", "b", "bad", "huge"]


async def test_one_span_that_is_too_large_is_a_dead_letter(tmp_path: Path):
    with OtlpReceiver(lambda _: Answered(413)) as receiver:
        async with broker(tmp_path, {"t": otlp(receiver.url)}) as (running, client):
            await post(client, traces("a"))
            await settled(running)
            (letter,) = await letters(client)
            assert letter["reason"] == "too_large"
            head = json.loads(letter["record"].partition("\n")[0])
            assert head["signal"] == "traces"
