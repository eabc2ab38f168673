"""HTTP(S): each batch is one request, its records as NDJSON, a JSON array, or raw.

With `header_prefix` (format raw, source.envelope) a message's headers become those of its request,
and its payload the body.

Every request has `Idempotency-Key: <route>-<sequence>-<tag>` (and the range of records if a batch
was cut), the same at every attempt. 2xx is success. 401, 403, redirects, and statuses for a wrong
address or format (404, 405, 410, 415) pause the route. After 413, batches become smaller. 408, 425,
429 and 5xx are retried (with Retry-After). Any other 4xx means that the data is bad.
"""

import email.utils
import math
import time
from collections.abc import Awaitable, Container
from dataclasses import dataclass
from datetime import UTC
from http.client import responses
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from penstock.config.schema import Seconds, key
from penstock.errors import InvalidRequest, TooLarge, Unavailable
from penstock.export.checks import ca_context, limit_problems, url_problems
from penstock.export.context import RouteContext
from penstock.export.destinations import (
    BatchRefused,
    Denied,
    Destination,
    OutgoingBatch,
    RetryLater,
    Target,
    TooBig,
    destination,
)
from penstock.export.envelope import http_headers, unwrap
from penstock.export.payload import COMPRESSIONS, CONTENT_ENCODINGS, ENCODINGS, compress
from penstock.net import HttpClient
from penstock.net.http import HttpAnswer
from penstock.protocol.headers import is_name

CONTENT_TYPES = {
    "ndjson": "application/x-ndjson",
    "json": "application/json",
    "raw": "application/octet-stream",
}
ADDRESS_STATUSES = {
    404: "nothing is at this address",
    405: "the address does not take this method",
    410: "the address is gone",
    415: "the address does not take this format or compression",
}
RETRY_KINDS = {408: "timeout", 425: "server_error", 429: "rate_limit"}
RETRIED = frozenset((*RETRY_KINDS, *range(500, 600)))


@dataclass(frozen=True, kw_only=True)
class AddressTarget(Target):
    """Base class of targets that get HTTP requests."""

    needed = ("url",)

    url: str = key("", "address")
    headers: dict[str, str] = key({}, "sent with every request")
    timeout: Seconds = key(30.0, "longest wait for an answer")
    connections: int = key(64, "most connections")
    ca: str = key("", "certificate authority to trust: a PEM file, or its text")

    def checks(self) -> list[str]:
        addresses = url_problems(self.url, "http", "https")
        return addresses + limit_problems(self.timeout, self.connections)

    @property
    def shown(self) -> str:
        """Return the address without user, password and query."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    def client(self, *headers: tuple[str, str]) -> HttpClient:
        parts = urlsplit(self.url)
        return HttpClient(
            urlunsplit((parts.scheme, parts.netloc, "", "", "")),
            headers=[*headers, *self.headers.items()],
            pool_size=self.connections,
            tls=ca_context(self.ca),
        )


@destination("http")
@dataclass(frozen=True, kw_only=True)
class HttpTarget(AddressTarget):
    format: Literal["ndjson", "json", "raw"] = key("ndjson", "how records are put together")
    method: Literal["POST", "PUT", "PATCH", "post", "put", "patch"] = key("POST", "method")
    header_prefix: str = key("", "a message's headers are sent as HTTP headers with this prefix")
    compression: Literal["none", "gzip", "zstd", "snappy"] = key("none", "what the server takes")

    def checks(self) -> list[str]:
        problems = super().checks()
        if self.header_prefix and self.format != "raw":
            problems.append("header_prefix needs format: raw, one message per request")
        if self.header_prefix and not is_name(self.header_prefix):
            problems.append(f"header_prefix {self.header_prefix[:40]!r} is not a header name")
        return problems

    def make(self, _context: RouteContext) -> Destination:
        return HttpDestination(self)


class HttpDestination(Destination):
    def __init__(self, target: HttpTarget) -> None:
        parts = urlsplit(target.url)
        self._path = urlunsplit(("", "", parts.path or "/", parts.query, ""))
        self._target = target
        self._method = target.method.upper()
        self.encoding = ENCODINGS[target.format]
        self._compression = COMPRESSIONS[target.compression]
        self._client = target.client(
            ("Content-Type", CONTENT_TYPES[target.format]), ("User-Agent", "penstock")
        )

    async def stop(self) -> None:
        await self._client.close()

    def prepare(self, batch: OutgoingBatch) -> tuple[bytes, list[tuple[str, str]]]:
        """Return the body and its headers."""
        compression = self._compression
        if batch.compression == 0 and compression and batch.records:
            compression = 0  # it was stored as it is because compressing gained nothing
        headers: list[tuple[str, str]] = []
        prefix = self._target.header_prefix
        envelope = unwrap(batch.plain()) if prefix else None
        if envelope is not None:
            body = compress(bytes(envelope.payload), compression)
            headers += http_headers(envelope, prefix)
        elif compression == batch.compression:
            body = batch.body
        else:
            body = compress(batch.plain(), compression)
        if compression:
            headers.append(("Content-Encoding", CONTENT_ENCODINGS[compression]))
        return body, headers

    async def send(self, batch: OutgoingBatch, prepared: Any) -> None:
        body, extra = prepared
        headers, timeout = [("Idempotency-Key", batch.key), *extra], self._target.timeout
        await delivered(
            self._client.request(
                self._method, self._path, body, headers, timeout=timeout, idempotent=True
            )
        )

    def describe(self) -> str:
        return f"{self._method} {self._target.shown}"


async def delivered(
    request: Awaitable[HttpAnswer],
    retried: Container[int] = RETRIED,
    answering: str = "the destination",
) -> HttpAnswer:
    """Return a successful answer. For any other, raise the error for the batch."""
    try:
        answer = await request
    except TimeoutError as error:
        raise RetryLater("timeout", str(error)) from error
    except (Unavailable, TooLarge) as error:
        raise RetryLater("network", str(error)) from error
    except InvalidRequest as error:
        raise Denied(str(error)) from error
    check_status(answer, retried, answering)
    return answer


def check_status(
    answer: HttpAnswer,
    retried: Container[int] = RETRIED,
    answering: str = "the destination",
) -> None:
    """Raise the error that the status stands for. `retried` are the statuses to retry."""
    status, headers = answer.status, answer.headers
    if 200 <= status < 300:
        return
    text = f"{answering} answered {status} {responses.get(status, '')}".rstrip()
    if answer.body:
        text += f": {answer.body[:200].decode(errors='replace')}"
    if status in (401, 403):
        raise Denied(text)
    if status in ADDRESS_STATUSES:
        raise Denied(
            f"{text} ({ADDRESS_STATUSES[status]}: correct it, then resume the route; "
            "nothing was dropped)",
            "address",
        )
    if 300 <= status < 400:
        location = headers.get("location", "...")
        raise Denied(
            f"{text} (redirects are not followed: change the address to {location})", "address"
        )
    if status == 413:
        raise TooBig(text)
    if status in retried or not 200 <= status < 600:
        kind = RETRY_KINDS.get(status, "server_error")
        raise RetryLater(kind, text, parse_retry_after(headers.get("retry-after")))
    raise BatchRefused(text)


def parse_retry_after(value: str | None, now: float | None = None) -> float | None:
    """Return the seconds to wait, from a number of seconds or an HTTP date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        pass
    else:
        return max(0.0, seconds) if math.isfinite(seconds) else None
    try:
        when = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, when.timestamp() - (time.time() if now is None else now))
