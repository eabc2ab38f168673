"""The queue sink: rows become messages, pushed in batches over HTTP, each with a transactionId that
is the same again.

With `appId` a row without a transactionId of its own gets `<appId>:<query>:<batch>:<task>:<row>`
(in a write without a stream no query, and batch 0; see `penstock.pipeline.sinks.identity`); the
broker keeps one message per (partition, transactionId), so a batch that is run again adds nothing.
A column `transactionId` takes precedence: then the identity is the data's own and holds across
applications too.

The request's JSON is put together column by column in Arrow; payloads that are JSON already go in
as they are.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.errors import (
    ConnectionLost,
    Forbidden,
    Full,
    InvalidRequest,
    Unauthorized,
    Unavailable,
)
from penstock.net.broker_caller import BrokerCaller
from penstock.net.http import CannotConnect
from penstock.net.retry import Backoff
from penstock.pipeline.options import Options
from penstock.pipeline.plain_errors import plain_errors
from penstock.pipeline.sinks.identity import (
    SinkWriter,
    Written,
    claimed,
    current_writer,
    ordered,
    say_at_least_once,
)
from penstock.protocol import headers
from penstock.protocol.sink_claims import Claim, Claimed, Commit
from penstock.protocol.status import MAY_PASS, error_from_http

ANSWER_SECONDS = 60.0
PUSH_ROWS = 2000
PUSH_BYTES = 4 << 20
TEXT = ("queue", "partition", "transactionId", "traceId")
HEADERS = "headers"  # a map of strings
# what it counts as: a line of a buffer file may be a message for later
DONE = {
    "queued": "queued",
    "scheduled": "queued",
    "duplicate": "duplicate",
    "buffered": "buffered",
}
_RAW = msgspec.json.Decoder(list[msgspec.Raw])


class _Answer(msgspec.Struct):
    status: str = "queued"
    error: str | None = None


class _Full(msgspec.Struct):
    """The body of a 429: some fit, some did not."""

    results: list[_Answer] = []


_ANSWERS = msgspec.json.Decoder(list[_Answer])
_FULL = msgspec.json.Decoder(_Full)


@dataclass(frozen=True)
class Endpoint:
    """Where encoded messages are posted to, and how several of them make one body."""

    path: str
    join: Callable[[list[bytes]], bytes]


ITEMS = Endpoint("/api/v1/push", lambda items: b'{"items":[' + b",".join(items) + b"]}")
# administrators only: keeps the producer that a line names, and opens a sealed payload
BUFFER_LINES = Endpoint("/api/v1/buffers/events", b"".join)


@dataclass
class Pushed(Written):
    """What became of a task's messages."""

    queued: int = 0
    duplicate: int = 0
    buffered: int = 0


