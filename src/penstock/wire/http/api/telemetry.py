"""Accept telemetry for routes: OTLP/HTTP and Prometheus remote write 1.0.

A request succeeds when it is in the send queue, with the durability of the route. It is stored
unchanged (`penstock.export.telemetry_request`). An empty request is not stored.

Exporters drop the data after statuses that they do not expect: OTLP defines four that are retried,
and some exporters do not retry two of those. So every temporary failure (a full queue, a full disk,
a route that cannot start, a fault of the broker) is answered with 503 and Retry-After, never with
429 or 507. Errors have the form of the protocol: google.rpc.Status in the type of the request, or
plain text.
"""

import asyncio
from concurrent.futures import Executor

import msgspec

from penstock.contract import operations
from penstock.errors import InvalidRequest, NotFound, TooLarge, Unavailable
from penstock.export.manager import Exports
from penstock.export.protobuf import bytes_field
from penstock.export.routes import ExportRoute
from penstock.export.telemetry_request import (
    JSON,
    PROTOBUF,
    SAMPLES,
    SIGNALS,
    TelemetryRequest,
    media_type,
)
from penstock.wire.http.compress import unpack
from penstock.wire.http.messages import EMPTY, Headers, HttpHead, Request, Response
from penstock.wire.http.routes import serves

RETRY_AFTER_SECONDS = 5  # in a 503
PLAIN = "text/plain; charset=utf-8"
_MEDIA = (PROTOBUF, JSON)
_STATUS_MESSAGE = 2  # field of google.rpc.Status
_NOT_STORED = "the send queue of route {name} is full"


def write_otlp_error(head: HttpHead, status: int, text: str, headers: Headers) -> Response:
    """Return a google.rpc.Status in the type of the request, or in JSON if it had another type."""
    status, headers = _for_exporters(status, headers)
    if media_type((head.media or b"").decode("latin-1")) == PROTOBUF:
        return Response(status, bytes_field(_STATUS_MESSAGE, text.encode()), PROTOBUF, headers)
    return Response(status, msgspec.json.encode({"message": text}), JSON, headers)


def write_plain_error(_: HttpHead, status: int, text: str, headers: Headers) -> Response:
    """Return the error as plain text, which senders of remote write log."""
    status, headers = _for_exporters(status, headers)
    return Response(status, f"{text}\n".encode(), PLAIN, headers)


def _for_exporters(status: int, headers: Headers) -> tuple[int, Headers]:
    if status < 500 and status != 429:
        return status, headers
    if any(name == "Retry-After" for name, _ in headers):
        return 503, headers
    return 503, (*headers, ("Retry-After", str(RETRY_AFTER_SECONDS)))


class TelemetryApi:
    tag = "export"

    def __init__(self, exports: Exports, pool: Executor, max_body: int) -> None:
        self._exports = exports
        self._pool = pool
        self._max_body = max_body  # also of a body that is unpacked

    @serves(
        operations.TAKE_OTLP,
        packed=True,
        write_error=write_otlp_error,
        error_types=(PROTOBUF, JSON),
    )
    async def take_otlp(self, request: Request, signal: str, name: str | None) -> Response:
        if signal not in SIGNALS:
            raise NotFound(f"OTLP has no signal {signal[:40]!r}: {', '.join(SIGNALS)}")
        content_type, coding = _described(request)
        kind = media_type(content_type)
        if kind not in _MEDIA:
            text = f"The body is {kind[:255]!r}; this takes: {', '.join(_MEDIA)}"
            return write_otlp_error(request.head, 415, text, ())
        if coding not in ("", "gzip"):
            text = f"Content-Encoding {coding[:255]!r} is not supported, gzip is"
            return write_otlp_error(request.head, 415, text, (("Accept-Encoding", "gzip"),))
        into = self._named(name, "otlp") if name else self._exports.taking(signal)
        await self._store(into, TelemetryRequest(signal, content_type, coding, request.body))
        return Response(200, b"{}" if kind == JSON else b"", kind)

    @serves(
        operations.TAKE_SAMPLES, packed=True, write_error=write_plain_error, error_types=(PLAIN,)
    )
    async def take_samples(self, request: Request, name: str | None) -> Response:
        content_type, coding = _described(request)
        # Version 2.0 is another message in the same type, named by a parameter.
        if media_type(content_type) != PROTOBUF or "write.v2" in content_type:
            text = f"The body is {content_type[:255]!r}; this takes {PROTOBUF}, remote write 1.0"
            return write_plain_error(request.head, 415, text, ())
        if coding != "snappy":
            text = f"Content-Encoding is {coding[:255]!r}, and must be snappy"
            return write_plain_error(request.head, 415, text, ())
        into = self._named(name, "remote_write") if name else self._exports.taking(SAMPLES)
        await self._store(into, TelemetryRequest(SAMPLES, content_type, coding, request.body))
        return EMPTY

    def _named(self, name: str, takes: str) -> ExportRoute:
        if name in self._exports.failed:
            raise Unavailable(f"route {name} could not start: {self._exports.failed[name]}")
        named = self._exports.get(name)
        if named.spec.target.takes != takes:
            raise InvalidRequest(f"route {name} does not take {takes}: its destination is another")
        return named

    async def _store(self, into: ExportRoute, request: TelemetryRequest) -> None:
        loop = asyncio.get_running_loop()
        if await loop.run_in_executor(self._pool, self._is_empty, request):
            return
        pushed = await into.push([request.record()])
        if pushed.dropped:
            raise Unavailable(_NOT_STORED.format(name=into.name), RETRY_AFTER_SECONDS)

    def _is_empty(self, request: TelemetryRequest) -> bool:
        """Check the request. Return whether it is empty."""
        plain = request.body
        if request.encoding == "gzip":
            plain = unpack(plain, "gzip", self._max_body)
        elif request.encoding == "snappy":
            plain = _unpack_snappy(plain, self._max_body)
        return request.is_empty(plain)


def _described(request: Request) -> tuple[str, str]:
    """Return the type and the coding of the body; "" for a missing one."""
    coding = (request.header("content-encoding") or "").strip().lower()
    return request.header("content-type") or "", "" if coding == "identity" else coding


def _unpack_snappy(data: bytes, limit: int) -> bytes:
    """Decompress a body in snappy's block format. Raises TooLarge above `limit` bytes."""
    import cramjam  # imported here, since it needs 2 MiB and most brokers do not use it

    try:
        if cramjam.snappy.decompress_raw_len(data) > limit:
            raise TooLarge(
                f"The body is larger than the limit of {limit} bytes once it is unpacked"
            )
        return bytes(cramjam.snappy.decompress_raw(data))
    except cramjam.DecompressionError as error:
        raise InvalidRequest(f"The body is not a snappy block: {error}") from None
