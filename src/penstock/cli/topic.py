"""`penstock topic`: manage, write and read topics from a shell.

Records come from standard input and go to standard output. Errors and progress go to standard
error. Exit codes: 0 done, 1 refused or damaged, 2 wrong usage, 130 interrupted (Ctrl-C), 141 the
reader of the output has gone.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from penstock.cli import (
    LOCAL_URL,
    AnyText,
    BrokerApi,
    JsonApi,
    JsonOutput,
    NotNegative,
    Positive,
    Token,
    Url,
    WatchApi,
    Yes,
    command_group,
    completer,
    confirm,
    say,
    usage,
)
from penstock.cli.tables import Column, Facts, View, count, rate, size, table
from penstock.client import Batch, SyncClient
from penstock.client.reader import Start
from penstock.client.sync import SyncProducer, SyncReader
from penstock.errors import PenstockError
from penstock.protocol.kafka_batch import KafkaRecord
from penstock.protocol.names import partition_label
from penstock.protocol.record_batch import Record
from penstock.protocol.records import RecordMessage, message, record_message

commands = command_group("topic")

READ_BYTES = 1 << 20
POLL_SECONDS = 0.2  # between two requests for the state of a move
MAX_LEASED_RECORDS = 10_000  # records a group member takes at once

TOPICS = "/topics"
complete_topic = completer(TOPICS, "")
Name = Annotated[str, Parameter(help="Name of the topic.", completer=complete_topic)]
Format = Annotated[str, Parameter(alias="-f")]
Quiet = Annotated[bool, Parameter(alias="-q", help="Do not show progress.")]
JsonLines = Annotated[bool, Parameter(alias="-J", help="One JSON object per line.")]


@Parameter(name="*")
@dataclass(frozen=True)
class TopicAddress:
    """The address of the broker's TCP port."""

    broker: Annotated[
        str,
        Parameter(
            alias="-b",
            env_var="PENSTOCK_BROKER",
            help="Broker address as HOST:PORT, or several separated by commas.",
        ),
    ] = "127.0.0.1:12345"
    token: Token = ""

    def connect(self) -> SyncClient:
        return SyncClient(topics=self.broker, timeout=10.0, token=self.token)


@commands.command
def create(
    *topics: str,
    format: Literal["aiq", "kafka"] | None = None,
    partitions: Annotated[int, Parameter(validator=Positive)] = 1,
    shared: bool = False,
    broker: TopicAddress = TopicAddress(),
) -> None:
    """Create topics. Topics that exist stay unchanged.

    Examples:

    `penstock topic create orders payments`

    `penstock topic create events --format kafka --partitions 8`

    `penstock topic create orders --shared`

    :param topics: Names of the topics.
    :param format: Format on disk; default: as the broker is configured.
    :param partitions: Number of partitions; more than one need --format kafka or --shared.
    :param shared: Keep it in PostgreSQL and object storage: every broker on the database serves it.
    """
    if not topics:
        raise usage("name the topics to create")
    with broker.connect() as client:
        for topic in topics:
            client.topic(topic).create(format=format, partitions=partitions, shared=shared)


@commands.command(name="list")
def list_topics(
    filter: str = "",
    /,
    *,
    sort: AnyText = "name",
    api: WatchApi = WatchApi(),
) -> View:
    """List the topics with their size, offsets and damage.

    Examples:

    `penstock topic list --sort -bytes --watch`

    `penstock topic list --json | jq -r '.[].name'`

    :param filter: Only topics whose name contains this text.
    :param sort: Sort by a field of --json, such as bytes; -bytes sorts the largest first.
    """
    return table(
        api.rows(TOPICS, "topics", details="true", filter=filter, sort=sort),
        Column("topic", "name"),
        Column("records", format=count),
        Column("size", "bytes", size),
        Column("records/s", "rate", rate),
        Column("groups", format=count, optional=True),
        Column("worst lag", "worstLag", count, optional=True),
        Column("damaged", format=count),
        Column("segments", format=count, optional=True),
        Column("policy", optional=True),
        Column("first", "firstOffset", count, optional=True),
        Column("next", "nextOffset", count, optional=True),
        empty="no topics; one is made by: penstock topic create orders",
    )


