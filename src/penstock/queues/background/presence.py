"""Record which broker processes serve the queues, with their load and waiting pops.

Every `BEAT_SECONDS`, each process writes a row about itself, which replaces its row of the same
minute. The newest row says whether the process is alive. All rows together are a time series of a
week. Processes read the table and do not ask each other.
"""

import asyncio
import logging
import os
import resource
import socket
import time
from datetime import UTC, datetime, timedelta
from itertools import islice

import asyncpg
import msgspec

from penstock import __version__
from penstock.contract.consumers import ConsumerHealth
from penstock.database import Database, struct_of
from penstock.errors import Unavailable
from penstock.io.tasks import cancelled, supervised
from penstock.metrics import Metrics, resident_bytes
from penstock.queues.consumers import (
    ALIVE_SECONDS,
    MAX_REPORTED,
    ConsumerConnections,
    ConsumerReports,
    merged,
)
from penstock.queues.waiting import WaitingPops

log = logging.getLogger("penstock.queues")

BEAT_SECONDS = ALIVE_SECONDS / 4
KEPT_DAYS = 7
MAX_PARKED = 1000  # queues with waiting pops in a row
_ROUTES = {
    "/api/v1/push": "push",
    "/api/v1/ack": "ack",
    "/api/v1/ack/batch": "ack",
    "/api/v1/transaction": "transaction",
}

MEMBERS = """
  SELECT DISTINCT ON (member) member AS id, hostname, worker, pid, server, started_at,
         seen_at AS last_seen, figures::text AS figures
    FROM members
   WHERE minute >= date_trunc('minute', clock_timestamp()) - interval '1 minute'
     AND seen_at > clock_timestamp() - make_interval(secs => $1)
   ORDER BY member, minute DESC"""
SERIES = """
  SELECT to_timestamp(floor(extract(epoch FROM minute) / $3) * $3) AS bucket, hostname, worker,
         avg((figures->>'cpu')::float8) AS cpu, max((figures->>'memoryBytes')::bigint) AS memory,
         avg((figures->>'waitingPops')::float8) AS waiting
    FROM members
   WHERE minute BETWEEN $1 AND $2
     AND ($4::text IS NULL OR hostname = $4) AND ($5::int IS NULL OR worker = $5)
   GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"""
PARKED = """
  SELECT to_timestamp(floor(extract(epoch FROM m.minute) / $3) * $3) AS bucket,
         p.key AS queue, m.hostname, m.worker,
         round(avg(p.value::numeric), 2)::float8 AS parked
    FROM members m CROSS JOIN LATERAL jsonb_each_text(m.figures->'parked') p
   WHERE m.minute BETWEEN $1 AND $2 AND ($4::text IS NULL OR p.key = $4)
   GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4"""


class OperationCounts(msgspec.Struct):
    push: int = 0
    pop: int = 0
    ack: int = 0


class RequestCounts(OperationCounts):
    transaction: int = 0


class PoolFigures(msgspec.Struct):
    size: int = 0
    idle: int = 0


class ProcessFigures(msgspec.Struct, rename="camel", kw_only=True):
    """The load and counters of a process, as stored in the table `members`. Brokers of other
    releases read it: do not rename fields, and give new ones a default.
    """

    version: str = ""
    cpu: float = 0.0  # cores in use, on average since the last row
    cpu_user_seconds: float = 0.0
    cpu_system_seconds: float = 0.0
    memory_bytes: int = 0
    load_average: float = 0.0
    waiting_pops: int = 0
    parked: dict[str, int] = {}  # queue -> pops that wait for it
    consumers: list[tuple[str, str, int]] = []  # queue, group, connections that pop
    reports: list[ConsumerHealth] = []  # health reports of consumers
    requests: RequestCounts = msgspec.field(default_factory=RequestCounts)
    messages: OperationCounts = msgspec.field(default_factory=OperationCounts)
    db_errors: int = 0
    pool: PoolFigures = msgspec.field(default_factory=PoolFigures)


class BrokerPresence(msgspec.Struct):
    """A live process."""

    id: str
    hostname: str
    worker: int
    pid: int
    server: str
    started_at: datetime
    last_seen: datetime
    figures: ProcessFigures


class LoadPoint(msgspec.Struct):
    """Processor and memory of a process in one time bucket."""

    bucket: datetime
    hostname: str
    worker: int
    cpu: float
    memory_bytes: int
    waiting_pops: float


class ParkedPoint(msgspec.Struct):
    """Pops that waited for a queue in a process, on average in one time bucket."""

    bucket: datetime
    queue: str
    hostname: str
    worker: int
    parked: float


