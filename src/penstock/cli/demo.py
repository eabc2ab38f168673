"""`penstock demo`: fill a running broker with example data for the Console.

    penstock serve            # in one terminal
    penstock demo             # in another; then open http://127.0.0.1:6632/

The data is a small shop: queues with several groups, a consumer that is too slow, a consumer whose
gateway fails, delayed reminders, a schedule, a topic with two groups, a route whose destination
goes up and down, and the reports of three pipelines. All names begin with `demo-`. Ctrl-C and
SIGTERM remove the data, unless `--keep` is given.

The Python client pushes and consumes. Each other part is a loop over the HTTP API, because other
ports may be unreachable. While the broker is unavailable, the loops wait.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.cli import BrokerApi, app
from penstock.client import Client, Message
from penstock.client.brokers import Brokers
from penstock.client.consumer import ConsumerOptions
from penstock.contract.operation import Operation
from penstock.errors import NotFound, PenstockError, Unavailable
from penstock.io.tasks import RETRY_SECONDS

QUEUES: dict[str, dict[str, Any]] = {  # with their options
    "demo-orders": {"retentionEnabled": True, "completedRetentionSeconds": 600},
    "demo-payments": {"retryLimit": 2, "retryDelay": 500, "leaseTime": 30},
    "demo-emails": {"ordering": "none"},
    "demo-thumbnails": {"ordering": "none", "leaseTime": 60},
    "demo-audit-log": {"ttl": 3600},
}
CONSUMERS = (  # address, seconds per message, fraction that fails
    ("demo-orders@billing", 0.002, 0.0),
    ("demo-orders@mail", 0.02, 0.0),
    ("demo-payments@gateway", 0.01, 0.06),
    ("demo-emails@smtp", 0.004, 0.0),
    ("demo-thumbnails@resize", 0.25, 0.0),
)
TOPIC, ROUTE, SCHEDULE = "demo-clicks", "demo-warehouse", "demo-nightly-report"
PIPELINES = ("demo-enrich-orders", "demo-nightly-rollup", "demo-import-prices")
GRAPH = [  # the first pipeline's: kind, name, title, inputs
    ("source", "orders", "queue demo-orders", []),
    ("source", "customers", "table customers", []),
    ("step", "paid", "", ["orders"]),
    ("step", "enriched", "", ["paid", "customers"]),
    ("sink", "lake", "delta s3://lake/orders", ["enriched"]),
    ("sink", "mails", "queue demo-emails", ["enriched"]),
]
FAILURES = (
    *["gateway timeout after 30 s"] * 6,
    *["card declined by the issuer"] * 3,
    "currency 'XXU' is unknown",
)
UP_SECONDS, DOWN_SECONDS = 40.0, 20.0  # cycle of the route's destination
REMINDER_SECONDS = 3600  # delay of a reminder
ANSWER_SECONDS = 5.0  # wait for unanswered requests before the cleanup
NAMES = ("Ada", "Grace", "Edsger", "Barbara", "Donald", "Radia", "Leslie", "Margaret")


class PaymentFailed(Exception):
    """The error that failing consumers of the demo raise."""


class Shop:
    def __init__(self, api: BrokerApi, rate: float) -> None:
        self.brokers = Brokers([api.url], token=api.token or None, retry_for=0.0)
        self.client = Client(api.url, token=api.token or None)
        self._pushes = self.client.buffer(linger=0.0)
        self._rate = rate  # orders per second
        self._order = 0
        self._chance = random.Random(7)
        self._destination_up = True
        self._requests: set[asyncio.Future[Any]] = set()  # not answered yet

    async def ask(self, method: str, target: str, body: Any = None) -> Any:
        """Send a request. Cancelling the caller does not cancel it: `clean_up` waits for it."""
        call = self.brokers.call(Operation(method, target, Any, ""), body=body)
        request = asyncio.ensure_future(call)
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
        return await asyncio.shield(request)

    async def set_up(self) -> None:
        for queue, options in QUEUES.items():
            body = {"queue": queue, "namespace": "shop", "options": options}
            await self.ask("POST", "/api/v1/configure", body)
        await self.ask("POST", f"/topics/{TOPIC}")
        server = await asyncio.start_server(self._receive, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with contextlib.suppress(PenstockError):  # there is none from an earlier demo
            await self.ask("DELETE", f"/api/v1/routes/{ROUTE}?force=true")
        destination = {"type": "http", "url": f"http://127.0.0.1:{port}/in", "timeout": "2s"}
        body = {"name": ROUTE, "source": {"topic": TOPIC}, "destination": destination}
        await self.ask("POST", "/api/v1/routes", body)
        body = {"cron": "0 3 * * *", "timezone": "Europe/Rome", "queue": "demo-emails"}
        await self.ask("PUT", f"/api/v1/schedules/{SCHEDULE}", body | {"payload": {"id": 0}})
        for address, seconds, failing in CONSUMERS:
            self._consume(address, seconds, failing)

    def parts(self) -> list[Callable[[], Awaitable[None]]]:
        return [
            self._push_orders,
            self._produce_clicks,
            self._switch_destination,
            self._report_pipelines,
            self._read_topic,
            self._push_reminders,
            lambda: self.client.run(handle_signals=False),
        ]

    async def _push_orders(self) -> None:
        chance = self._chance
        swing = 1 + 0.6 * random.Random(int(time.time() / 15)).random()
        for _ in range(max(1, round(self._rate * swing))):
            self._order += 1
            order = {
                "id": self._order,
                "customer": {"name": chance.choice(NAMES), "country": chance.choice(["DE", "IT"])},
                "total": round(chance.uniform(3, 180), 2),
                "lines": [
                    {"sku": f"s-{chance.randrange(100)}", "quantity": chance.randrange(1, 5)}
                ],
            }
            partition = f"c-{chance.randrange(24)}"
            headers = {
                "shop": "web" if self._order % 3 else "app",
                "tenant": f"t-{self._order % 5}",
            }
            wanted = ["demo-orders", "demo-payments"]
            wanted += ["demo-emails"] * (chance.random() < 0.7)
            wanted += ["demo-thumbnails"] * (chance.random() < 0.12)
            wanted += ["demo-audit-log"] * (chance.random() < 0.2)
            for queue in wanted:
                await self._pushes.push(queue, order, partition=partition, headers=headers)
        await asyncio.sleep(1)

    def _consume(self, address: str, seconds: float, failing: float) -> None:
        """Consume with a handler that takes `seconds`; a fraction `failing` of messages fail."""

        async def work(message: Message) -> None:
            await asyncio.sleep(seconds)
            if message.data["id"] * 7919 % 1000 / 1000 < failing:
                raise PaymentFailed(random.Random(message.data["id"]).choice(FAILURES))

        name = f"{address.partition('@')[2]}-1"
        options = ConsumerOptions(batch=20, partitions=10, name=name, tracebacks=False)
        self.client.consumer(address, **options)(work)

    async def _push_reminders(self) -> None:
        reminder = {"id": self._order, "remind": "your basket waits"}
        await self._pushes.push("demo-emails", reminder, delay=REMINDER_SECONDS)
        await asyncio.sleep(10)

    async def _produce_clicks(self) -> None:
        pages = [f"/p/{self._chance.randrange(40)}" for _ in range(max(1, round(self._rate * 2)))]
        payloads = [
            msgspec.json.encode({"page": page, "at": time.time()}).decode() for page in pages
        ]
        await self.ask("POST", f"/topics/{TOPIC}/produce", {"payloads": payloads})
        await asyncio.sleep(0.5)

    async def _read_topic(self) -> None:
        """Commit one group close to the end and the other at 90 % of the records."""
        end = (await self.ask("GET", f"/topics/{TOPIC}/next_offset"))["next_offset"]
        groups = f"/topics/{TOPIC}/groups"
        await self.ask("POST", f"{groups}/dashboards/commit", {"offset": max(0, end - 3)})
        await self.ask("POST", f"{groups}/reports/commit", {"offset": end * 9 // 10})
        await asyncio.sleep(2)

    async def _switch_destination(self) -> None:
        self._destination_up = True
        await asyncio.sleep(UP_SECONDS)
        self._destination_up = False
        await asyncio.sleep(DOWN_SECONDS)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the route's destination: accept everything while up, nothing while down."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1])
                    for line in head.lower().splitlines()
                    if line.startswith(b"content-length")
                )
                await reader.readexactly(length)
                status = b"204 No Content" if self._destination_up else b"503 Service Unavailable"
                body = b"" if self._destination_up else b"Content-Length: 0\r\n"
                writer.write(b"HTTP/1.1 " + status + b"\r\n" + body + b"\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the broker closed the connection
        finally:
            writer.close()

    async def _report_pipelines(self) -> None:
        begun, rows = time.time() - 5400, 1_250_000
        reports: list[dict[str, Any]] = [
            {"state": "finished", "rows": 4_820_331, "batch": 12, "started_at": begun - 30_000},
            {"state": "failed", "rows": 1200, "batch": 3, "started_at": begun - 9000,
             "error": "the file prices.csv has no column 'currency'"},
        ]  # fmt: skip
        about = {"host": socket.gethostname(), "pid": os.getpid(), "master": "local[2]"}
        for name, report in zip(PIPELINES[1:], reports, strict=True):
            await self.ask("PUT", f"/api/v1/pipelines/{name}", {**about, **report})
        graph = [
            {"kind": kind, "name": name, "title": title, "inputs": inputs}
            for kind, name, title, inputs in GRAPH
        ]
        batches: list[dict[str, Any]] = []
        while True:
            rows += 740
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            batch = {"batch": rows // 740, "at": now, "rows": 740, "ms": 830}
            batches = [batch, *batches][:20]
            report = {"state": "running", "rows": rows, "rows_per_second": 370.0, "lag": 42,
                      "batch": rows // 740, "batch_ms": 830, "started_at": begun,
                      "graph": graph, "batches": batches}  # fmt: skip
            await self.ask("PUT", f"/api/v1/pipelines/{PIPELINES[0]}", {**about, **report})
            await asyncio.sleep(2)

    async def clean_up(self) -> None:
        """Remove the data, after unanswered pushes: a late push would create its queue again."""
        if self._requests:
            await asyncio.wait(self._requests, timeout=ANSWER_SECONDS)
        removals = [f"/api/v1/routes/{ROUTE}?force=true", f"/topics/{TOPIC}"]
        removals += [f"/api/v1/schedules/{SCHEDULE}"]
        removals += [f"/api/v1/resources/queues/{queue}" for queue in QUEUES]
        removals += [f"/api/v1/pipelines/{name}" for name in PIPELINES]
        for target in removals:
            with contextlib.suppress(NotFound):
                await self.ask("DELETE", target)


async def _for_ever(part: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await part()
        except Unavailable:
            await asyncio.sleep(RETRY_SECONDS)


async def run(api: BrokerApi, rate: float, keep: bool) -> None:
    logging.getLogger("penstock.client").setLevel(logging.ERROR)  # payments fail on purpose
    shop = Shop(api, rate)
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    try:
        await shop.set_up()
        print(f"The demo runs: open {api.url.rstrip('/')}/console/ (Ctrl-C stops it)")
        async with asyncio.TaskGroup() as group:
            for part in shop.parts():
                group.create_task(_for_ever(part))
    except* PenstockError as errors:
        raise errors.exceptions[0] from None
    finally:
        await shop.client.close()
        if not keep:
            print("Removing what the demo created ...")
            await shop.clean_up()
        await shop.brokers.close()


@app.command
def demo(
    *,
    rate: Annotated[float, Parameter(validator=Number(gte=0.1, lte=1000))] = 20.0,
    keep: bool = False,
    api: BrokerApi = BrokerApi(),
) -> None:
    """Fill a broker with live example data, to try the Console.

    Ctrl-C or SIGTERM ends it and removes the data.

    Example: `penstock serve & penstock demo`, then open http://127.0.0.1:6632/console/

    :param rate: Orders per second.
    :param keep: Keep the example data when the demo ends.
    """
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(run(api, rate, keep))
