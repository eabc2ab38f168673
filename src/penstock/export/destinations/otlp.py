"""OTLP/HTTP: traces, metrics and logs to a collector or a backend, as exporters sent them.

According to the specification, 429, 502, 503 and 504 are retried (with Retry-After). After any
other error, the request becomes a dead letter with the reason. 401, 403 and statuses for a wrong
address pause the route. A partial success is a success; the number of rejected items is counted.
"""

import logging
from dataclasses import dataclass

import msgspec

from penstock.export.context import RouteContext
from penstock.export.destinations import Destination, destination
from penstock.export.destinations.telemetry import TelemetryDestination, TelemetryTarget
from penstock.export.protobuf import NotProtobuf, fields
from penstock.export.telemetry_request import JSON, SIGNALS, TelemetryRequest, media_type
from penstock.net.http import HttpAnswer

log = logging.getLogger("penstock.export")
RETRIED = frozenset((429, 502, 503, 504))
_PARTIAL_SUCCESS, _REJECTED, _ERROR_MESSAGE = 1, 1, 2  # fields of Export...ServiceResponse
_STATUS_MESSAGE = 2  # field of google.rpc.Status


class _PartialSuccess(msgspec.Struct, rename="camel"):
    rejected_spans: int = 0
    rejected_data_points: int = 0
    rejected_log_records: int = 0
    error_message: str = ""


class _Answer(msgspec.Struct, rename="camel"):
    """An answer in JSON: of an export, or google.rpc.Status."""

    partial_success: _PartialSuccess | None = None
    message: str = ""


@destination("otlp")
@dataclass(frozen=True, kw_only=True)
class OtlpTarget(TelemetryTarget):
    takes = "otlp"

    def checks(self) -> list[str]:
        problems = super().checks()
        if self.url.rstrip("/").endswith(tuple(f"/v1/{signal}" for signal in SIGNALS)):
            problems.append("url is the base address: /v1/traces and the others are appended to it")
        return problems

    def make(self, context: RouteContext) -> Destination:
        return OtlpDestination(self, context, [("User-Agent", "penstock")])


class OtlpDestination(TelemetryDestination):
    async def _post(self, key: str, request: TelemetryRequest) -> int:
        path = f"{self._path.rstrip('/')}/v1/{request.signal}"
        answer = await self._request(key, request, path, RETRIED)
        rejected, message = _partial_success(answer)
        if message or rejected:
            text = "%s accepted a request of %s but rejected %d items in it: %s"
            log.warning(text, self._target.shown, request.signal, rejected, message)
        return rejected

    def _why(self, answer: HttpAnswer) -> bytes:
        """Return the message of the google.rpc.Status in an error."""
        try:
            if _is_json(answer):
                message = _decode(answer.body).message.encode()
            else:
                message = _bytes_of(answer.body, _STATUS_MESSAGE)
        except (NotProtobuf, msgspec.DecodeError, UnicodeDecodeError):
            message = b""
        return message or answer.body


def _partial_success(answer: HttpAnswer) -> tuple[int, str]:
    """Return how many items were rejected, and why. An answer that cannot be read is a success too:
    the request was accepted and must not be sent again.
    """
    try:
        if _is_json(answer):
            partial = _decode(answer.body or b"{}").partial_success or _PartialSuccess()
            rejected = partial.rejected_spans + partial.rejected_data_points
            return rejected + partial.rejected_log_records, partial.error_message
        inner = _bytes_of(answer.body, _PARTIAL_SUCCESS)
        rejected = sum(
            one.value
            for one in fields(inner)
            if one.number == _REJECTED and isinstance(one.value, int)
        )
        return rejected, _bytes_of(inner, _ERROR_MESSAGE).decode(errors="replace")
    except (NotProtobuf, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("an answer with status %d cannot be read: %s", answer.status, error)
        return 0, ""


def _is_json(answer: HttpAnswer) -> bool:
    return media_type(answer.headers.get("content-type", "")) == JSON


def _decode(body: bytes) -> _Answer:
    return msgspec.json.decode(body, type=_Answer, strict=False)  # 64-bit numbers are strings


def _bytes_of(message: bytes, number: int) -> bytes:
    """Return the first field with this number that has bytes; b"" without one."""
    values = (one.value for one in fields(message) if one.number == number)
    return next((value for value in values if isinstance(value, bytes)), b"")