class Presence:
    """Writes the rows of this process from `start` to `stop`, and reads those of all."""

    def __init__(
        self,
        database: Database,
        waiting: WaitingPops,
        consumers: ConsumerConnections,
        metrics: Metrics,
        server: str = "penstock",
        worker: int = 0,
    ) -> None:
        self._database, self._waiting, self._metrics = database, waiting, metrics
        self._consumers = consumers
        self.reports = ConsumerReports()
        self.server, self.worker = server, worker
        self.member = f"{socket.gethostname()}-{worker}-{os.urandom(4).hex()}"
        consumers.member = self.member
        self.started_at = datetime.now(UTC)
        # time of the last CPU measurement, and the CPU time then
        self._used = (time.monotonic(), time.process_time())
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = supervised("presence", self._keep_saying, self._metrics)

    async def stop(self) -> None:
        await cancelled(self._task)
        try:
            await self._database.fetch(
                "UPDATE members SET seen_at = '-infinity' WHERE member = $1 AND minute >= $2",
                self.member,
                datetime.now(UTC) - timedelta(minutes=2),
            )
        except (Unavailable, asyncpg.PostgresError):
            pass  # the row expires

    async def say(self) -> None:
        await self._database.fetch(
            """INSERT INTO members (minute, member, hostname, worker, pid, server, started_at,
                                    seen_at, figures)
               VALUES (date_trunc('minute', clock_timestamp()), $1, $2, $3, $4, $5, $6,
                       clock_timestamp(), $7::text::jsonb)
               ON CONFLICT (minute, member) DO UPDATE
                 SET seen_at = excluded.seen_at, figures = excluded.figures""",
            self.member,
            socket.gethostname(),
            self.worker,
            os.getpid(),
            self.server,
            self.started_at,
            msgspec.json.encode(msgspec.structs.replace(self.figures(), cpu=self._cpu())).decode(),
        )

    def _cpu(self) -> float:
        """Return the average number of cores in use since the last row."""
        now, used = time.monotonic(), time.process_time()
        (before, used_before), self._used = self._used, (now, used)
        return round((used - used_before) / max(now - before, 1e-3), 4)

    def figures(self) -> ProcessFigures:
        times = resource.getrusage(resource.RUSAGE_SELF)
        consumers = islice(self._consumers.counts().items(), MAX_REPORTED)
        return ProcessFigures(
            version=__version__,
            cpu_user_seconds=times.ru_utime,
            cpu_system_seconds=times.ru_stime,
            memory_bytes=resident_bytes(),
            load_average=os.getloadavg()[0],
            waiting_pops=self._waiting.parked,
            parked=self._waiting.parked_by_queue(MAX_PARKED),
            consumers=[(queue, group, count) for (queue, group), count in consumers],
            reports=self.reports.alive(),
            requests=self._requests(),
            messages=self._messages(),
            db_errors=self._total("penstock_database_outages_total"),
            pool=PoolFigures(self._database.pool_size, self._database.pool_idle),
        )

    def _requests(self) -> RequestCounts:
        requests = RequestCounts()
        for (_, route, _), count in self._metrics.values_of("penstock_http_requests_total").items():
            kind = "pop" if route.startswith("/api/v1/pop") else _ROUTES.get(route)
            if kind:
                setattr(requests, kind, getattr(requests, kind) + int(count))
        return requests

    def _messages(self) -> OperationCounts:
        names = ("pushed", "popped", "acked")
        return OperationCounts(*(self._total(f"penstock_queue_{name}_total") for name in names))

    def _total(self, name: str) -> int:
        return int(sum(self._metrics.values_of(name).values()))

    async def members(self) -> list[BrokerPresence]:
        rows = await self._database.browse(MEMBERS, ALIVE_SECONDS)
        decode = msgspec.json.Decoder(ProcessFigures).decode
        return [struct_of(BrokerPresence, row, figures=decode(row["figures"])) for row in rows]

    async def consumers(self) -> list[ConsumerHealth]:
        """Return the latest reports of the consumers of all processes."""
        others = [member for member in await self.members() if member.id != self.member]
        reports = [report for member in others for report in member.figures.reports]
        return merged([*reports, *self.reports.alive()])

    async def series(
        self,
        since: datetime,
        until: datetime,
        bucket: timedelta,
        hostname: str | None,
        worker: int | None,
    ) -> list[LoadPoint]:
        rows = await self._database.browse(
            SERIES, since, until, bucket.total_seconds(), hostname, worker
        )
        return [LoadPoint(*row.values()) for row in rows]

    async def parked(
        self, since: datetime, until: datetime, bucket: timedelta, queue: str | None
    ) -> list[ParkedPoint]:
        rows = await self._database.browse(PARKED, since, until, bucket.total_seconds(), queue)
        return [ParkedPoint(*row.values()) for row in rows]

    async def _keep_saying(self) -> None:
        tidied = -3600.0
        while True:
            try:
                await self.say()
                if time.monotonic() - tidied > 3600:
                    tidied = time.monotonic()
                    await self._database.fetch(
                        "DELETE FROM members WHERE minute < now() - make_interval(days => $1)",
                        KEPT_DAYS,
                    )
            except Unavailable:
                pass  # the health check reports that
            except asyncpg.PostgresError as error:
                log.warning("this process could not update its row in `members`: %s", error)
            await asyncio.sleep(BEAT_SECONDS)
