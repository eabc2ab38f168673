"""A topic on another broker: mirroring.

    type: broker
    url: http://other:6632
    topic: orders
    token: "..."        sent as a bearer token

Records arrive byte for byte and in the order they are sent; with one worker that is the order of
the source.

A batch whose answer was lost may have arrived. Before it is sent again, the other topic is asked:
everything behind the last place we know is compared with the batch, except what other batches of
ours are known to have written. Found there, it counts as delivered. So an outage, a reset or a kill
of the other broker leaves no duplicates. What remains: a kill of this broker repeats the batches
that were on their way, and a request so slow that it was given up may still arrive after we looked.
"""

import asyncio
import base64
from bisect import insort
from typing import Any
from urllib.parse import quote

import msgspec

from penstock.errors import Unavailable
from penstock.export.destinations import Batch, Retry, cheap_to_open
from penstock.export.destinations.http import check_status
from penstock.export.payload import FRAMES
from penstock.net import HttpClient
from penstock.net.http import CannotConnect, HttpAnswer
from penstock.net.tls import client_context

PAGE = 1000  # records asked for at a time
LOOK_BACK = (
    100_000  # most records looked at for one batch; other producers may have written as many
)
RANGES = 1000  # most ranges of ours remembered


class Produced(msgspec.Struct):
    first_offset: int
    count: int


class NextOffset(msgspec.Struct):
    next_offset: int


class Message(msgspec.Struct, gc=False):
    offset: int
    payload: str
    encoding: str = ""

    def bytes(self) -> bytes:
        return (
            base64.b64decode(self.payload) if self.encoding == "base64" else self.payload.encode()
        )


_messages = msgspec.json.Decoder(list[Message]).decode


class BrokerDestination:
    encoding = FRAMES
    compression: int | None = None

    def __init__(
        self, url: str, topic: str, *, token: str = "", timeout: float = 30.0, ca: str = ""
    ) -> None:
        self._url, self._topic, self._timeout = url, topic, timeout
        self._headers = [("Content-Type", "application/json")]
        if token:
            self._headers.append(("Authorization", f"Bearer {token}"))
        self._base = f"/topics/{quote(topic, safe='')}"
        self._client: HttpClient | None = None
        self._floor: int | None = (
            None  # what is below is ours, or was there before we began, or is forgotten
        )
        self._ours: list[
            tuple[int, int]
        ] = []  # ranges of offsets above it that hold batches of ours
        self._doubtful: set[str] = set()  # keys of batches that may have arrived
        self._gate = (
            asyncio.Lock()
        )  # held while looking, which waits until nothing of ours is on its way
        self._sending = 0
        self._quiet = asyncio.Event()
        self._tls = client_context(ca) if ca else None
        HttpClient(url, headers=self._headers, tls=self._tls)

    async def start(self) -> None:
        self._client = HttpClient(self._url, headers=self._headers, tls=self._tls)

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.close()

    def is_cheap(self, batch: Batch) -> bool:
        return cheap_to_open(batch)

    def prepare(self, batch: Batch) -> bytes:
        records = batch.split()
        try:
            return msgspec.json.encode({"payloads": [record.decode() for record in records]})
        except UnicodeDecodeError:
            encoded = [base64.b64encode(record).decode() for record in records]
            return msgspec.json.encode({"payloads": encoded, "encoding": "base64"})

    async def send(self, batch: Batch, prepared: Any) -> None:
        if self._floor is None:
            answer = await self._ask("GET", "/next_offset")
            if self._floor is None:  # another worker may have asked too
                self._floor = msgspec.json.decode(answer.body, type=NextOffset).next_offset
        async with self._gate:
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

    async def _produce(self, batch: Batch, prepared: Any) -> None:
        try:
            answer = await self._ask("POST", "/produce", prepared, batch.key)
        except Retry as error:
            if isinstance(error.__cause__, CannotConnect) or error.kind == "rate_limit":
                self._doubtful.discard(batch.key)
            raise
        except Exception:  # it was refused
            self._doubtful.discard(batch.key)
            raise
        produced = msgspec.json.decode(answer.body, type=Produced)
        self._claim(produced.first_offset, produced.first_offset + produced.count)
        self._doubtful.discard(batch.key)

    async def _ask(self, method: str, target: str, body: bytes = b"", key: str = "") -> HttpAnswer:
        assert self._client is not None
        headers = [("Idempotency-Key", key)] if key else []
        try:
            answer = await self._client.request(
                method, self._base + target, body, headers, timeout=self._timeout
            )
        except TimeoutError as error:
            raise Retry("timeout", str(error)) from error
        except Unavailable as error:
            raise Retry("network", str(error)) from error
        check_status(answer.status, answer.headers, answer.body)
        return answer

    def _claim(self, first: int, stop: int) -> None:
        """The other topic holds a batch of ours there."""
        floor = self._floor or 0
        if first < floor:  # the topic was deleted and made anew
            floor, self._ours = first, []
        insort(self._ours, (first, stop))
        while self._ours and (self._ours[0][0] <= floor or len(self._ours) > RANGES):
            floor = max(floor, self._ours.pop(0)[1])
        self._floor = floor

    async def _has_arrived(self, batch: Batch) -> bool:
        """Look for the batch where no other batch of ours is; claim its place if it is there."""
        while self._sending:  # what others are sending may look the same, and is not ours to claim
            self._quiet.clear()
            await self._quiet.wait()
        wanted = batch.split()
        start, looked = self._floor or 0, 0
        for first, stop in [*self._ours, (1 << 63, 1 << 63)]:
            found: list[Message] = []
            while start < first and looked < LOOK_BACK:
                answer = await self._ask(
                    "GET", f"/consume?offset={start}&max_messages={min(PAGE, first - start)}"
                )
                page = [message for message in _messages(answer.body) if message.offset < first]
                found += page
                looked += len(page)
                if not page:
                    break
                start = page[-1].offset + 1
            at = _find(wanted, [message.bytes() for message in found])
            if at >= 0:
                self._claim(found[at].offset, found[at + len(wanted) - 1].offset + 1)
                return True
            start = stop
        return False

    def describe(self) -> str:
        return f"topic {self._topic} at {self._url.rpartition('@')[2]}"


def _find(wanted: list[bytes], found: list[bytes]) -> int:
    """Where `wanted` stands in `found`, without a gap; -1 when it does not."""
    for at in range(len(found) - len(wanted) + 1):
        if found[at] == wanted[0] and found[at : at + len(wanted)] == wanted:
            return at
    return -1
