"""Report the state of this client's consumers to the broker, which shows it in the Console.

One request every `REPORT_SECONDS` reports all of them. A request that fails is not repeated: the
next report replaces it.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

from penstock.client.admin import AdminClient
from penstock.client.brokers import Brokers
from penstock.client.consumer import Consumer
from penstock.contract import operations
from penstock.contract.consumers import ConsumerHealth
from penstock.errors import PenstockError
from penstock.protocol.names import QUEUE_MODE

log = logging.getLogger("penstock.client")

IDLE = (
    "messages wait while handlers idle, because the queue keeps order in {} partition(s) and the "
    "concurrency is {}. Push with partition=, or give up order: configure(queue, ordering='none')"
)

REPORT_SECONDS = 5.0
REQUEST_SECONDS = 5.0
FAREWELL_SECONDS = 1.0  # the program is about to end
MAX_ERROR_CHARS = 1000  # characters of an error's text


class HealthReporter:
    """Reports while `run` runs."""

    def __init__(
        self, brokers: Brokers, admin: AdminClient, consumers: Sequence[Consumer[..., Any]]
    ) -> None:
        self._brokers, self._admin, self._consumers = brokers, admin, consumers
        self._unchecked = {one for one in consumers if one.concurrency > 1}
        self._problems: dict[Consumer[..., Any], str] = {}
        self._ids = {consumer: os.urandom(8).hex() for consumer in consumers}

    async def run(self) -> None:
        """Report until cancelled, then report that the consumers end."""
        try:
            while True:
                await self._report(REQUEST_SECONDS, ended=False)
                await self._share_rates()
                await self._warn_of_idle_handlers()
                await asyncio.sleep(REPORT_SECONDS)
        except asyncio.CancelledError:
            await self._report(FAREWELL_SECONDS, ended=True)
            raise

    async def _report(self, timeout: float, *, ended: bool) -> None:
        body = {"consumers": [self._health(consumer, ended) for consumer in self._consumers]}
        try:
            await self._brokers.call(
                operations.REPORT_CONSUMERS, body=body, timeout=timeout, retry_for=0.0
            )
        except PenstockError as error:
            log.debug("the health of the consumers could not be reported: %s", error)

    async def _share_rates(self) -> None:
        """Divide each rate that belongs to a group by the number of its consumers."""
        for consumer in self._consumers:
            if consumer.shared_rate is not None:
                where = consumer.address
                group = where.group or QUEUE_MODE
                try:
                    sharing = await self._admin.consumers(where.queue, group=group)
                except PenstockError:
                    continue  # the last number counts until the next report
                consumer.shared_rate.consumers = max(1, len(sharing))

    async def _warn_of_idle_handlers(self) -> None:
        """Warn once about a consumer whose handlers idle because the queue keeps order."""
        for consumer in tuple(self._unchecked):
            if consumer.most_calls >= consumer.concurrency:
                self._unchecked.discard(consumer)
            elif consumer.most_calls:
                try:
                    busy, waiting = await self._ordered_partitions(consumer)
                except PenstockError:
                    continue  # requested again with the next report
                if busy is None:
                    self._unchecked.discard(consumer)
                elif busy < consumer.concurrency and waiting > busy:
                    self._unchecked.discard(consumer)
                    problem = IDLE.format(busy, consumer.concurrency)
                    self._problems[consumer] = problem
                    log.warning("%s: %s", consumer.address, problem)

    async def _ordered_partitions(self, consumer: Consumer[..., Any]) -> tuple[int | None, int]:
        """Return in how many partitions the consumer can work at a time, and how many messages
        wait in them; None if the queue keeps no order.
        """
        where = consumer.address
        about = await self._brokers.call(operations.GET_QUEUE_OPTIONS, where.queue)
        if about.options.ordering == "none":
            return None, 0
        some = await self._admin.partitions(where.queue, group=where.group or "", limit=500)
        of_it = [one for one in some if where.partition in (None, one.name)]
        return len(of_it), sum(one.waiting for one in of_it)

    def _health(self, consumer: Consumer[..., Any], ended: bool) -> ConsumerHealth:
        error = consumer.last_error
        return ConsumerHealth(
            id=self._ids[consumer],
            name=consumer.name[:200],
            queue=consumer.address.queue,
            group=consumer.address.group or QUEUE_MODE,
            hostname=socket.gethostname()[:200],
            pid=os.getpid(),
            concurrency=consumer.concurrency,
            in_flight=consumer.in_flight,
            in_flight_seconds=consumer.in_flight_seconds,
            handled=consumer.handled,
            failed=consumer.failed,
            last_error=error[:MAX_ERROR_CHARS] if error else None,
            last_error_at=consumer.last_error_at,
            problem=self._problems.get(consumer),
            started_at=consumer.started_at,
            ended=ended,
        )