@commands.command
def describe(
    topic: Name,
    /,
    *,
    broker: TopicAddress = TopicAddress(),
    output: JsonOutput = JsonOutput(),  # noqa: ARG001  # `run` reads it
) -> View:
    """Show a topic's offsets, size and segments. `topic list` has rates and groups.

    Example: `penstock topic describe orders --json | jq .next_offset`
    """
    with broker.connect() as client:
        info = client.topic(topic).info()
    about = {
        "topic": topic,
        "first_offset": info.first_offset,
        "next_offset": info.next_offset,
        "records": info.records,
        "bytes": info.bytes,
        "segments": info.segments,
        "incarnation": info.incarnation.hex(),
        "policy": info.policy,
        "archived_offset": info.archived,
        "damaged_places": info.damaged,
        "format": info.format,
        "partitions": info.partitions,
    }
    columns = [
        Column(name, format=count) if isinstance(value, int) else Column(name)
        for name, value in about.items()
    ]
    return View(about, [Facts(columns, about)])


@commands.command
def policy(
    topic: Name,
    wanted: Literal["delete", "compact"] | None = None,
    /,
    *,
    broker: TopicAddress = TopicAddress(),
    url: Url = LOCAL_URL,
) -> None:
    """Show or set the cleanup policy of a topic: retention deletes old segments, or `pipeline run
    compact` compacts them.

    Example: `penstock topic policy prices compact`

    :param wanted: The new policy; default: show the current one.
    """
    with broker.connect() as client:
        if wanted is not None:
            BrokerApi(url=url, token=broker.token).put(
                TOPICS, topic, "policy", body={"policy": wanted}
            )
        sys.stdout.write(f"{client.topic(topic).info().policy}\n")


@commands.command
def delete(
    topic: Name,
    /,
    *,
    yes: Yes = False,
    broker: TopicAddress = TopicAddress(),
    url: Url = LOCAL_URL,
) -> None:
    """Permanently delete a topic and its records, or one of its consumer groups (TOPIC@GROUP).

    Examples:

    `penstock topic delete old-orders --yes`

    `penstock topic delete orders@billing`
    """
    name, _, group = topic.rpartition("@")
    if name:
        confirm(f"Delete group {group} of topic {name}? It would begin as a new group does.", yes)
        BrokerApi(url=url, token=broker.token).delete(TOPICS, name, "groups", group)
        return
    with broker.connect() as client:
        if not yes:
            confirm(f"Delete {topic!r} with {client.topic(topic).info().records:,} records?", yes)
        client.topic(topic).delete()


@commands.command
def move(
    topic: Name, /, *, shared: bool = False, quiet: Quiet = False, api: JsonApi = JsonApi()
) -> View:
    """Turn a local topic into a shared one, which every broker on the database serves. Offsets,
    groups and idempotent producers are kept.

    The broker moves it in the background and continues after a restart: if you interrupt the
    command, run it again to see the progress. Appends are refused with an error that clients retry
    while the last part is moved.

    Example: `penstock topic move orders --shared`

    :param shared: Move it to PostgreSQL and object storage.
    """
    if not shared:
        raise usage("a topic can be moved to shared placement only: pass --shared")
    state = api.ask("POST", TOPICS, topic, "move")
    console = Console(stderr=True)
    counts = TextColumn("{task.completed:,.0f} of {task.total:,.0f} records")
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), counts]
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(topic)
        while state["state"] in ("copying", "closing"):
            what = f"{state['state']} {topic}" + (
                f": {state['problem']}" if state["problem"] else ""
            )
            progress.update(task, completed=state["copied"], total=state["total"], description=what)
            time.sleep(POLL_SECONDS)
            state = api.get(TOPICS, topic)["move"] or state | {"state": "shared", "problem": None}
    facts = [Column(name) for name in ("topic", "state", "problem") if state[name]]
    return View(state, [Facts(facts, state)], failed=state["state"] == "failed")


