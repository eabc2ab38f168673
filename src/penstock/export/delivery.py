"""Deliver a leased block: send it whole, or cut it in halves until bad records are alone. Then
complete it or release it.

A block is first sent as it is stored. If the destination refuses it as bad or too large, it is cut
in the middle. The cuts are always the same, and each part has its own key
(`<route>-<sequence>-<tag>-<first>-<last>`), so after a crash the same parts are sent under the same
keys. The unsent ranges are kept in the block, so a retry does not repeat delivered parts.

The tag is the number of the queue's life and the checksum of the stored body. Sequence numbers
begin at 1 in a new queue, and after power loss a number may be assigned to other records. Without
the tag, a destination that remembers keys would drop those as duplicates.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import crc32c

from penstock.errors import StorageError
from penstock.export.context import RouteContext
from penstock.export.deadletters import DeadRecord, DeadRecords
from penstock.export.destinations import (
    BatchRefused,
    Denied,
    Destination,
    OutgoingBatch,
    RetryLater,
    TooBig,
)
from penstock.export.routestate import RouteState
from penstock.export.sendqueue import Block, SendQueue
from penstock.export.telemetry import RouteMetrics

log = logging.getLogger("penstock.export")
LATENCY_WEIGHT = 0.2
CHEAP_BYTES = 16 << 10  # fewer are prepared at once, without a trip to the pool
Prepared = tuple[OutgoingBatch, Any]  # a batch, and what `prepare` returned for it


class BatchDelivery:
    def __init__(
        self,
        queue: SendQueue,
        destination: Destination,
        dead_letters: DeadRecords,
        state: RouteState,
        context: RouteContext,
        metrics: RouteMetrics,
    ) -> None:
        self._route = queue.name
        self._settings = queue.settings
        self._queue = queue
        self._destination = destination
        self._dead_letters = dead_letters
        self._state = state
        self._context = context
        self._clock = context.clock
        self._metrics = metrics
        self.inflight = 0
        self.latency = 0.0  # moving average, seconds
        self.throttled = 0  # answers so far that ask for fewer requests (429, timeouts)
        self.last_error: str | None = None
        self.failing_since: float | None = None  # wall time of the first error after a success

    async def try_prepare(self, block: Block) -> Prepared | None:
        """Return the block as a batch with the result of `prepare`; None if preparing fails: the
        sender then prepares again and handles the error.
        """
        try:
            batch = self._batch(block)
            return batch, await self._prepare(batch)
        except Exception as error:  # noqa: BLE001 a fault of the destination's code
            text = "route %s: batch %d cannot be prepared: %r"
            log.warning(text, self._route, block.sequence, error)
            return None

    def _batch(self, block: Block) -> OutgoingBatch:
        """Return the block as a batch. Its key is the same at every attempt, in every process."""
        tag = f"{self._state.life:08x}{crc32c.crc32c(block.body):08x}"
        key = f"{self._route}-{block.sequence}-{tag}"
        return OutgoingBatch(key, block.body, block.records, block.encoding, block.compression)

    async def _prepare(self, batch: OutgoingBatch) -> Any:
        if len(batch.body) < CHEAP_BYTES:
            return self._destination.prepare(batch)
        return await self._context.in_pool(self._destination.prepare, batch)

    async def deliver(self, block: Block, prepared: Prepared | None = None) -> None:
        """Send the block and complete it. Raises RetryLater or Denied of the destination, or
        StorageError if dead letters cannot be written. The block is then released, or dead.
        """
        retried = block.attempts > 0
        if retried:
            self._metrics.add("queue_retry_total")
        try:
            age, max_age = self._clock.steady() - block.enqueued / 1e6, self._settings.max_age
            if max_age and age > max_age:
                await self._dead_letter(block, "expired", f"older than {max_age:g} s")
            else:
                await self._send_all(block, prepared)
            self._queue.ack(block, block.dead)
            self.last_error = self.failing_since = None
            if retried:
                self._metrics.add("queue_retry_success_total")
        except RetryLater as error:
            await self._failed(block, error)
            raise
        except Denied as error:
            self._metrics.add("queue_retry_failure_total", 1, error.kind)
            self._remember(str(error))
            self._queue.give_back(block, attempted=False)  # not the fault of the batch
            raise
        except StorageError as error:
            self._queue.give_back(block, attempted=False)
            self._note(f"a dead letter cannot be written: {error}", "storage")
            raise
        except asyncio.CancelledError:
            self._queue.give_back(block, attempted=False)
            raise
        except Exception as error:  # a fault in a destination must not stop the route silently
            text = "route %s: sending batch %d failed unexpectedly"
            log.exception(text, self._route, block.sequence)
            failure = RetryLater("internal", repr(error))
            await self._failed(block, failure)
            raise failure from error

    async def _failed(self, block: Block, error: RetryLater) -> None:
        self._note(str(error), error.kind)
        if error.kind in ("rate_limit", "timeout"):
            self.throttled += 1
        limit = self._settings.max_attempts
        if limit and block.attempts + 1 >= limit:
            try:
                await self._dead_letter(block, "attempts", f"{limit} attempts, the last: {error}")
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

    async def _send_all(self, block: Block, prepared: Prepared | None) -> None:
        whole = prepared[0] if prepared else self._batch(block)
        if block.remaining is None:
            try:
                await self._send(whole, prepared[1] if prepared else await self._prepare(whole))
                return
            except (BatchRefused, TooBig) as error:
                await self._cut(block, 0, block.records, error)
        while block.remaining:
            start, stop = block.remaining[-1]
            batch = await self._context.in_pool(whole.part, start, stop)
            try:
                await self._send(batch, await self._prepare(batch))
                block.remaining.pop()
            except (BatchRefused, TooBig) as error:
                block.remaining.pop()
                try:
                    await self._cut(block, start, stop, error)
                except StorageError:
                    block.remaining.append((start, stop))
                    raise

    async def _cut(self, block: Block, start: int, stop: int, error: BatchRefused | TooBig) -> None:
        """Replace the range by its halves, or make its only record a dead letter."""
        if stop - start == 1:
            reason = "refused" if isinstance(error, BatchRefused) else "too_large"
            undelivered = error.undelivered if isinstance(error, BatchRefused) else ()
            await self._dead_letter(block, reason, str(error), [(start, stop)], undelivered)
            block.remaining = block.remaining or []
            return
        middle = (start + stop) // 2
        block.remaining = [*(block.remaining or []), (middle, stop), (start, middle)]

    async def _send(self, batch: OutgoingBatch, prepared: Any) -> None:
        async with self._context.limit:
            self.inflight += 1
            began = self._clock.monotonic()
            try:
                rejected = await self._destination.send(batch, prepared)
            finally:
                self.inflight -= 1
                took = self._clock.monotonic() - began
                self.latency += (took - self.latency) * (LATENCY_WEIGHT if self.latency else 1.0)
        self._metrics.add("batches_total")
        if rejected:
            self._metrics.add("rejected_items_total", rejected)
        self._metrics.add("bytes_total", len(batch.body))

    async def _dead_letter(
        self,
        block: Block,
        reason: str,
        detail: str,
        ranges: list[tuple[int, int]] | None = None,
        undelivered: Sequence[bytes] = (),
    ) -> None:
        """Write the records in these ranges, or all unsent ones, to the dead letters, durably. They
        are counted when the block is completed. `undelivered` replaces the only record of the
        range, if a part of it was delivered.
        """
        if ranges is None:
            ranges = [(0, block.records)] if block.remaining is None else block.remaining
        count = sum(stop - start for start, stop in ranges)
        records = undelivered or await self._context.in_pool(self._batch(block).split)
        if undelivered:
            ranges = [(0, len(undelivered))]
        letters = [
            DeadRecord(
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
        block.dead += count
        text = "route %s: %d records of batch %d are dead letters: %s"
        log.warning(text, self._route, count, block.sequence, detail)
