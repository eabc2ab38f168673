"""Client-side batching: many small pushes become few requests.

`push` adds to the buffer and returns; it waits only while the buffer is full, which is how a slow
broker slows its producers down. Payloads are encoded at once: a payload that JSON cannot express
raises there, and later changes to it have no effect. One task sends the oldest messages in order, a
batch at a time. A batch that could not be delivered, for whatever reason that is not a message's
own (no broker, no room on its disk, a token that ran out), goes back to the front and is sent
again, with the transaction ids it had, so order holds and nothing is stored twice. What the broker
refuses for good (a malformed message) or what its queue has no room for is set aside in `refused`
with its reason.

`close` sends what is left within a deadline and returns what could not be sent: nothing is dropped
in silence.
"""

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import Any, Self, TypedDict, Unpack

import msgspec

from penstock.client import tracing
from penstock.client.items import Item, PushOptions, check_names, new_item
from penstock.client.messages import Address
from penstock.client.queues import QueueClient
from penstock.errors import InvalidRequest, PenstockError, QueueFull, TooLarge, Unavailable
from penstock.net.retry import Backoff
from penstock.protocol.status import NOT_JSON

log = logging.getLogger("penstock.client")


Refusal = tuple[Item, PenstockError]  # an item of the HTTP API, and why it was refused


class BufferOptions(TypedDict, total=False):
    """The options of `Client.buffer`."""

    max_messages: int  # in the buffer; when it is full, push waits; default 10,000
    batch: int  # the most messages per request; default 500
    linger: float  # seconds to wait for a batch to fill; default 0.05
    close_timeout: float  # seconds that `close` tries to send the rest; default 10


class PushBuffer:
    """A client-side buffer that sends pushes in batches. Create it with `Client.buffer`. Use it in
    `async with`, or call `close`.
    """

    def __init__(self, client: QueueClient, **options: Unpack[BufferOptions]) -> None:
        check_names(options, BufferOptions)
        max_messages, batch = options.get("max_messages", 10_000), options.get("batch", 500)
        if max_messages < 1 or batch < 1:
            raise InvalidRequest("a buffer holds at least one message")
        self.refused: list[Refusal] = []
        self.sent = 0
        self._client = client
        self._max, self._batch = max_messages, min(batch, max_messages)
        self._linger = options.get("linger", 0.05)
        self._close_timeout = options.get("close_timeout", 10.0)
        self._items: deque[Item] = deque()
        self._in_flight = 0  # taken out of the items and not yet answered
        self._accepted = 0  # messages pushed so far, of which `sent` and `refused` are done with
        self._progress = asyncio.Event()
        self._changed = asyncio.Event()
        self._hurried = 0  # flushes that wait
        self.closed = False
        self._sender = asyncio.create_task(self._run(), name="penstock push buffer")

    def __len__(self) -> int:
        """Return the number of messages that are not stored yet."""
        return len(self._items) + self._in_flight

    async def push(
        self,
        address: str | Address,
        payload: Any,
        **options: Unpack[PushOptions],
    ) -> str:
        """Add a message and return its transaction id. Waits while the buffer is full. A `delay`
        starts when the broker stores the message.
        """
        item = tracing.created(new_item(address, payload, **options))
        while len(self) >= self._max and not self.closed:
            self._progress.clear()
            await self._progress.wait()
        if self.closed:
            raise InvalidRequest("the buffer is closed")
        self._items.append(item)
        self._accepted += 1
        if len(self._items) == 1 or len(self._items) >= self._batch:
            self._changed.set()
        return str(item["transactionId"])

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until everything pushed so far is stored or rejected. Raises `TimeoutError` after
        `timeout` seconds.
        """
        wanted = self._accepted
        self._hurried += 1
        self._changed.set()
        try:
            async with asyncio.timeout(timeout):
                while self.sent + len(self.refused) < wanted:
                    if self._sender.done():
                        raise InvalidRequest(
                            "the buffer is closed, with messages that were not sent"
                        )
                    self._progress.clear()
                    await self._progress.wait()
        finally:
            self._hurried -= 1

    async def close(self, timeout: float | None = None) -> list[Item]:
        """Send the remaining messages for at most `timeout` seconds. Returns those that could not
        be sent, as items of the HTTP API.
        """
        self.closed = True
        self._progress.set()
        if not self._sender.done():
            try:
                await self.flush(self._close_timeout if timeout is None else timeout)
            except TimeoutError:
                log.warning("closed with %d messages not sent", len(self))
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
            self._progress.set()
        return [_plain(item) for item in self._items]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        unsent = await self.close()
        if kind is None:
            check_sent(unsent, "buffer")

    # Sending

    async def _run(self) -> None:
        backoff = Backoff()
        while True:
            if not self._items:
                self._changed.clear()
                await self._changed.wait()
                continue
            if len(self._items) < self._batch and not self._hurried and self._linger:
                await self._gather()
            batch = [self._items.popleft() for _ in range(min(self._batch, len(self._items)))]
            self._in_flight = len(batch)
            pause = 0.0
            try:
                await self._send(batch)
                backoff.reset()
            except PenstockError as error:
                pause = backoff.delay()
                log.warning("%d messages wait for a broker: %s", len(self), error)
            except Exception:  # a bug must not stop the sender for good
                pause = backoff.delay()
                log.exception("sending failed; it is tried again")
            finally:
                self._in_flight = 0
                self._items.extendleft(reversed(batch))  # what is left of it
                self._progress.set()
            if pause:
                await asyncio.sleep(pause)

    async def _gather(self) -> None:
        """Wait for a batch to fill."""
        self._changed.clear()
        if self._hurried:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._linger):
                await self._changed.wait()

    async def _send(self, batch: list[Item]) -> None:
        """Send the messages. Stored and refused ones are removed from the list; if this raises, the
        others are still in it.
        """
        try:
            await self._client._push_items(batch, retry_for=0.0)
            self.sent += len(batch)
        except QueueFull as error:
            full = [
                item
                for item, result in zip(batch, error.results, strict=False)
                if result.status == "failed"
            ]
            full = full or batch
            self.sent += len(batch) - len(full)
            self._refuse(full, error)
        except (InvalidRequest, TooLarge) as error:
            if len(batch) > 1:  # one bad message must not fail the others
                first = batch[: len(batch) // 2]
                try:
                    await self._send(first)
                finally:
                    batch[: len(batch) // 2] = first
                return await self._send(batch)
            self._refuse(batch, error)
        batch.clear()
        return None

    def _refuse(self, items: list[Item], error: PenstockError) -> None:
        log.error("%d messages were refused and set aside: %s", len(items), error)
        self.refused += [(_plain(item), error) for item in items]


def check_sent(unsent: list[Item], what: str) -> None:
    if unsent:
        raise Unavailable(f"{len(unsent)} messages could not be sent before the {what} was closed")


def _plain(item: Item) -> Item:
    """Return the item with its payload decoded."""
    try:
        return {**item, "payload": msgspec.json.decode(item["payload"])}
    except NOT_JSON:  # a Raw of the caller's that is not JSON
        return item