class PushLink:
    """One keep-alive connection that pushes; waits out a broker that restarts or a queue that is
    full.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        patience: float,
        ca: str | None = None,
        endpoint: Endpoint = ITEMS,
    ) -> None:
        self._caller = BrokerCaller(
            url, token=token, ca=ca, timeout=ANSWER_SECONDS, patience=patience
        )
        self._endpoint = endpoint
        self._patience = patience

    def close(self) -> None:
        """Close the connection."""
        self._caller.close()

    def push(self, items: list[bytes], *, repeatable: bool) -> Pushed:
        """Push encoded items; those that were refused for now are pushed again until they are in or
        patience ends.
        """
        done = Pushed()
        deadline = time.monotonic() + self._patience
        backoff = Backoff()
        while items:
            items, reason = self._push_once(items, done, repeatable=repeatable)
            delay = backoff.delay()
            if items and time.monotonic() + delay > deadline:
                raise Unavailable(
                    f"{len(items)} messages could not be pushed to {self._caller.url} in time: "
                    f"{reason}"
                )
            if items:
                time.sleep(delay)
        return done

    def _push_once(
        self, items: list[bytes], done: Pushed, *, repeatable: bool
    ) -> tuple[list[bytes], object]:
        """The items that are to be pushed again, and why; those that are stored are counted."""
        try:
            answer = self._caller.attempt("POST", self._endpoint.path, self._endpoint.join(items))
        except CannotConnect as error:
            return items, error
        except ConnectionLost as error:
            if repeatable:
                return items, error
            raise Unavailable(
                f"the broker went away during a push and may have stored it: {error}"
            ) from error
        if answers := _answers(*answer):
            return _unstored(items, answers, done)
        failure = error_from_http(*answer)
        if isinstance(failure, (Full, *MAY_PASS)):
            return items, failure
        if isinstance(failure, Unauthorized | Forbidden):
            raise failure
        raise InvalidRequest(
            f"the broker refused a push of {len(items)} messages: HTTP {answer.status}: {failure}"
        )

    def claim(self, claim: Claim) -> Claimed:
        """Whether a task may write; may be asked twice."""
        body = self._caller.call("POST", "/api/v1/sinks/claim", msgspec.json.encode(claim))
        return msgspec.json.decode(body, type=Claimed)

    def commit_sink(self, done: Commit) -> None:
        """Say that a batch is complete; may be said twice."""
        self._caller.call("POST", "/api/v1/sinks/commit", msgspec.json.encode(done))


def _answers(status: int, body: bytes) -> list[_Answer]:
    """What became of each item, when the broker says so: an array, or the `results` of a 429."""
    if status in (200, 201) and body.startswith(b"["):
        return _ANSWERS.decode(body)
    return _FULL.decode(body).results if status == 429 and body.startswith(b"{") else []


def _unstored(items: list[bytes], answers: list[_Answer], done: Pushed) -> tuple[list[bytes], str]:
    """Count what was stored; the items that were not, and why."""
    if len(answers) != len(items):
        raise InvalidRequest(f"the broker answered {len(answers)} of {len(items)} messages")
    for status, count in Counter([answer.status for answer in answers]).items():
        if kind := DONE.get(status):
            setattr(done, kind, getattr(done, kind) + count)
    refused = [
        (item, answer)
        for item, answer in zip(items, answers, strict=True)
        if answer.status not in DONE
    ]
    reason = (refused[0][1].error or refused[0][1].status) if refused else ""
    return [item for item, _ in refused], reason


def json_texts(values: pa.Array) -> pa.Array:
    """Each text as a JSON string; null stays null. Encoded once per distinct value."""
    coded = values.dictionary_encode()
    texts = [
        None if text is None else msgspec.json.encode(text) for text in coded.dictionary.to_pylist()
    ]
    return pa.array(texts, pa.binary()).take(coded.indices)


def check_text(values: pa.Array, name: str, first_row: int) -> None:
    """Every value must be UTF-8, which Spark does not see to when bytes are cast to a string."""
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
                    f"{value[:200]!r}. Encode "
                    "bytes as text first, with base64 or hex."
                ) from None
        raise


def check_json(payloads: pa.Array, first_row: int) -> None:
    """Every payload must be one JSON value: one that is not would end inside its neighbour's."""
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
            raise InvalidRequest(
                f"row {first_row + row} of this task is not JSON ({error}): {payload[:200]!r}. "
                "Push it as text with "
                "the option payloadFormat=text, or make it JSON with to_json."
            ) from None


