"""Telemetry requests as records: their bytes, what is refused, and how they are cut."""

import gzip
import json
from typing import Any

import cramjam
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from penstock.errors import InvalidRequest
from penstock.export.protobuf import NotProtobuf, bytes_field, fields
from penstock.export.telemetry_request import JSON, PROTOBUF, SAMPLES, TelemetryRequest
from tests.support.otlp import traces
from tests.support.remote_write import write_message, write_request


def names(message: ExportTraceServiceRequest) -> list[str]:
    return [resource.scope_spans[0].spans[0].name for resource in message.resource_spans]


def test_the_bytes_of_a_record():
    request = TelemetryRequest("traces", PROTOBUF, "gzip", b"\x1f\x8b\n\x00")
    assert request.record() == (
        b'{"signal":"traces","type":"application/x-protobuf","encoding":"gzip"}\n\x1f\x8b\n\x00'
    )
    assert TelemetryRequest.from_record(request.record()) == request


@pytest.mark.parametrize("record", [b"", b"{}", b'{"id": 1}\n', b"[1]\n", b"1\nx", b"\xff\n"])
def test_a_record_of_another_origin_is_refused(record: bytes):
    with pytest.raises(InvalidRequest, match="not a telemetry request"):
        TelemetryRequest.from_record(record)


def test_fields_of_real_messages_are_read():
    message = traces("a", "b", "c").SerializeToString()
    read = list(fields(message))
    assert [one.number for one in read] == [1, 1, 1]
    assert b"".join(message[one.start : one.end] for one in read) == message
    assert [one.number for one in fields(Metric(name="n", unit="s").SerializeToString())] == [1, 3]
    assert next(fields(bytes_field(2, b"x" * 200))).value == b"x" * 200


@pytest.mark.parametrize(
    "data", [b"hello world", b"\x0a\xff\x01", b"\x08", b"\x00\x00", b"\xff" * 12, b"\x0b\x01"]
)
def test_bytes_that_are_not_protobuf_are_refused(data: bytes):
    with pytest.raises(NotProtobuf):
        list(fields(data))
    with pytest.raises(InvalidRequest, match="not protobuf"):
        TelemetryRequest("traces", PROTOBUF, "", data).is_empty(data)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"7", b'{"a":\xff}'])
def test_bytes_that_are_not_a_json_object_are_refused(data: bytes):
    with pytest.raises(InvalidRequest, match="not a JSON object"):
        TelemetryRequest("logs", f"{JSON}; charset=utf-8", "", data).is_empty(data)


def test_a_request_in_protobuf_is_cut_between_its_resources():
    body = gzip.compress(traces("a", "b", "c" * 300, "d").SerializeToString())
    first, second = TelemetryRequest("traces", PROTOBUF, "gzip", body).halves()
    assert (first.signal, first.type, first.encoding) == ("traces", PROTOBUF, "gzip")
    parts = [
        names(ExportTraceServiceRequest.FromString(gzip.decompress(half.body)))
        for half in (first, second)
    ]
    assert parts == [["a", "b"], ["c" * 300, "d"]]


def test_a_request_in_json_is_cut_between_its_resources():
    body = json_format.MessageToJson(traces("a", "b", "c")).encode()
    halves = TelemetryRequest("traces", JSON, "", body).halves()
    parsed = [json_format.Parse(half.body, ExportTraceServiceRequest()) for half in halves]
    assert [names(one) for one in parsed] == [["a"], ["b", "c"]]


def test_a_request_of_remote_write_is_cut_between_its_series():
    series = [({"__name__": f"m{number}"}, [(1.0, 1000)]) for number in range(4)]
    halves = TelemetryRequest(SAMPLES, PROTOBUF, "snappy", write_request(*series)).halves()
    plain = [bytes(cramjam.snappy.decompress_raw(half.body)) for half in halves]
    assert plain == [write_message(*series[:2]), write_message(*series[2:])]


@pytest.mark.parametrize("kind", [PROTOBUF, JSON])
@pytest.mark.parametrize(
    ("signal", "request_type", "scopes", "items"),
    [
        ("traces", ExportTraceServiceRequest, "scope_spans", "spans"),
        ("metrics", ExportMetricsServiceRequest, "scope_metrics", "metrics"),
        ("logs", ExportLogsServiceRequest, "scope_logs", "log_records"),
    ],
)
def test_a_request_of_one_resource_is_cut_between_scopes_and_then_between_items(
    signal: str, request_type: Any, scopes: str, items: str, kind: str
):
    def text_of(item: Any) -> str:
        return item.severity_text if signal == "logs" else item.name

    request = request_type()
    resource = getattr(request, f"resource_{scopes.removeprefix('scope_')}").add()
    resource.resource.attributes.add(key="service.name").value.string_value = "shop"
    resource.schema_url = "https://schema"
    for number in range(2):
        scope = getattr(resource, scopes).add()
        scope.scope.name = f"scope {number}"
        for item in range(4):
            text = {"severity_text" if signal == "logs" else "name": f"{number}.{item}"}
            getattr(scope, items).add(**text)
    body = request.SerializeToString()
    if kind == JSON:
        body = json_format.MessageToJson(request).encode()

    def pieces(one: TelemetryRequest) -> list[TelemetryRequest]:
        return [piece for half in one.halves() for piece in pieces(half)] or [one]

    found = []
    for piece in pieces(TelemetryRequest(signal, kind, "", body)):
        read = json_format.Parse if kind == JSON else lambda data, into: into.MergeFromString(data)
        part = request_type()
        read(piece.body, part)
        (resource,) = getattr(part, f"resource_{scopes.removeprefix('scope_')}")
        assert resource.resource.attributes[0].value.string_value == "shop"
        assert resource.schema_url == "https://schema"
        (scope,) = getattr(resource, scopes)
        (item,) = getattr(scope, items)
        found.append((scope.scope.name, text_of(item)))
    assert found == [(f"scope {at}", f"{at}.{item}") for at in range(2) for item in range(4)]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (PROTOBUF, b""),
        (PROTOBUF, traces("a").SerializeToString()),
        (PROTOBUF, b"\x08\x01"),
        (PROTOBUF, b"\x0a\x02\x12\x05"),
        (JSON, b"{}"),
        (JSON, json_format.MessageToJson(traces("a")).encode()),
        (JSON, b'{"resourceSpans": [{"scopeSpans": 7}]}'),
        (JSON, json.dumps({"resourceSpans": [{}]}).encode()),
        (JSON, b'{"resourceSpans": 1}'),
    ],
)
def test_a_request_with_one_element_cannot_be_cut(kind: str, body: bytes):
    assert TelemetryRequest("traces", kind, "", body).halves() == []
