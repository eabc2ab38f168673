"""Client-side batching: many small pushes become few requests.

`push` adds to the buffer and returns; it waits only while the buffer is full, which is how a slow broker slows its
producers down. One task sends the oldest messages in order, a batch at a time. A batch that could not be delivered goes
back to the front and is sent again, with the transaction ids it had, so order holds and nothing is stored twice.
What the broker refuses for good (a malformed message) or has no room for is set aside in `refused` with its reason.

`close` sends what is left within a deadline and returns what could not be sent: nothing is dropped in silence.
"""

import asyncio
import logging
from collections import deque
from types import TracebackType
from typing import Any, Self

from penstock.client.connection import Backoff
from penstock.client.messages import Address, QueueFull
from penstock.client.queues import QueueClient, new_item
from penstock.errors import InvalidRequest, PenstockError, Unavailable

log = logging.getLogger("penstock.client")

Item = dict[str, Any]


class PushBuffer:
    """Made by `Client.buffer`. Use it as `async with`, or call `close`."""

    def __init__(
        self,
        client: QueueClient,
        *,
        max_messages: int = 10_000,
        batch: int = 500,
        linger: float = 0.05,
        close_timeout: float = 10.0,
    ) -> None:
        if max_messages < 1 or batch < 1:
            raise InvalidRequest("a buffer holds at least one message")
        self.refused: list[tuple[Item, PenstockError]] = []
        self.sent = 0
        self._client = client
        self._max, self._batch = max_messages, min(batch, max_messages)
        self._linger, self._close_timeout = linger, close_timeout
        self._items: deque[Item] = deque()
        self._in_flight = 0  # taken out of the items and not yet answered
        self._room = asyncio.Event()
        self._changed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._urgent = False
        self._closed = False
        self._sender = asyncio.create_task(self._run(), name="penstock push buffer")

    def __len__(self) -> int:
        """Messages not yet stored."""
        return len(self._items) + self._in_flight

    async def push(
        self,
        address: str | Address,
        payload: Any,
        *,
        partition: str | None = None,
        transaction_id: str | None = None,
        trace_id: str | None = None,
    ) -> str:
        """Add a message; waits while the buffer is full. The message's transaction id."""
        item = new_item(address, payload, partition, transaction_id, trace_id)
        while len(self) >= self._max and not self._closed:
            self._room.clear()
            await self._room.wait()
        if self._closed:
            raise InvalidRequest("the buffer is closed")
        self._items.append(item)
        self._empty.clear()
        if len(self._items) == 1 or len(self._items) >= self._batch:
            self._changed.set()
        return str(item["transactionId"])

    async def flush(self, timeout: float | None = None) -> None:
        """Return when everything pushed so far is stored (or refused); `TimeoutError` after `timeout` seconds."""
        self._urgent = True
        self._changed.set()
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        finally:
            self._urgent = False

    async def close(self, timeout: float | None = None) -> list[Item]:
        """Send what is left for at most `timeout` seconds; what could not be sent, as items of the HTTP API."""
        self._closed = True
        self._room.set()
        try:
            await self.flush(self._close_timeout if timeout is None else timeout)
        except TimeoutError:
            log.warning("closed with %d messages not sent", len(self._items))
        self._sender.cancel()
        await asyncio.gather(self._sender, return_exceptions=True)
        return list(self._items)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = await self.close()
        if left and kind is None:
            raise Unavailable(f"{len(left)} messages could not be sent before the buffer was closed")

    # -- sending ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = Backoff()
        while True:
            if not self._items:
                self._changed.clear()
                await self._changed.wait()
                continue
            if len(self._items) < self._batch and not self._urgent and self._linger:
                await self._gather()
            count = min(self._batch, len(self._items))
            batch = [self._items.popleft() for _ in range(count)]
            self._in_flight = count
            try:
                await self._send(batch)
            except Unavailable as error:
                self._back(batch)
                log.warning("%d messages wait for a broker: %s", len(self._items), error)
                await asyncio.sleep(backoff.delay())
                continue
            except BaseException:
                self._back(batch)
                raise
            backoff.reset()
            self._in_flight = 0
            self._room.set()
            if not self._items:
                self._empty.set()

    def _back(self, batch: list[Item]) -> None:
        self._in_flight = 0
        self._items.extendleft(reversed(batch))

    async def _gather(self) -> None:
        """Give a batch the time to fill."""
        self._changed.clear()
        if self._urgent:
            return
        try:
            async with asyncio.timeout(self._linger):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _send(self, batch: list[Item]) -> None:
        try:
            await self._client.push_items(batch, patience=0.0)
            self.sent += len(batch)
        except Unavailable:
            raise
        except QueueFull as error:
            full = [item for item, result in zip(batch, error.results, strict=False) if result.status == "failed"]
            full = full or batch
            self.sent += len(batch) - len(full)
            self.refused += [(item, error) for item in full]
        except PenstockError as error:
            if len(batch) == 1:
                self.refused.append((batch[0], error))
            else:  # one bad message must not take the others with it
                for item in batch:
                    await self._send([item])
