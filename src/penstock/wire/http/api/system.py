"""Health and metrics of the broker, and its buffer."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock import __version__
from penstock.broker import Broker
from penstock.contract import operations
from penstock.contract.broker import (
    PROMETHEUS,
    Alive,
    BrokerReady,
    BrokerStatus,
    BufferStatus,
    MaintenanceModes,
    ReadyQuery,
)
from penstock.contract.deliveries import Pushed
from penstock.contract.operation import Audited
from penstock.errors import PenstockError
from penstock.metrics import State
from penstock.monitor import StateMetrics
from penstock.net import HttpClient
from penstock.wire.auth import Role
from penstock.wire.http.answers import plain
from penstock.wire.http.api.pushes import push_answer
from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import route, serves

log = logging.getLogger("penstock.wire")

WORKER_STATE = "/internal/metrics"


class Welcome(msgspec.Struct):
    name: str
    version: str
    docs: str
    openapi: str
    health: str


class SystemApi:
    tag = "system"

    def __init__(
        self,
        broker: Broker,
        state: StateMetrics,
        addresses: Callable[[], dict[str, str]],
        workers: Sequence[Path] = (),
    ) -> None:
        self._broker = broker
        self._addresses = addresses
        self._state = state
        self._workers = workers  # Unix sockets of the processes whose numbers belong to ours

    @route("GET", "/", tag="internal", page=True)
    def welcome(self, request: Request) -> Welcome | Response:
        """Name and version of the server, and links to its documentation."""
        if "text/html" in (request.header("accept") or ""):  # a person with a browser
            return Response(302, b"", "", (("Location", "console/"),))
        name = self._broker.config.server_name
        return Welcome(name, __version__, "/docs", "/openapi.json", "/health")

    @serves(operations.GET_HEALTH)
    def health(self) -> BrokerStatus | Response:
        broker = self._broker
        up = broker.database.healthy
        full = broker.logs.topics.disk_full if broker.logs else None
        merging = broker.metrics.values_of("penstock_queue_merging")
        health = BrokerStatus(
            status="unhealthy" if not up else "degraded" if full else "healthy",
            database="connected" if up else "disconnected",
            database_host=broker.database.host,
            database_problem=broker.database.problem,
            disk=f"full: {full}" if full else "ok",
            server=broker.config.server_name,
            worker_id=broker.presence.worker,
            version=__version__,
            uptime=round(broker.uptime, 3),
            listeners=self._addresses(),
            member=broker.presence.member,
            waiting_pops=broker.queues.waiting.parked,
            merging={kind: count for (kind,), count in merging.items()},
        )
        return json_response(plain(health), 200 if up else 503)

    @serves(operations.GET_LIVENESS)
    def live(self) -> Alive:
        return Alive()

    @serves(operations.GET_READINESS)
    def ready(self, args: ReadyQuery) -> BrokerReady | Response:
        broker = self._broker
        up = broker.database.healthy
        serves = up or (args.database == "optional" and broker.buffer.accepts())
        if broker.starting or broker.draining:
            status = "starting" if broker.starting else "draining"
        else:
            status = "ready" if serves else "unavailable"
        ready = BrokerReady(status, "connected" if up else "disconnected")
        return json_response(ready, 200 if status == "ready" else 503)

    @serves(operations.GET_METRICS, answer=str)
    async def metrics(self, request: Request) -> Response:
        if "application/json" in (request.header("accept") or ""):
            return await self.metrics_json()
        return await self.prometheus()

    @route("GET", "/metrics.json", tag="queen", answer=dict[str, Any])
    async def metrics_json(self) -> Response:
        """Metrics as JSON."""
        broker = self._broker
        await self._state.fill()
        scrape = broker.metrics.scrape(await self._worker_states())
        samples = await asyncio.to_thread(scrape.samples)
        figures, database = broker.presence.figures(), broker.database
        answer = {
            "uptime": round(broker.uptime, 3),
            "requests": figures.requests,
            "messages": figures.messages,
            "database": {
                "poolSize": database.pool_size,
                "idleConnections": database.pool_idle,
                "waitingRequests": _total(samples, "penstock_queue_merging"),
            },
            "memory": {"rss": figures.memory_bytes},
            "cpu": {"user": figures.cpu_user_seconds, "system": figures.cpu_system_seconds},
            "file_buffer": {
                "pending": _total(samples, "penstock_buffer_pending"),
                "flushed": _total(samples, "penstock_buffer_flushed_total"),
                "failed": _total(samples, "penstock_buffer_failed"),
                "db_healthy": database.healthy,
            },
            "metrics": samples,
        }
        return json_response(answer)

    @route("GET", "/metrics/prometheus", tag="queen", answer_type=PROMETHEUS, answer=str)
    async def prometheus(self) -> Response:
        """Metrics in Prometheus text format."""
        await self._state.fill()
        scrape = self._broker.metrics.scrape(await self._worker_states())
        # In a thread: with a thousand queues the text is long.
        return Response(200, await asyncio.to_thread(scrape.text), PROMETHEUS)

    @route(
        "POST",
        "/api/v1/buffers/events",
        tag="internal",
        answer=list[Pushed],
        status=201,
        role=Role.ADMIN,
        audit=Audited("buffer.store"),
    )
    async def store_events(self, request: Request) -> Response:
        """Store events given as the lines of a buffer file."""
        return push_answer(*await self._broker.buffer.push_lines(request.body))

    @serves(operations.REPLAY_BUFFER)
    async def replay(self, action: str) -> BufferStatus:
        if action == "replay":
            self._broker.buffer.replay_now()
        else:
            await self._broker.buffer.retry_failed(now=True)
        return self._broker.buffer.status.report()

    @serves(operations.SWITCH_MAINTENANCE)
    async def switch(self, body: MaintenanceModes) -> BufferStatus:
        await self._broker.buffer.maintenance.switch(push=body.push, pop=body.pop)
        return self._broker.buffer.status.report()

    async def _worker_states(self) -> list[State]:
        return [state for state in await asyncio.gather(*map(_state_of, self._workers)) if state]


class WorkerApi:
    """What a worker process answers to its owner only."""

    tag = "system"

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @route("GET", WORKER_STATE, hidden=True)
    def state(self) -> State:
        return self._broker.metrics.state()


def _total(metrics: dict[str, Any], name: str) -> int:
    return int(sum(value for sample, value in metrics.items() if sample.partition("{")[0] == name))


async def _state_of(socket: Path) -> State | None:
    client = HttpClient("http://worker", unix_path=socket, pool_size=1, connect_timeout=1.0)
    try:
        answer = await client.request("GET", WORKER_STATE, timeout=2.0)
        return msgspec.json.decode(answer.body, type=State)
    except (PenstockError, TimeoutError) as error:
        log.warning("a worker's metrics are missing from this scrape: %s", error)
        return None
    finally:
        await client.close()
