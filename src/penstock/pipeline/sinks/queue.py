"""The queue sink: push rows as messages in batches over HTTP, with transactionIds that repeat.

With `appId`, a row without a transactionId of its own gets `<appId>:<query>:<batch>:<task>:<row>`
(a write without a stream has no query, and batch 0; see `penstock.pipeline.sinks.identity`). The
broker stores a task's rows together with their number, so a task that runs again continues after
the stored rows, whether or not their messages still exist. A column `transactionId` takes
precedence: it also holds across applications, for as long as the messages exist.

Arrow builds the JSON of the request column by column. Payloads that are JSON stay as they are.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from penstock.errors import (
    ConnectionLost,
    Forbidden,
    Full,
    InvalidRequest,
    Unauthorized,
    Unavailable,
)
from penstock.net.broker_caller import BrokerAnswer, BrokerCaller
from penstock.net.http import CannotConnect
from penstock.net.retry import Backoff
from penstock.pipeline.options import QueueSinkOptions
from penstock.pipeline.sinks.held_rows import Held
from penstock.pipeline.sinks.identity import SinkWriter
from penstock.protocol import headers
from penstock.protocol.sink_claims import Claim, Claimed, Commit
from penstock.protocol.status import MAY_PASS, error_from_http

ANSWER_SECONDS = 60.0
PUSH_ROWS = 2000
PUSH_BYTES = 4 << 20
TEXT = ("queue", "partition", "transactionId", "traceId")
HEADERS = "headers"  # a map of strings
# the kind of item: a line of a buffer file may be a delayed message
DONE = {name: name for name in ("queued", "duplicate", "buffered")} | {"scheduled": "queued"}
_RAW = msgspec.json.Decoder(list[msgspec.Raw])


class _Outcome(msgspec.Struct):
    status: str = "queued"
    error: str | None = None


class _Full(msgspec.Struct):
    """The body of a 429: some fit, some did not."""

    results: list[_Outcome] = []


_OUTCOMES = msgspec.json.Decoder(list[_Outcome])
_FULL = msgspec.json.Decoder(_Full)


@dataclass(frozen=True)
class PushEndpoint:
    """Where encoded messages are posted to, and how several of them make one body."""

    path: str
    join: Callable[[list[bytes]], bytes]


ITEMS = PushEndpoint("/api/v1/push", lambda items: b'{"items":[' + b",".join(items) + b"]}")
# administrators only: keeps the producer that a line names, and opens a sealed payload
BUFFER_LINES = PushEndpoint("/api/v1/buffers/events", b"".join)


@dataclass
class PushCounts:
    queued: int = 0
    duplicate: int = 0
    buffered: int = 0


class PushLink(BrokerCaller):
    """A caller that pushes; waits out a broker's restart and a full queue."""

    def __init__(
        self,
        url: str,
        token: str | None,
        patience: float,
        ca: str | None = None,
        endpoint: PushEndpoint = ITEMS,
    ) -> None:
        super().__init__(url, token=token, ca=ca, timeout=ANSWER_SECONDS, patience=patience)
        self._endpoint = endpoint

    def push(self, items: list[bytes], *, repeatable: bool) -> PushCounts:
        """Push encoded items; those refused for now again, until they are in or patience ends."""
        done = PushCounts()
        deadline = time.monotonic() + self._patience
        backoff = Backoff()
        while True:
            items, reason = self._push_once(items, done, repeatable=repeatable)
            if not items:
                return done
            delay = backoff.delay()
            if time.monotonic() + delay > deadline:
                raise Unavailable(
                    f"{len(items)} messages could not be pushed to {self.url} in time: {reason}"
                )
            time.sleep(delay)

    def _push_once(
        self, items: list[bytes], done: PushCounts, *, repeatable: bool
    ) -> tuple[list[bytes], object]:
        """Push the items and count the stored ones. Return those to push again, and why."""
        try:
            answer = self.attempt("POST", self._endpoint.path, self._endpoint.join(items))
        except CannotConnect as error:
            return items, error
        except ConnectionLost as error:
            if repeatable:
                return items, error
            raise Unavailable(
                f"the broker went away during a push and may have stored it: {error}"
            ) from error
        if (unstored := _unstored(items, answer, done)) is not None:
            return unstored
        failure = error_from_http(*answer)
        if isinstance(failure, (Full, *MAY_PASS)):
            return items, failure
        if isinstance(failure, Unauthorized | Forbidden):
            raise failure
        raise InvalidRequest(
            f"the broker refused a push of {len(items)} messages: HTTP {answer.status}: {failure}"
        )

    def claim(self, claim: Claim) -> Claimed:
        """Ask whether a task may write. Safe to repeat."""
        body = self.call("POST", "/api/v1/sinks/claim", msgspec.json.encode(claim))
        return msgspec.json.decode(body, type=Claimed)

    def push_rows(self, claim: Claim, row: int, items: list[bytes], *, last: bool) -> None:
        """Push rows of a task that has claimed its place; `row` is the number of the first one. Of
        a queue that is almost full some are taken, and the rest is pushed when there is room."""
        place = {"target": claim.target, "app": claim.app, "batch": claim.batch, "task": claim.task}
        end, deadline, backoff = row + len(items), time.monotonic() + self._patience, Backoff()
        while True:
            head = msgspec.json.encode({**place, "row": row, "last": last})[:-1]
            try:
                body = head + b',"items":[' + b",".join(items[row - end :]) + b"]}"
                stored = msgspec.json.decode(self.call("POST", "/api/v1/sinks/push", body))["rows"]
            except Full:
                delay = backoff.delay()
                if time.monotonic() + delay > deadline:
                    raise
                time.sleep(delay)
                continue
            if stored >= end:
                return
            row, deadline = stored, time.monotonic() + self._patience

    def commit_sink(self, done: Commit) -> None:
        """Report that a batch is complete. Safe to repeat."""
        self.call("POST", "/api/v1/sinks/commit", msgspec.json.encode(done))


