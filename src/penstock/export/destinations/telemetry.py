"""The common part of the OTLP and remote-write destinations.

A record is a request of an exporter (`telemetry_request`). It is sent unchanged, and requests are
never merged. If the destination answers 413, the request is split in two, repeatedly if needed.
The progress of a split request is kept in memory, so a retry sends only the missing parts. After a
crash, all parts are sent again.
"""

from abc import abstractmethod
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from urllib.parse import urlsplit

from penstock.errors import InvalidRequest
from penstock.export.context import RouteContext
from penstock.export.destinations import BatchRefused, Destination, OutgoingBatch, TooBig
from penstock.export.destinations.http import AddressTarget, delivered
from penstock.export.payload import RAW
from penstock.export.telemetry_request import TelemetryRequest
from penstock.net.http import HttpAnswer

_MAX_CUT = 256  # split requests with progress in memory; further ones start again
_RESERVED = {"content-type", "content-encoding", "content-length", "idempotency-key"}


@dataclass(frozen=True, kw_only=True)
class TelemetryTarget(AddressTarget):
    reserved: ClassVar[frozenset[str]] = frozenset(_RESERVED)  # headers that the protocol sets

    def checks(self) -> list[str]:
        taken = sorted(self.reserved.intersection(name.lower() for name in self.headers))
        return [
            *super().checks(),
            *(f"headers must not contain {name}: the protocol sets it" for name in taken),
        ]


@dataclass(slots=True)
class _Progress:
    """The progress of a request that was split."""

    unsent: list[tuple[str, TelemetryRequest]]  # (idempotency key, part), the next one last
    refused: list[bytes] = field(default_factory=list)  # records of parts that were refused
    reason: str = ""  # why the last one was refused


class TelemetryDestination(Destination):
    encoding = RAW

    def __init__(
        self, target: TelemetryTarget, context: RouteContext, headers: list[tuple[str, str]]
    ) -> None:
        parts = urlsplit(target.url)
        self._context = context
        self._path = parts.path
        self._query = f"?{parts.query}" if parts.query else ""
        self._target = target
        self._cut: dict[str, _Progress] = {}  # by the batch's key
        self._client = target.client(*headers)

    async def stop(self) -> None:
        await self._client.close()

    def describe(self) -> str:
        return f"POST {self._target.shown}"

    def prepare(self, batch: OutgoingBatch) -> TelemetryRequest:
        try:
            return TelemetryRequest.from_record(batch.plain())
        except InvalidRequest as error:
            raise BatchRefused(str(error)) from None

    async def send(self, batch: OutgoingBatch, prepared: Any) -> int:
        """Send the request, in parts if needed. Return how many items were rejected."""
        progress = self._cut.pop(batch.key, None) or _Progress([(batch.key, prepared)])
        rejected = 0
        try:
            while progress.unsent:
                key, request = progress.unsent[-1]
                try:
                    rejected += await self._post(key, request)
                except (BatchRefused, TooBig) as error:
                    if isinstance(error, TooBig) and (
                        halves := await self._context.in_pool(request.halves)
                    ):
                        first, second = halves
                        progress.unsent[-1:] = [(f"{key}-2", second), (f"{key}-1", first)]
                        continue
                    if key == batch.key:
                        raise  # it was not split
                    progress.refused.append(request.record())
                    progress.reason = str(error)
                progress.unsent.pop()
        finally:
            if progress.unsent and progress.unsent[0][0] != batch.key:
                self._remember(batch.key, progress)
        if progress.refused:
            raise BatchRefused(progress.reason, progress.refused)
        return rejected

    def _remember(self, key: str, progress: _Progress) -> None:
        if len(self._cut) >= _MAX_CUT:
            self._cut.pop(next(iter(self._cut)))
        self._cut[key] = progress

    async def _request(
        self, key: str, request: TelemetryRequest, path: str, retried: Container[int]
    ) -> HttpAnswer:
        headers = [("Idempotency-Key", key), ("Content-Type", request.type)]
        if request.encoding:
            headers.append(("Content-Encoding", request.encoding))

        async def ask() -> HttpAnswer:
            answer = await self._client.request(
                "POST",
                path + self._query,
                request.body,
                headers,
                timeout=self._target.timeout,
                idempotent=True,
            )
            return answer if answer.status < 300 else replace(answer, body=self._why(answer))

        return await delivered(ask(), retried, f"the destination ({path})")

    def _why(self, answer: HttpAnswer) -> bytes:
        """Return the text of an error."""
        return answer.body

    @abstractmethod
    async def _post(self, key: str, request: TelemetryRequest) -> int:
        """Send one request. Return how many of its items the destination rejected."""
