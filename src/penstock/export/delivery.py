"""One leased block on its way: sent whole, or cut in halves until what is bad stands alone, then
completed or given back.

A block is first sent as it was stored. When the destination says it is bad or too big, it is cut in
the middle, always the same way, and each part has its own key
(`<route>-<sequence>-<tag>-<first>-<last>`), so that after a crash the same parts are sent under the
same keys. What is still to be sent is kept on the block: a retry does not repeat what went through.

The tag is the queue's life and the checksum of the stored body. Sequence numbers begin at 1 with a
new queue, and after power loss a number may go to other records; a destination that remembers keys
would take those for seen and drop them.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import crc32c

from penstock.errors import StorageError
from penstock.export.backoff import Backoff
from penstock.export.breaker import Permit
from penstock.export.context import RouteContext
from penstock.export.deadletters import DeadLetter, DeadLetters
from penstock.export.destinations import Batch, Denied, Destination, Refused, Retry, TooBig
from penstock.export.routestate import RouteState
from penstock.export.sendqueue import Block, SendQueue
from penstock.export.telemetry import RouteMetrics

log = logging.getLogger("penstock.export")
LATENCY_WEIGHT = 0.2
Prepared = tuple[Batch, Any]  # a batch, and what its destination made of it


class Delivery:
    def __init__(
        self,
        queue: SendQueue,
        destination: Destination,
        dead_letters: DeadLetters,
        backoff: Backoff,
        state: RouteState,
        context: RouteContext,
        metrics: RouteMetrics,
        *,
        on_denied: Callable[[str], None],
    ) -> None:
        self._route = queue.name
        self._settings = queue.settings
        self._queue = queue
        self._destination = destination
        self._dead_letters = dead_letters
        self._backoff = backoff
        self._state = state
        self._context = context
        self._clock = context.clock
        self._metrics = metrics
        self._on_denied = on_denied
        self.inflight = 0
        self.latency = 0.0  # moving average, seconds
        self.throttled = 0  # answers that asked for less (429, time-outs), ever
        self.last_error: str | None = None
        self.failing_since: float | None = None  # wall time of the first error after a success

    async def prepare(self, block: Block) -> Prepared:
        """The whole block as a batch and what the destination makes of it."""
        batch = _batch_of(self.key_of(block), block)
        return batch, await self._prepared(batch)

    def key_of(self, block: Block) -> str:
        """The same at every attempt, in this process and the next."""
        return (
            f"{self._route}-{block.sequence}-{self._state.life:08x}{crc32c.crc32c(block.body):08x}"
        )

    async def try_prepare(self, block: Block) -> Prepared | None:
        """The same, or None when it fails: whoever sends it handles the error."""
        try:
            return await self.prepare(block)
        except Exception as error:  # noqa: BLE001 a destination's own fault
            text = "route %s: batch %d cannot be prepared: %r"
            log.warning(text, self._route, block.sequence, error)
            return None

    async def _prepared(self, batch: Batch) -> Any:
        if self._destination.is_cheap(batch):
            return self._destination.prepare(batch)
        return await self._context.in_pool(self._destination.prepare, batch)

    async def deliver(self, block: Block, permit: Permit, prepared: Prepared | None = None) -> bool:
        """Send the block and complete it, or give it back; False when the destination refused for a
        reason that is not the block's. Never raises for what a destination or a disk does."""
        retried = block.attempts > 0
        if retried:
            self._metrics.add("queue_retry_total")
        try:
            if self._settings.max_age and self._age(block) > self._settings.max_age:
                detail = f"older than {self._settings.max_age:g} s"
                await self._bury(block, self._remaining(block), "expired", detail)
            else:
                await self._send_all(block, prepared)
            self._queue.ack(block, block.dead)
            permit.success()
            self._backoff.succeeded()
            self.last_error = self.failing_since = None
            if retried:
                self._metrics.add("queue_retry_success_total")
        except Retry as error:
            await self._failed(block, permit, error)
        except Denied as error:
            self._metrics.add("queue_retry_failure_total", 1, error.kind)
            self._remember(str(error))
            self._queue.give_back(block, attempted=False)  # it says nothing about the batch
            permit.release()
            self._on_denied(str(error))
            return False
        except StorageError as error:  # the dead letters could not be written
            self._queue.give_back(block, attempted=False)
            permit.release()
            self._note(f"a dead letter cannot be written: {error}", "storage")
            self._backoff.failed()
        except asyncio.CancelledError:
            self._queue.give_back(block, attempted=False)
            raise
        except Exception as error:  # a destination's own fault must not stop the route in silence
            text = "route %s: sending batch %d failed unexpectedly"
            log.exception(text, self._route, block.sequence)
            await self._failed(block, permit, Retry("internal", repr(error)))
        return True

    async def _failed(self, block: Block, permit: Permit, error: Retry) -> None:
        self._note(str(error), error.kind)
        if error.kind in ("rate_limit", "timeout"):
            self.throttled += 1
        permit.failure()
        self._backoff.failed(error.retry_after)
        limit = self._settings.max_attempts
        if limit and block.attempts + 1 >= limit:
            try:
                detail = f"{limit} attempts, the last: {error}"
                await self._bury(block, self._remaining(block), "attempts", detail)
            except StorageError as failure:
                log.error("route %s: a dead letter cannot be written: %s", self._route, failure)
            else:
                self._queue.ack(block, block.dead)
                return
        self._queue.give_back(block)

    def _note(self, error: str, kind: str) -> None:
        self._metrics.add("queue_retry_failure_total", 1, kind)
        if error != self.last_error:
            log.warning("route %s: %s: %s", self._route, self._destination.describe(), error)
        self._remember(error)

    def _remember(self, error: str) -> None:
        self.last_error = error
        if self.failing_since is None:
            self.failing_since = self._clock.wall()

    def _age(self, block: Block) -> float:
        return self._clock.steady() - block.enqueued / 1e6

    @staticmethod
    def _remaining(block: Block) -> list[tuple[int, int]]:
        return [(0, block.records)] if block.todo is None else list(block.todo)

    async def _send_all(self, block: Block, prepared: Prepared | None) -> None:
        if block.todo is None:
            batch, ready = prepared or await self.prepare(block)
            try:
                await self._send(batch, ready)
                return
            except (Refused, TooBig) as error:
                await self._cut(block, 0, block.records, error)
        whole = _batch_of("", block)
        while block.todo:
            start, stop = block.todo[-1]
            key = f"{self.key_of(block)}-{start}-{stop - 1}"
            batch = await self._context.in_pool(whole.part, start, stop, key)
            try:
                await self._send(batch, await self._prepared(batch))
                block.todo.pop()
            except (Refused, TooBig) as error:
                block.todo.pop()
                try:
                    await self._cut(block, start, stop, error)
                except StorageError:
                    block.todo.append((start, stop))
                    raise

    async def _cut(self, block: Block, start: int, stop: int, error: Refused | TooBig) -> None:
        """Replace the range by its halves, or bury the one record that remains."""
        if stop - start == 1:
            reason = "refused" if isinstance(error, Refused) else "too_large"
            await self._bury(block, [(start, stop)], reason, str(error))
            block.todo = block.todo or []
            return
        middle = (start + stop) // 2
        block.todo = [*(block.todo or []), (middle, stop), (start, middle)]

    async def _send(self, batch: Batch, prepared: Any) -> None:
        async with self._context.limit:
            self.inflight += 1
            began = self._clock.monotonic()
            try:
                await self._destination.send(batch, prepared)
            finally:
                self.inflight -= 1
                took = self._clock.monotonic() - began
                self.latency += (took - self.latency) * (LATENCY_WEIGHT if self.latency else 1.0)
        self._metrics.add("batches_total")
        self._metrics.add("bytes_total", len(batch.body))

    async def _bury(
        self, block: Block, ranges: list[tuple[int, int]], reason: str, detail: str
    ) -> None:
        """Put records into the dead letters, durably; they count when the block is completed."""
        records = await self._context.in_pool(_batch_of("", block).split)
        letters = [
            DeadLetter(
                sequence=block.sequence,
                index=index,
                reason=reason,
                detail=detail,
                attempts=block.attempts + 1,
                enqueued=block.enqueued / 1e6,
                died=self._clock.wall(),
                record=records[index],
            )
            for start, stop in ranges
            for index in range(start, stop)
        ]
        await self._context.in_pool(self._dead_letters.add, letters)
        block.dead += len(letters)
        text = "route %s: %d records of batch %d are dead letters: %s"
        log.warning(text, self._route, len(letters), block.sequence, detail)


def _batch_of(key: str, block: Block) -> Batch:
    return Batch(key, block.body, block.records, block.encoding, block.compression)
