"""Tells the broker how this client's consumers are, so that the Console shows it.

One request every `REPORT_SECONDS` for all of them. It is news, not work: what fails is tried again
at the next one, and a broker that does not know the request is not asked again.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Sequence

from penstock.client.brokers import Brokers
from penstock.client.consumer import Consumer
from penstock.contract import operations
from penstock.contract.consumers import ConsumerHealth
from penstock.errors import NotFound, PenstockError
from penstock.protocol.names import QUEUE_MODE

log = logging.getLogger("penstock.client")

REPORT_SECONDS = 5.0
REQUEST_SECONDS = 5.0
FAREWELL_SECONDS = 1.0  # the program is about to end
MAX_ERROR_CHARS = 1000  # characters of an error's text


class HealthReporter:
    """Reports while `run` runs."""

    def __init__(self, brokers: Brokers, consumers: Sequence[Consumer]) -> None:
        self._brokers, self._consumers = brokers, consumers
        self._ids = {consumer: os.urandom(8).hex() for consumer in consumers}

    async def run(self) -> None:
        """Report until cancelled, and then once more that the consumers end."""
        try:
            while True:
                if not await self._report(REQUEST_SECONDS, ended=False):
                    return
                await asyncio.sleep(REPORT_SECONDS)
        except asyncio.CancelledError:
            await self._report(FAREWELL_SECONDS, ended=True)
            raise

    async def _report(self, timeout: float, *, ended: bool) -> bool:
        body = {"consumers": [self._health(consumer, ended) for consumer in self._consumers]}
        try:
            await self._brokers.call(
                operations.REPORT_CONSUMERS, body=body, timeout=timeout, retry_for=0.0
            )
        except NotFound:
            return False
        except PenstockError as error:
            log.debug("the health of the consumers could not be reported: %s", error)
        return True

    def _health(self, consumer: Consumer, ended: bool) -> ConsumerHealth:
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
            waiting=consumer.waiting,
            handled=consumer.handled,
            failed=consumer.failed,
            last_error=error[:MAX_ERROR_CHARS] if error else None,
            last_error_at=consumer.last_error_at,
            started_at=consumer.started_at,
            ended=ended,
        )