def _with_header_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with its headers as JSON texts, null where there are none; those of equal maps are
    equal.
    """
    place = batch.schema.get_field_index(HEADERS)
    if place < 0:
        return batch
    texts = [
        headers.encode(dict(sorted(pairs))) if pairs else None
        for pairs in batch.column(place).to_pylist()
    ]
    return batch.set_column(place, HEADERS, pa.array(texts, pa.binary()))


@plain_errors
class _QueueWriter(SinkWriter):
    """What the batch and the streaming writer share."""

    kind = "queue"
    text_columns = TEXT
    connect = PushLink

    def __init__(self, options: Options, schema: StructType) -> None:
        url = options.require("url", "the broker's HTTP address, such as http://127.0.0.1:6632")
        super().__init__(options, schema, url)
        self._format = options.text("payloadFormat", default="json")
        if self._format not in ("json", "text"):
            raise InvalidRequest(
                f"the option 'payloadFormat' is json or text, not {self._format!r}"
            )
        if self._types.get(HEADERS, "map<string,string>") != "map<string,string>":
            raise self._unfit(f"the column {HEADERS} must be a map<string,string>")
        self._identified = "transactionId" in self._types
        if not self._identified:
            say_at_least_once(self._app, "queue")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        prefix, writer = None, None
        if self._app and not self._identified:
            writer = current_writer(self._app, self.streaming, self._options)
            prefix = f"{writer.app}:{writer.batch}:{writer.task}:"
        total = Pushed()
        row = 0
        with closing(self.connect(self._address, **self._reach)) as link:
            rows: Iterator[pa.RecordBatch] = map(
                _with_header_texts, ordered(iterator, self._options)
            )
            if writer:
                columns = ("queue", "partition", "traceId", "payload", HEADERS)
                rows = claimed(self._checked(rows), columns, self._target, self._run, writer, link)
            for batch in rows:
                for items in self._items(batch, prefix, row, checked=writer is not None):
                    done = link.push(items, repeatable=bool(prefix) or self._identified)
                    total.queued += done.queued
                    total.duplicate += done.duplicate
                    total.buffered += done.buffered
                row += batch.num_rows
        total.writer = writer if row else None
        return total

    def _checked(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows that cannot be pushed fail the task before it has claimed anything: mended, they are
        not other rows.
        """
        row = 0
        for batch in rows:
            if self._format == "json":
                check_json(pc.fill_null(batch.column("payload").cast(pa.binary()), b"null"), row)
            yield batch
            row += batch.num_rows

    def _items(
        self, batch: pa.RecordBatch, prefix: str | None, row: int, *, checked: bool = False
    ) -> Iterator[list[bytes]]:
        """The rows as encoded items, in requests of bounded size."""
        names = batch.schema.names
        parts: list[pa.Array | pa.Scalar] = []
        for name in TEXT:
            if name == "queue" and self._target:
                parts += [
                    pa.scalar(b'"queue":' + msgspec.json.encode(self._target) + b",", pa.binary())
                ]
            elif name == "transactionId" and prefix is not None:
                numbers = pc.cast(pa.array(range(row, row + batch.num_rows)), pa.string())
                texts = json_texts(pc.binary_join_element_wise(prefix, numbers, ""))
                parts += [pc.binary_join_element_wise(b'"transactionId":', texts, b",", b"")]
            elif name in names:
                check_text(batch.column(name), name, row)
                texts = json_texts(batch.column(name))
                if name in ("queue", "transactionId") and texts.null_count:
                    raise InvalidRequest(f"a row has no {name}: the column is null")
                field = pc.binary_join_element_wise(f'"{name}":'.encode(), texts, b",", b"")
                parts += [pc.fill_null(field, b"")]
        if HEADERS in names:
            field = pc.binary_join_element_wise(b'"headers":', batch.column(HEADERS), b",", b"")
            parts += [pc.fill_null(field, b"")]
        payloads = batch.column("payload").cast(pa.binary())
        if self._format == "text":
            check_text(payloads, "payload", row)
            payloads = json_texts(payloads.cast(pa.string()))
        payloads = pc.fill_null(payloads, b"null")
        if self._format == "json" and not checked:
            check_json(payloads, row)
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


class QueueWriter(_QueueWriter, DataSourceArrowWriter):
    """`df.write.format("penstock").option("queue", ...)`."""


class QueueStreamWriter(_QueueWriter, DataSourceStreamArrowWriter):
    """`df.writeStream.format("penstock").option("queue", ...)`."""

    streaming = True
