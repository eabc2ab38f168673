"""Mirror records to a topic on another broker.

Records arrive byte for byte and in the order in which they are sent; with one worker, that is the
order of the source.

A batch whose answer was lost may have arrived. Before it is sent again, it is searched in the other
topic: after the last known offset, except in the ranges of other batches of this route. If it is
there, it counts as delivered. So an outage, a reset or a kill of the other broker leaves no
duplicates. Two cases remain: a kill of this broker repeats the batches in flight, and a request
that timed out may still arrive after the search.
"""

import asyncio
import base64
from bisect import insort
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import msgspec

from penstock.config.schema import Seconds, Secret, key
from penstock.export.checks import (
    ca_context,
    character_problems,
    limit_problems,
    name_problems,
    url_problems,
)
from penstock.export.context import RouteContext
from penstock.export.destinations import Destination, OutgoingBatch, RetryLater, Target, destination
from penstock.export.destinations.http import delivered
from penstock.net import HttpClient
from penstock.net.http import CannotConnect, HttpAnswer
from penstock.protocol.names import check_name
from penstock.protocol.records import RecordMessage, payload_bytes

PAGE_RECORDS = 1000  # per request of a search
MAX_SEARCHED_RECORDS = 100_000  # for one batch; other producers may have written so many
MAX_RANGES = 1000  # of our batches that are remembered


class ProducedThere(msgspec.Struct):
    first_offset: int
    count: int


class NextOffsetThere(msgspec.Struct):
    next_offset: int


_messages = msgspec.json.Decoder(list[RecordMessage]).decode


@destination("broker")
@dataclass(frozen=True, kw_only=True)
class BrokerTarget(Target):
    needed = ("url", "topic")

    url: str = key("", "address of the other broker")
    topic: str = key("", "topic there; default: the source's")
    token: Secret = key("", "bearer token")
    timeout: Seconds = key(30.0, "longest wait for an answer")
    ca: str = key("", "certificate authority to trust with https: a PEM file, or its text")

    def with_source(self, topic: str, _queue: str) -> Target:
        return replace(self, topic=self.topic or topic)

    def checks(self) -> list[str]:
        return [
            *url_problems(self.url, "http", "https"),
            *limit_problems(self.timeout),
            *name_problems(check_name, "topic", self.topic),
            *character_problems(topic=self.topic),
        ]

    def make(self, _context: RouteContext) -> Destination:
        return BrokerDestination(self)


class BrokerDestination(Destination):
    def __init__(self, target: BrokerTarget) -> None:
        self._target = target
        self._base = f"/topics/{quote(target.topic, safe='')}"
        headers = [("Content-Type", "application/json")]
        if target.token:
            headers.append(("Authorization", f"Bearer {target.token}"))
        self._client = HttpClient(target.url, headers=headers, tls=ca_context(target.ca))
        # The search starts here: earlier offsets are ours, older than this route, or forgotten.
        self._floor: int | None = None
        self._ours: list[tuple[int, int]] = []  # ranges of offsets above it with batches of ours
        self._doubtful: set[str] = set()  # keys of batches that may have arrived
        # Held during a search for a batch, which waits until no batch of ours is being sent.
        self._searching = asyncio.Lock()
        self._sending = 0
        self._quiet = asyncio.Event()

    async def stop(self) -> None:
        await self._client.close()

    def prepare(self, batch: OutgoingBatch) -> bytes:
        records = batch.split()
        try:
            return msgspec.json.encode({"payloads": [record.decode() for record in records]})
        except UnicodeDecodeError:
            encoded = [base64.b64encode(record).decode() for record in records]
            return msgspec.json.encode({"payloads": encoded, "encoding": "base64"})

    async def send(self, batch: OutgoingBatch, prepared: Any) -> None:
        if self._floor is None:
            answer = await self._ask("GET", "/next_offset")
            if self._floor is None:  # another worker may have asked too
                self._floor = msgspec.json.decode(answer.body, type=NextOffsetThere).next_offset
        async with self._searching:
            if batch.key in self._doubtful and await self._has_arrived(batch):
                self._doubtful.discard(batch.key)
                return
            self._sending += 1
        self._doubtful.add(batch.key)
        try:
            await self._produce(batch, prepared)
        finally:
            self._sending -= 1
            self._quiet.set()

    async def _produce(self, batch: OutgoingBatch, prepared: Any) -> None:
        try:
            answer = await self._ask("POST", "/produce", prepared, batch.key)
        except RetryLater as error:
            if isinstance(error.__cause__, CannotConnect) or error.kind == "rate_limit":
                self._doubtful.discard(batch.key)
            raise
        except Exception:  # the other broker refused it
            self._doubtful.discard(batch.key)
            raise
        produced = msgspec.json.decode(answer.body, type=ProducedThere)
        self._claim(produced.first_offset, produced.first_offset + produced.count)
        self._doubtful.discard(batch.key)

    async def _ask(self, method: str, target: str, body: bytes = b"", key: str = "") -> HttpAnswer:
        headers = [("Idempotency-Key", key)] if key else []
        timeout = self._target.timeout
        return await delivered(
            self._client.request(method, self._base + target, body, headers, timeout=timeout)
        )

    def _claim(self, first: int, stop: int) -> None:
        """Remember that a batch of ours has these offsets in the other topic."""
        floor = self._floor or 0
        if first < floor:  # the topic was deleted and recreated
            floor, self._ours = first, []
        insort(self._ours, (first, stop))
        while self._ours and (self._ours[0][0] <= floor or len(self._ours) > MAX_RANGES):
            floor = max(floor, self._ours.pop(0)[1])
        self._floor = floor

    async def _has_arrived(self, batch: OutgoingBatch) -> bool:
        """Search the batch between the ranges of our other batches; claim its range if there."""
        while self._sending:  # batches that are being sent may have the same records
            self._quiet.clear()
            await self._quiet.wait()
        wanted = batch.split()
        start, searched = self._floor or 0, 0
        for first, stop in [*self._ours, (1 << 63, 1 << 63)]:
            stored: list[RecordMessage] = []
            while start < first and searched < MAX_SEARCHED_RECORDS:
                answer = await self._ask(
                    "GET",
                    f"/consume?offset={start}&max_messages={min(PAGE_RECORDS, first - start)}",
                )
                page = [message for message in _messages(answer.body) if message.offset < first]
                stored += page
                searched += len(page)
                if not page:
                    break
                start = page[-1].offset + 1
            at = _find(
                wanted, [payload_bytes(each.payload or "", each.encoding) for each in stored]
            )
            if at >= 0:
                self._claim(stored[at].offset, stored[at + len(wanted) - 1].offset + 1)
                return True
            start = stop
        return False

    def describe(self) -> str:
        return f"topic {self._target.topic} at {self._target.url.rpartition('@')[2]}"


def _find(wanted: list[bytes], stored: list[bytes]) -> int:
    """Return where `stored` contains `wanted` without a gap; -1 if it does not."""
    for at in range(len(stored) - len(wanted) + 1):
        if stored[at] == wanted[0] and stored[at : at + len(wanted)] == wanted:
            return at
    return -1