def _unstored(
    items: list[bytes], answer: BrokerAnswer, done: PushCounts
) -> tuple[list[bytes], object] | None:
    """Count what was stored; the items that were not, and why. None when the broker does not say
    what became of each: it does in an array, or in the `results` of a 429."""
    outcomes: list[_Outcome] = []
    if answer.status in (200, 201) and answer.body.startswith(b"["):
        outcomes = _OUTCOMES.decode(answer.body)
    elif answer.status == 429 and answer.body.startswith(b"{"):
        outcomes = _FULL.decode(answer.body).results
    if not outcomes:
        return None
    if len(outcomes) != len(items):
        raise InvalidRequest(f"the broker answered {len(outcomes)} of {len(items)} messages")
    for status, count in Counter([outcome.status for outcome in outcomes]).items():
        if kind := DONE.get(status):
            setattr(done, kind, getattr(done, kind) + count)
    refused = [outcome for outcome in outcomes if outcome.status not in DONE]
    if not refused:
        return [], None
    pairs = zip(items, outcomes, strict=True)
    again = [item for item, outcome in pairs if outcome.status not in DONE]
    return again, refused[0].error or refused[0].status


def json_texts(values: pa.Array) -> pa.Array:
    """Encode each text as a JSON string; null stays null. Each distinct value is encoded once."""
    coded = values.dictionary_encode()
    texts = [
        None if text is None else msgspec.json.encode(text) for text in coded.dictionary.to_pylist()
    ]
    return pa.array(texts, pa.binary()).take(coded.indices)


def check_text(values: pa.Array, name: str, first_row: int) -> None:
    """Check that every value is UTF-8: Spark does not when it casts bytes to a string."""
    raw = values.cast(pa.binary())
    try:
        raw.cast(pa.string())
    except pa.ArrowInvalid:
        for row, value in enumerate(raw.to_pylist()):
            try:
                (value or b"").decode()
            except UnicodeDecodeError as error:
                raise InvalidRequest(
                    f"row {first_row + row} of this task: its {name} is not UTF-8 ({error}): "
                    f"{value[:200]!r}. Encode bytes as text first, with base64 or hex."
                ) from None
        raise


def check_json(payloads: pa.Array, first_row: int) -> None:
    """Check that every payload is one JSON value: otherwise it would end inside its neighbor's."""
    check_text(payloads, "payload", first_row)
    joined = b"[" + b",".join(payloads.to_pylist()) + b"]"
    lengths = pc.binary_length(payloads).to_pylist()
    try:
        values = _RAW.decode(joined)
        if list(map(len, values)) == lengths:
            return
    except msgspec.DecodeError:
        pass
    for row, payload in enumerate(payloads.to_pylist()):
        try:
            # as strict as the broker: no NaN, no half of a surrogate pair
            msgspec.json.decode(payload)
        except msgspec.DecodeError as error:
            reason = "half of a surrogate pair in a string" if _has_half_pair(payload) else error
            raise InvalidRequest(
                f"row {first_row + row} of this task is not JSON ({reason}): {payload[:200]!r}. "
                "Push it as text with the option payloadFormat=text, or make it JSON with to_json."
            ) from None