@commands.command
def produce(
    topic: Name,
    /,
    *files: Annotated[Path, Parameter(allow_leading_hyphen=True)],
    delimiter: Annotated[AnyText, Parameter(alias="-D")] = r"\n",
    whole: bool = False,
    linger: float = 0.005,
    timeout: Annotated[float, Parameter(validator=Number(gte=0.1))] = 30.0,
    key_delimiter: Annotated[AnyText, Parameter(alias="-K")] = "",
    partition: Annotated[int | None, Parameter(alias="-p")] = None,
    quiet: Quiet = False,
    broker: TopicAddress = TopicAddress(),
) -> None:
    """Append records from standard input or files, one per line. Each is stored once, in order.

    Examples:

    `journalctl -f -o json | penstock topic produce logs`

    `find . -name '*.bin' -print0 | penstock topic produce names -D '\\0'`

    :param files: Files to read; default: standard input.
    :param delimiter: Delimiter that ends a record: \\n, \\t, \\0, or text.
    :param whole: Store each file as one record.
    :param linger: Seconds to wait for a batch to fill.
    :param timeout: Seconds to wait for a record to be stored before it fails.
    :param key_delimiter: Delimiter between a key and its payload in each record.
    :param partition: Partition; default: as the key says, or one after another.
    """
    end = _unescaped(delimiter)
    if not end:
        raise usage("the delimiter is empty; --whole makes each input one record")
    split = _unescaped(key_delimiter)
    progress = progress_bar(quiet, _size_of(files), f"to {topic}")
    with broker.connect() as client, progress as advance:
        producer = client.topic(topic).producer(linger=linger, timeout=timeout)
        sent = 0
        try:
            with producer:
                for payloads, size in _records(files, None if whole else end):
                    if split or partition is not None:
                        for payload in payloads:
                            key, value = _split(payload, split)
                            producer.send(value, key=key, partition=partition)
                    else:
                        producer.send_many(payloads)
                    sent += len(payloads)
                    advance(size, sent)
                    # Leaving the producer raises the failure. Queued records would only wait again.
                    if producer.failure is not None:
                        producer.abort()
                        break
        except BaseException:
            summary = f"{_stored(producer, topic)}, of {sent:,} that were read"
            say(f"penstock: {summary}")
            raise
        if not quiet:
            say(f"penstock: {_stored(producer, topic)}")


def _split(record: bytes, delimiter: bytes) -> tuple[bytes | None, bytes]:
    """Split a line into key and payload."""
    if not delimiter or delimiter not in record:
        return None, record
    key, _, payload = record.partition(delimiter)
    return key, payload


def _stored(producer: SyncProducer, topic: str) -> str:
    records, first, last = producer.stored
    if first is None or last is None:
        return f"no records were stored in {topic}"
    where = f"offset {first}" if records == 1 else f"offsets {first} to {last}"
    among = "" if last - first + 1 == records else ", among others"
    return f"{records:,} record{'s' if records > 1 else ''} stored in {topic} ({where}{among})"


@commands.command
def consume(
    topic: Name,
    /,
    *,
    offset: Annotated[str, Parameter(alias="-o", allow_leading_hyphen=True)] = "earliest",
    last: Annotated[int | None, Parameter(validator=NotNegative)] = None,
    exit_at_end: Annotated[bool, Parameter(name="--exit", alias="-e")] = False,
    count: Annotated[int | None, Parameter(alias="-n", validator=Positive)] = None,
    format: Format = r"%s\n",
    partition: Annotated[int, Parameter(alias="-p", validator=NotNegative)] = 0,
    group: Annotated[str | None, Parameter(alias="-g")] = None,
    json: JsonLines = False,
    quiet: Quiet = False,
    broker: TopicAddress = TopicAddress(),
) -> None:
    """Print records from an offset on, and wait for new ones unless you use --exit.

    Examples:

    `penstock topic consume orders -o @2026-01-31T12:00 -e --json | jq -r .payload`

    `penstock topic consume logs --last 100 | grep -i error`

    `penstock topic consume orders -g billing | ./charge`

    :param offset: Where to start: an offset, -N for the last N, earliest, latest, or a time
        (@2026-01-31T12:00, or @ and milliseconds).
    :param last: Start with this many records before the end.
    :param exit_at_end: Exit at the end of the topic instead of waiting.
    :param count: Exit after this many records.
    :param format: Format: %s payload, %S its length, %o offset, %t topic, %k key, %h headers,
        %T timestamp, %p partition, %% %, \\n, \\t, \\0.
    :param partition: Partition to read.
    :param group: Read as a member of this consumer group, and commit printed records.
    """
    render = _as_json if json else _renderer(format)
    start = offset if last is None else f"-{last}"
    with broker.connect() as client:
        reader = client.topic(topic).reader(
            _start(client, partition_label(topic, partition), start),
            partition=partition,
            follow=not exit_at_end,
            group=group,
            max_records=min(count or MAX_LEASED_RECORDS, MAX_LEASED_RECORDS),
        )
        _write(reader, topic, count, render, quiet)


def _start(client: SyncClient, topic: str, text: str) -> Start:
    if text in ("earliest", "beginning"):
        return "earliest"
    if text in ("latest", "end"):
        return "latest"
    if text.isdecimal():
        return int(text)
    if text.startswith("-") and text[1:].isdecimal():
        info = client.topic(topic).info()
        return max(info.first_offset, info.next_offset - int(text[1:]))
    if text.startswith("@"):
        try:
            if text[1:].isdecimal():
                return datetime.fromtimestamp(int(text[1:]) / 1000, UTC)
            return datetime.fromisoformat(text[1:]).astimezone()
        except (ValueError, OverflowError, OSError):
            pass
    raise usage(f"{text!r} is not an offset: a number, -N, earliest, latest, or @time")


