"""Telemetry through a broker that is killed, to a backend that is away: the exporters of
OpenTelemetry's SDK, and a real Prometheus.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry._logs import LogRecord
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from penstock.database.embedded import EmbeddedPostgres
from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess
from tests.support.otlp import OtlpReceiver
from tests.support.prometheus import PROGRAM, PrometheusProcess
from tests.support.remote_write import HEADERS, write_request
from tests.support.wait import until

pytestmark = pytest.mark.xdist_group("telemetry")
PATIENCE_SECONDS = 300.0
FAST = {
    "retry_interval": "10ms",
    "max_retry_delay": "200ms",
    "circuit_breaker": {"threshold": 3, "reset_timeout": "200ms"},
}
needs_prometheus = pytest.mark.skipif(PROGRAM is None, reason="install prometheus to run this")


@pytest.fixture
def broker(postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[BrokerProcess]:
    made = BrokerProcess(tmp_path / "broker", database_url=fresh_database(postgres))
    made.start()
    yield made
    assert made.stop() == 0, made.log


def create(broker: BrokerProcess, **route: Any) -> None:
    queue = FAST | route.pop("queue", {})
    httpx.post(
        f"{broker.url}/api/v1/routes", json={**route, "queue": queue}, timeout=60
    ).raise_for_status()


def accounting(broker: BrokerProcess, name: str) -> dict[str, Any]:
    answer = httpx.get(f"{broker.url}/api/v1/routes/{name}", timeout=60).raise_for_status()
    return dict(answer.json()["queue"]["accounting"])


def metric(broker: BrokerProcess, name: str, route: str) -> float:
    text = httpx.get(f"{broker.url}/metrics", timeout=60).raise_for_status().text
    start = f'penstock_export_{name}{{route="{route}"}} '
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return float(line.removeprefix(start))


def drained(broker: BrokerProcess, name: str) -> bool:
    return int(accounting(broker, name)["queued"]) == 0


def spans(broker: BrokerProcess, **options: Any) -> TracerProvider:
    exporter = OTLPSpanExporter(f"{broker.url}/v1/traces", timeout=PATIENCE_SECONDS, **options)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_export_batch_size=10))
    return provider


def record(provider: TracerProvider, numbers: range) -> None:
    tracer = provider.get_tracer("test")
    for number in numbers:
        tracer.start_span(f"span {number}").end()


def flush(provider: Any) -> None:
    assert provider.force_flush(int(PATIENCE_SECONDS * 1000)) is not False


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
def test_the_exporters_of_the_sdk_deliver_all_signals(
    broker: BrokerProcess, compression: Compression
):
    with OtlpReceiver() as receiver:
        create(
            broker,
            name="telemetry",
            source={"otlp": "all"},
            destination={"type": "otlp", "url": receiver.url},
        )
        tracing = spans(broker, compression=compression)
        record(tracing, range(25))
        flush(tracing)
        metrics = OTLPMetricExporter(f"{broker.url}/v1/metrics", compression=compression)
        reader = PeriodicExportingMetricReader(metrics)
        meters = MeterProvider([reader], shutdown_on_exit=False)
        meters.get_meter("test").create_counter("orders").add(7)
        flush(meters)
        logs = LoggerProvider(shutdown_on_exit=False)
        logs.add_log_record_processor(
            BatchLogRecordProcessor(
                OTLPLogExporter(f"{broker.url}/v1/logs", compression=compression)
            )
        )
        logs.get_logger("shop").emit(LogRecord(body="sold"))
        flush(logs)
        until(lambda: drained(broker, "telemetry"))
        for provider in (tracing, meters, logs):
            provider.shutdown()
        assert accounting(broker, "telemetry")["deadLettered"] == 0
    assert sorted(receiver.spans) == sorted(f"span {number}" for number in range(25))
    by_path = {export.path: export.message for export in receiver.taken}
    (points,) = by_path["/v1/metrics"].resource_metrics[0].scope_metrics
    assert points.metrics[0].sum.data_points[0].as_int == 7
    (lines,) = by_path["/v1/logs"].resource_logs[0].scope_logs
    assert lines.log_records[0].body.string_value == "sold"
    codings = {export.headers.get("content-encoding") for export in receiver.taken}
    assert codings == ({"gzip"} if compression is Compression.Gzip else {None})


def test_every_span_arrives_once_when_the_backend_is_away_and_the_broker_is_killed(
    broker: BrokerProcess,
):
    with OtlpReceiver() as receiver:
        create(
            broker,
            name="telemetry",
            source={"otlp": "traces"},
            destination={"type": "otlp", "url": receiver.url},
        )
        provider = spans(broker)
        record(provider, range(50))
        flush(provider)
        until(lambda: drained(broker, "telemetry"))
        receiver.close()
        for first in (50, 150):
            record(provider, range(first, first + 50))
            flush(provider)
            assert metric(broker, "queue_records", "telemetry") > 0
            broker.kill()
            record(provider, range(first + 50, first + 100))  # the exporter retries meanwhile
            broker.start()
            flush(provider)
        receiver.open()
        until(lambda: drained(broker, "telemetry"), PATIENCE_SECONDS)
        provider.shutdown()
        found = accounting(broker, "telemetry")
        assert found["accepted"] == found["delivered"] == len(receiver.taken)
        assert metric(broker, "queue_records", "telemetry") == 0
        assert metric(broker, "dead_letters", "telemetry") == 0
    assert sorted(receiver.spans) == sorted(f"span {number}" for number in range(250))


class SamplePusher:
    """Sends a sample of each of three series per request, and retries until it is accepted."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self._start = int(time.time() * 1000) - 3_600_000
        self.sent = 0

    def push(self, count: int) -> None:
        with httpx.Client(timeout=60) as client:
            for _ in range(count):
                body = write_request(
                    *(
                        (
                            {"__name__": "numbers", "series": series},
                            [(float(self.sent), self._start + 1000 * self.sent)],
                        )
                        for series in "abc"
                    )
                )
                until(lambda body=body: self._is_taken(client, body), PATIENCE_SECONDS)
                self.sent += 1

    def _is_taken(self, client: httpx.Client, body: bytes) -> bool:
        url = f"{self._broker.url}/api/v1/write"
        try:
            return client.post(url, content=body, headers=HEADERS).status_code == 204
        except httpx.TransportError:
            return False