def _has_half_pair(payload: bytes) -> bool:
    """Return whether it is JSON except for half a surrogate pair; msgspec calls that truncated."""
    try:
        json.dumps(json.loads(payload), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        pass
    return False


def _with_header_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with its headers as JSON texts or null. Equal maps give equal texts."""
    place = batch.schema.get_field_index(HEADERS)
    texts = [
        headers.encode(dict(sorted(pairs))) if pairs else None
        for pairs in batch.column(place).to_pylist()
    ]
    return batch.set_column(place, HEADERS, pa.array(texts, pa.binary()))


class QueueWriter(SinkWriter):
    """`df.write` or `df.writeStream`, `.format("penstock").option("queue", ...)`."""

    kind = "queue"
    text_columns = TEXT
    place_columns = ("queue", "partition")
    connect = PushLink

    def __init__(
        self, options: QueueSinkOptions, schema: StructType, *, streaming: bool = False
    ) -> None:
        super().__init__(options, schema, streaming=streaming)
        self._format = options.payload_format
        if self._types.get(HEADERS, "map<string,string>") != "map<string,string>":
            raise self._unfit(f"the column {HEADERS} must be a map<string,string>")

    def columns(self) -> Sequence[str]:
        return ("queue", "partition", "traceId", "payload", HEADERS)

    def resumes_by_row(self, held: Held) -> bool:  # noqa: ARG002
        return True

    def send(
        self, link: PushLink, rows: Iterator[pa.RecordBatch], claim: Claim | None, first: int = 0
    ) -> None:
        if claim is None:
            row = 0
            for batch in rows:
                for items in self._items(batch, None, row):
                    link.push(items, repeatable=self._identified)
                row += batch.num_rows
            return
        prefix = f"{claim.app}:{claim.batch}:{claim.task}:"
        piece: tuple[int, list[bytes]] | None = None
        for following in chain(self._pieces(rows, prefix, first), [None]):
            if piece is not None:
                link.push_rows(claim, *piece, last=following is None)
            piece = following

    def _pieces(
        self, rows: Iterator[pa.RecordBatch], prefix: str, first: int
    ) -> Iterator[tuple[int, list[bytes]]]:
        """Yield the items of each request from row `first` on, with the number of its first row."""
        end = 0  # of the batch, in rows of the task
        for batch in rows:
            begin, end = end, end + batch.num_rows
            row = max(begin, first)
            if row < end:
                for items in self._items(batch.slice(row - begin), prefix, row):
                    yield row, items
                    row += len(items)

    def prepare(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Check the payloads; headers become texts."""
        row = 0
        for batch in rows:
            payloads = batch.column("payload").cast(pa.binary())
            if self._format == "json":
                check_json(pc.fill_null(payloads, b"null"), row)
            else:
                check_text(payloads, "payload", row)
            yield _with_header_texts(batch) if HEADERS in self._types else batch
            row += batch.num_rows

    def _items(self, batch: pa.RecordBatch, prefix: str | None, row: int) -> Iterator[list[bytes]]:
        """Yield the rows as encoded items, in requests of bounded size."""
        names = batch.schema.names
        fields: dict[str, pa.Array | pa.Scalar] = {}  # JSON texts, null for none
        for name in TEXT:
            if name == "queue" and self._target:
                fields[name] = pa.scalar(msgspec.json.encode(self._target), pa.binary())
            elif name == "transactionId" and prefix is not None:
                numbers = pc.cast(pa.array(range(row, row + batch.num_rows)), pa.string()).cast(
                    pa.binary()
                )
                opened = msgspec.json.encode(prefix)[:-1]  # without its closing quote
                fields[name] = pc.binary_join_element_wise(opened, numbers, b'"', b"")
            elif name in names:
                check_text(batch.column(name), name, row)
                fields[name] = json_texts(batch.column(name))
                if name in ("queue", "transactionId") and fields[name].null_count:
                    raise InvalidRequest(f"a row has no {name}: the column is null")
        if HEADERS in names:
            fields[HEADERS] = batch.column(HEADERS)
        payloads = batch.column("payload").cast(pa.binary())
        if self._format == "text":
            payloads = json_texts(payloads.cast(pa.string()))
        parts = [
            pc.binary_join_element_wise(f'"{name}":'.encode(), texts, b",", b"")
            for name, texts in fields.items()
        ]
        parts = [pc.fill_null(part, b"") for part in parts]
        payloads = pc.fill_null(payloads, b"null")
        encoded = pc.binary_join_element_wise(
            b"{", *parts, b'"payload":', payloads, b"}", b""
        ).to_pylist()
        begin, size = 0, 0
        for i, item in enumerate(encoded):
            if i > begin and (i - begin >= PUSH_ROWS or size + len(item) > PUSH_BYTES):
                yield encoded[begin:i]
                begin, size = i, 0
            size += len(item)
        if encoded:
            yield encoded[begin:]
