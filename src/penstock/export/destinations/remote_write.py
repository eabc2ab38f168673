"""Prometheus remote write 1.0: samples to Prometheus, Mimir, Thanos, VictoriaMetrics and others.

According to the specification, 429 and 5xx are retried. After any other 4xx, the request becomes a
dead letter with the reason. Samples of a series must arrive in order, so by default a route sends
one request at a time, oldest first (`telemetry_defaults` in `spec`).
"""

from dataclasses import dataclass

from penstock import __version__
from penstock.export.context import RouteContext
from penstock.export.destinations import Destination, destination
from penstock.export.destinations.telemetry import TelemetryDestination, TelemetryTarget
from penstock.export.telemetry_request import TelemetryRequest

RETRIED = frozenset((429, *range(500, 600)))
_VERSION = "X-Prometheus-Remote-Write-Version"


@destination("remote_write")
@dataclass(frozen=True, kw_only=True)
class RemoteWriteTarget(TelemetryTarget):
    takes = "remote_write"
    reserved = TelemetryTarget.reserved | {_VERSION.lower(), "user-agent"}

    def make(self, context: RouteContext) -> Destination:
        headers = [("User-Agent", f"penstock/{__version__}"), (_VERSION, "0.1.0")]
        return RemoteWriteDestination(self, context, headers)


class RemoteWriteDestination(TelemetryDestination):
    async def _post(self, key: str, request: TelemetryRequest) -> int:
        await self._request(key, request, self._path or "/", RETRIED)
        return 0
