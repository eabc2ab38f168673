"""An OTLP/HTTP receiver that has nothing in common with ours: http.server and the official
messages. Requests to other paths (remote write) are kept as bytes.
"""

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import json_format
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

MESSAGES: dict[str, tuple[type[Any], type[Any]]] = {
    "/v1/traces": (ExportTraceServiceRequest, ExportTraceServiceResponse),
    "/v1/metrics": (ExportMetricsServiceRequest, ExportMetricsServiceResponse),
    "/v1/logs": (ExportLogsServiceRequest, ExportLogsServiceResponse),
}
PROTOBUF, JSON = "application/x-protobuf", "application/json"


@dataclass
class Answered:
    """An answer other than a plain success."""

    status: int = 200
    body: Message | None = None
    retry_after: str = ""


@dataclass
class Export:
    """A request that arrived."""

    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes  # as it came
    message: Any


Rule = Callable[[Export], Answered | None]


class OtlpReceiver:
    """`rule` decides about each request; None is a success. `taken` are those that succeeded,
    `seen` all.
    """

    def __init__(self, rule: Rule = lambda _: None) -> None:
        self.rule = rule
        self.seen: list[Export] = []
        self.taken: list[Export] = []
        self.port = 0
        self._server: ThreadingHTTPServer | None = None

    def open(self) -> "OtlpReceiver":
        """Also again, at the same port."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                receiver._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> "OtlpReceiver":
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        if self._server is None:  # closed, and this connection was kept alive
            handler.close_connection = True
            return
        headers = {name.lower(): value for name, value in handler.headers.items()}
        body = handler.rfile.read(int(headers["content-length"]))
        plain = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
        request, response = MESSAGES.get(handler.path, (None, Empty))
        kind = headers["content-type"].partition(";")[0]
        message = request() if request is not None else None
        if message is None:
            pass
        elif kind == JSON:
            json_format.Parse(plain, message)
        else:
            message.ParseFromString(plain)
        export = Export(handler.path, headers, body, message)
        self.seen.append(export)
        answered = self.rule(export) or Answered()
        if answered.status < 300:
            self.taken.append(export)
        said = answered.body or response()
        text = (
            json_format.MessageToJson(said).encode() if kind == JSON else said.SerializeToString()
        )
        handler.send_response(answered.status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(text)))
        if answered.retry_after:
            handler.send_header("Retry-After", answered.retry_after)
        handler.end_headers()
        handler.wfile.write(text)

    @property
    def spans(self) -> list[str]:
        """The names of the spans that were taken, in the order they came."""
        return [
            span.name
            for export in list(self.taken)
            if export.path == "/v1/traces"
            for resource in export.message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def one_of_each() -> dict[str, Any]:
    """A request with one resource, by path."""
    requests = {path: request() for path, (request, _) in MESSAGES.items()}
    requests["/v1/traces"].resource_spans.add().schema_url = "x"
    requests["/v1/metrics"].resource_metrics.add().schema_url = "x"
    requests["/v1/logs"].resource_logs.add().schema_url = "x"
    return requests


def traces(*names: str) -> Any:
    """A request with a resource per span."""
    request = ExportTraceServiceRequest()
    for name in names:
        request.resource_spans.add().scope_spans.add().spans.add(name=name)
    return request