def _write(
    reader: SyncReader,
    topic: str,
    count: int | None,
    render: Callable[[Batch], bytes],
    quiet: bool,
) -> None:
    out = sys.stdout.buffer
    written = 0
    progress = progress_bar(quiet or sys.stdout.isatty(), None, f"from {topic}")
    with progress as advance, reader:
        for batch in reader.batches():
            if count is not None and written + batch.count > count:
                batch = batch.until(int(batch.offsets()[count - written]))
            text = render(batch)
            out.write(text)
            out.flush()
            written += batch.count
            advance(len(text), written)
            if written == count:
                reader.complete()
                return


def _as_json(batch: Batch) -> bytes:
    encode = msgspec.json.encode
    return b"".join(encode(_message(batch.topic, record)) + b"\n" for record in batch)


def _message(topic: str, record: Record) -> RecordMessage:
    if record.timestamp is None:
        return message(topic, *record)
    value = None if record.tombstone else record.payload
    key, headers = record.key, record.headers
    return record_message(topic, KafkaRecord(record.offset, record.timestamp, key, value, headers))


def _renderer(format: str) -> Callable[[Batch], bytes]:
    r"""Return a function that formats a batch. Formats like `%s\n` need no loop over records."""
    pieces: list[bytes | str] = []  # bytes: literal text; str: a value of the record
    literal = b""
    for match in re.finditer(r"%([sSotkhTp%])|\\.|.", format, re.DOTALL):
        value = match[1]
        if value in (None, "%"):
            literal += b"%" if value else _unescaped(match[0])
        else:
            pieces += [literal, value]
            literal = b""
    pieces.append(literal)
    if [piece for piece in pieces if isinstance(piece, str)] == ["s"] and pieces[0] == b"":
        return lambda batch: literal.join([*batch.payloads(), b""])

    def render(batch: Batch) -> bytes:
        parts: list[bytes] = []
        topic = batch.topic.encode()
        for record in batch:
            values = {
                "s": record.payload,
                "S": b"%d" % len(record.payload),
                "o": b"%d" % record.offset,
                "t": topic,
                "k": record.key or b"",
                "h": b",".join(name.encode() + b"=" + (v or b"") for name, v in record.headers),
                "T": b"%d" % (-1 if record.timestamp is None else record.timestamp),
                "p": b"%d" % record.partition,
            }
            parts += [piece if isinstance(piece, bytes) else values[piece] for piece in pieces]
        return b"".join(parts)

    return render


def _unescaped(text: str) -> bytes:
    escapes = {"n": "\n", "t": "\t", "0": "\0", "r": "\r", "\\": "\\"}
    return re.sub(r"\\([nt0r\\])", lambda match: escapes[match[1]], text).encode()


def _sources(files: tuple[Path, ...]) -> Iterator[BinaryIO]:
    if not files:
        yield sys.stdin.buffer
        return
    for path in files:
        try:
            file = sys.stdin.buffer if str(path) == "-" else path.open("rb")
        except OSError as error:
            raise PenstockError(f"{path}: {error.strerror}") from None
        with file:
            yield file


def _size_of(files: tuple[Path, ...]) -> int | None:
    try:
        return sum(path.stat().st_size for path in files) if files else None
    except OSError:
        return None


def _records(files: tuple[Path, ...], end: bytes | None) -> Iterator[tuple[list[bytes], int]]:
    """Yield the records of each read, and the number of bytes read."""
    for source in _sources(files):
        if end is None:
            data = source.read()
            yield [data], len(data)
            continue
        read = getattr(source, "read1", source.read)
        rest = b""
        while data := read(READ_BYTES):
            *whole, rest = (rest + data).split(end)
            if whole:
                yield whole, len(data)
        if rest:
            yield [rest], len(rest)


@contextmanager
def progress_bar(quiet: bool, total: int | None, what: str) -> Iterator[Callable[[int, int], None]]:
    """Show bytes and records on a terminal; show nothing otherwise."""
    console = Console(stderr=True)
    if (
        quiet
        or not console.is_terminal
        or (total is None and sys.stdin.isatty() and what.startswith("to "))
    ):
        yield lambda _size, _records: None
        return
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *([BarColumn()] if total else []),
        DownloadColumn(),
        TextColumn("{task.fields[records]:,} records"),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, console=console, transient=False) as progress:
        task = progress.add_task(what, total=total, records=0)
        yield lambda size, records: progress.update(task, advance=size, records=records)


import penstock.cli.topic_check  # noqa: E402
import penstock.cli.topic_groups  # noqa: E402
import penstock.cli.topic_tier  # noqa: E402, F401  # their commands join those above
