"""What it costs to put a broker before a telemetry backend.

- OTLP requests into a route, against the same bytes pushed to a route as plain records: what the
  protocol adds to a durable push (the body is unpacked and its outermost level checked).
- The same, against a backend that only reads the request and answers from memory: the durable buffer
  beside none. Every request of ours is on disk, with an fsync, before it is answered.
- Requests that wait in a send queue, delivered to that backend: one stored request is one sent one.

    make bench B=telemetry
"""

import asyncio
import gzip
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import uvloop
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bench.export import sink
from bench.harness import Contest, Figure
from penstock.net import HttpClient
from tests.support.broker import ServeProcess

CONNECTIONS, SECONDS = 16, 2.0
SPANS = 100  # in a request
ROUTES = "/api/v1/routes"
BACKLOG = 3000  # requests
PROTOBUF = [("Content-Type", "application/x-protobuf"), ("Content-Encoding", "gzip")]
OCTETS = [("Content-Type", "application/octet-stream")]
QUEUE = {"max_size": 1_000_000, "full_behavior": "block", "retry_interval": "1s"}


def request() -> bytes:
    """Spans as an SDK sends them, compressed."""
    message = ExportTraceServiceRequest()
    spans = message.resource_spans.add().scope_spans.add().spans
    for number in range(SPANS):
        span = spans.add(name=f"GET /orders/{number % 7}")
        span.trace_id, span.span_id = number.to_bytes(16, "big"), number.to_bytes(8, "big")
        span.start_time_unix_nano = 1_700_000_000_000_000_000 + number * 1_000_003
        span.end_time_unix_nano = span.start_time_unix_nano + 12_345_678
        span.attributes.add(key="http.route").value.string_value = "/orders/{id}"
        span.attributes.add(key="http.status_code").value.int_value = 200
    return gzip.compress(message.SerializeToString())


BODY = request()


def post(url: str, headers: list[tuple[str, str]]) -> float:
    """Requests per second over CONNECTIONS connections."""
    parts = urlsplit(url)

    async def body() -> float:
        client = HttpClient(f"{parts.scheme}://{parts.netloc}", pool_size=CONNECTIONS)
        began, done = time.perf_counter(), 0

        async def load() -> None:
            nonlocal done
            while time.perf_counter() - began < SECONDS:
                answer = await client.request("POST", parts.path, BODY, headers)
                assert answer.status < 300, answer
                done += 1

        await asyncio.gather(*(load() for _ in range(CONNECTIONS)))
        await client.close()
        return done / (time.perf_counter() - began)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(body())


class Buffer:
    """A broker with a route that takes OTLP, and one that takes plain records; both are paused."""

    def __init__(self, broker: ServeProcess, backend: str) -> None:
        self.url = broker.url
        self._client = httpx.Client(base_url=broker.url, timeout=60)
        base = backend.removesuffix("/in")
        for name, destination in (
            ("otlp", {"type": "otlp", "url": base}),
            ("plain", {"type": "http", "url": backend, "format": "raw"}),
        ):
            definition = {"name": name, "destination": destination, "queue": QUEUE}
            self._client.post(ROUTES, json=definition).raise_for_status()
            self._client.post(f"{ROUTES}/{name}/pause").raise_for_status()

    def push(self, name: str, path: str, headers: list[tuple[str, str]]) -> float:
        rate = post(f"{self.url}{ROUTES}/{name}/{path}", headers)
        self._client.post(f"{ROUTES}/{name}/purge").raise_for_status()
        return rate

    def deliver(self) -> float:
        """Requests per second from the send queue to the backend."""
        while self._queued() < BACKLOG:
            post(f"{self.url}{ROUTES}/otlp/v1/traces", PROTOBUF)
        count, began = self._queued(), time.perf_counter()
        self._client.post(f"{ROUTES}/otlp/resume").raise_for_status()
        while self._queued():
            time.sleep(0.005)
        rate = count / (time.perf_counter() - began)
        self._client.post(f"{ROUTES}/otlp/pause").raise_for_status()
        return rate

    def _queued(self) -> int:
        return int(self._client.get(f"{ROUTES}/otlp").json()["queue"]["records"])

    def close(self) -> None:
        self._client.close()


@contextmanager
def buffer(backend: str) -> Iterator[Buffer]:
    directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    directory.chmod(0o755)
    try:
        with ServeProcess(directory) as broker:
            made = Buffer(broker, backend)
            yield made
            made.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def contests() -> Iterator[Contest | Figure]:
    with sink() as backend, buffer(backend) as made:
        otlp = partial(made.push, "otlp", "v1/traces", PROTOBUF)
        yield Contest(
            f"OTLP into a route, {SPANS} spans per request, {CONNECTIONS} connections",
            "requests/s",
            otlp,
            partial(made.push, "plain", "push", OCTETS),
            "the same bytes pushed to a route",
            at_least=0.7,
            note="ours also unpacks the body and checks its outermost level",
        )
        yield Contest(
            f"OTLP into a route beside a backend alone, {CONNECTIONS} connections",
            "requests/s",
            otlp,
            lambda: post(backend, PROTOBUF),
            "a server that keeps nothing",
            note="ours has every request on disk, with an fsync, before it answers",
        )
        rates = sorted(made.deliver() for _ in range(3))
        yield Figure("OTLP from the send queue to a backend", rates[1], "requests/s")