@needs_prometheus
def test_every_sample_is_in_prometheus_once_when_it_was_away_and_the_broker_is_killed(
    broker: BrokerProcess, tmp_path: Path
):
    prometheus = PrometheusProcess(tmp_path / "prometheus").start()
    create(
        broker,
        name="samples",
        source={"remote_write": True},
        destination={"type": "remote_write", "url": f"{prometheus.url}/api/v1/write"},
        queue={"catchup_rate": 50},
    )
    pusher = SamplePusher(broker)
    try:
        pusher.push(50)
        until(lambda: drained(broker, "samples"), PATIENCE_SECONDS)
        prometheus.stop()
        pusher.push(100)
        assert metric(broker, "queue_records", "samples") == 100
        broker.kill()  # while the backend is away
        broker.start()
        pusher.push(100)
        prometheus.start()
        until(lambda: accounting(broker, "samples")["delivered"] > 60, PATIENCE_SECONDS)
        broker.kill()  # while it sends the backlog
        broker.start()
        pusher.push(50)
        until(lambda: drained(broker, "samples"), PATIENCE_SECONDS)
        found = accounting(broker, "samples")
        assert (found["accepted"], found["deadLettered"]) == (300, 0)
        assert metric(broker, "dead_letters", "samples") == 0
        everything = [float(number) for number in range(300)]
        assert prometheus.samples("numbers") == dict.fromkeys("abc", everything)
    finally:
        prometheus.stop()


@needs_prometheus
def test_what_prometheus_refuses_is_a_dead_letter_and_the_next_samples_arrive(
    broker: BrokerProcess, tmp_path: Path
):
    now = int(time.time() * 1000)

    def push(*samples: tuple[float, int]) -> None:
        body = write_request(({"__name__": "numbers", "series": "a"}, list(samples)))
        url = f"{broker.url}/api/v1/routes/samples/write"
        assert httpx.post(url, content=body, headers=HEADERS, timeout=60).status_code == 204

    with PrometheusProcess(tmp_path / "prometheus") as prometheus:
        url = f"{prometheus.url}/api/v1/write"
        create(broker, name="samples", destination={"type": "remote_write", "url": url})
        push((1.0, now - 3000))
        push((1.0, now - 3000))  # again: Prometheus has it, and keeps one
        push((2.0, now - 2000))
        push((9.0, now - 3000))  # too late
        push((3.0, now - 1000))
        until(lambda: drained(broker, "samples"), PATIENCE_SECONDS)
        page = httpx.get(f"{broker.url}/api/v1/routes/samples/deadletters").json()
        assert ["out of order" in letter["detail"] for letter in page["letters"]] == [True]
        assert prometheus.samples("numbers") == {"a": [1.0, 2.0, 3.0]}


@needs_prometheus
def test_a_prometheus_writes_through_the_broker_to_another(broker: BrokerProcess, tmp_path: Path):
    with PrometheusProcess(tmp_path / "receiver") as receiver:
        create(
            broker,
            name="samples",
            source={"remote_write": True},
            destination={"type": "remote_write", "url": f"{receiver.url}/api/v1/write"},
        )
        config = f"""
global: {{scrape_interval: 1s, external_labels: {{series: sender}}}}
scrape_configs: [{{job_name: broker, static_configs: [{{targets: ["{broker.url[7:]}"]}}]}}]
remote_write: [{{url: "{broker.url}/api/v1/write"}}]
"""
        with PrometheusProcess(tmp_path / "sender", config):
            until(lambda: len(receiver.samples("up").get("sender", [])) >= 3, PATIENCE_SECONDS)
        until(lambda: drained(broker, "samples"), PATIENCE_SECONDS)
        assert accounting(broker, "samples")["deadLettered"] == 0
        assert set(receiver.samples("up")["sender"]) == {1.0}


@needs_prometheus
def test_a_repeated_request_with_several_samples_of_a_series_is_refused_whole(
    broker: BrokerProcess, tmp_path: Path
):
    now = int(time.time() * 1000)
    first = ({"__name__": "numbers", "series": "a"}, [(1.0, now - 3000), (2.0, now - 2000)])
    other = ({"__name__": "numbers", "series": "b"}, [(7.0, now - 1000)])
    with PrometheusProcess(tmp_path / "prometheus") as prometheus:
        url = f"{prometheus.url}/api/v1/write"
        create(broker, name="samples", destination={"type": "remote_write", "url": url})
        address = f"{broker.url}/api/v1/routes/samples/write"
        for series in ((first,), (first, other)):
            body = write_request(*series)
            assert httpx.post(address, content=body, headers=HEADERS, timeout=60).is_success
        until(lambda: drained(broker, "samples"), PATIENCE_SECONDS)
        assert accounting(broker, "samples")["deadLettered"] == 1
        assert prometheus.samples("numbers") == {"a": [1.0, 2.0]}
