"""`penstock topic`: topics from a shell. Records come on standard input and go to standard output,
so that it composes.

What a person should see (errors, progress) goes to standard error. Exit codes: 0 done, 1 refused or
damaged, 2 wrong usage, 130 interrupted (Ctrl-C), 141 whoever read our output has gone.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import typer
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
    Api,
    Commands,
    Json,
    Token,
    Url,
    Yes,
    app,
    argument,
    completer,
    confirm,
    option,
    usage,
)
from penstock.cli.tables import Column, Facts, View, count, print_json
from penstock.client import Batch, SyncClient
from penstock.client.reader import Start
from penstock.client.sync import SyncProducer, SyncReader
from penstock.protocol.kafka_batch import KafkaRecord
from penstock.protocol.names import partition_label
from penstock.protocol.record_batch import Record
from penstock.protocol.records import Message, message, record_message

commands = Commands("Create, read, write and check topics.", app, name="topic")

READ_BYTES = 1 << 20
MAX_LEASED_RECORDS = 10_000  # records a group member takes at once

Name = Annotated[
    str, argument("Name of the topic.", metavar="TOPIC", autocompletion=completer("/topics", ""))
]


@dataclass(frozen=True, slots=True)
class Broker:
    """The broker's TCP port, where topics are."""

    broker: Annotated[
        str,
        option(
            "Broker address as HOST:PORT, or several separated by commas.",
            "-b",
            envvar="PENSTOCK_BROKER",
        ),
    ] = "127.0.0.1:12345"
    token: Token = ""

    def connect(self) -> SyncClient:
        return SyncClient(topics=self.broker, timeout=10.0, token=self.token)


class Format(StrEnum):
    AIQ = "aiq"
    KAFKA = "kafka"


class Policy(StrEnum):
    DELETE = "delete"
    COMPACT = "compact"


@commands.command()
def create(
    broker: Broker,
    topics: Annotated[list[str], argument("Names of the topics.", metavar="TOPIC...")],
    format: Annotated[
        Format | None, option("Format on disk; default: as the broker is configured.")
    ] = None,
    partitions: Annotated[
        int,
        option("Number of partitions; more than one need --format kafka or --shared.", min=1),
    ] = 1,
    shared: Annotated[
        bool,
        option("Keep it in PostgreSQL and object storage: every broker on the database serves it."),
    ] = False,
) -> None:
    """Create topics. Topics that exist stay unchanged.

    Examples:

    `penstock topic create orders payments`

    `penstock topic create events --format kafka --partitions 8`

    `penstock topic create orders --shared`
    """
    with broker.connect() as client:
        for topic in topics:
            client.topic(topic).create(format=format, partitions=partitions, shared=shared)


@commands.command("list")
def list_topics(broker: Broker, json: Json = False) -> None:
    """List the topics, one per line.

    Example: `penstock topic list | xargs -n1 penstock topic describe`
    """
    with broker.connect() as client:
        names = client.topics()
        if json:
            print_json(names)
        else:
            sys.stdout.write("".join(f"{name}\n" for name in names))


@commands.command()
def describe(broker: Broker, topic: Name) -> View:
    """Show a topic's offsets, size and segments. `topic status` has rates and groups.

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


@commands.command()
def policy(
    broker: Broker,
    topic: Name,
    wanted: Annotated[
        Policy | None,
        argument("The new policy; default: show the current one.", metavar="[delete|compact]"),
    ] = None,
    url: Url = LOCAL_URL,
) -> None:
    """Show or set the cleanup policy of a topic: retention deletes old segments, or `pipeline run
    compact` compacts them.

    Example: `penstock topic policy prices compact`
    """
    with broker.connect() as client:
        if wanted is not None:
            Api(url, broker.token).put("/topics", topic, "policy", body={"policy": wanted.value})
        sys.stdout.write(f"{client.topic(topic).info().policy}\n")


@commands.command()
def delete(broker: Broker, topic: Name, yes: Yes = False) -> None:
    """Permanently delete a topic and its records.

    Example: `penstock topic delete old-orders --yes`
    """
    with broker.connect() as client:
        if not yes:
            confirm(f"Delete {topic!r} with {client.topic(topic).info().records:,} records?", yes)
        client.topic(topic).delete()


@commands.command()
def produce(
    broker: Broker,
    topic: Name,
    files: Annotated[
        list[Path] | None, argument("Files to read; default: standard input.", metavar="[FILE]...")
    ] = None,
    delimiter: Annotated[
        str, option(r"Delimiter that ends a record: \n, \t, \0, or text.", "-D")
    ] = r"\n",
    whole: Annotated[bool, option("Store each file as one record.")] = False,
    linger: Annotated[float, option("Seconds to wait for a batch to fill.")] = 0.005,
    timeout: Annotated[
        float, option("Seconds to wait for a record to be stored before it fails.", min=0.1)
    ] = 30.0,
    key_delimiter: Annotated[
        str, option("Delimiter between a key and its payload in each record.", "-K")
    ] = "",
    partition: Annotated[
        int | None, option("Partition; default: as the key says, or one after another.", "-p")
    ] = None,
    quiet: Annotated[bool, option("Do not show progress or a summary.", "-q")] = False,
) -> None:
    """Append records from standard input or files, one per line. Each is stored once, in order.

    Examples:

    `journalctl -f -o json | penstock topic produce logs`

    `find . -name '*.bin' -print0 | penstock topic produce names -D '\\0'`
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
                    # Leaving raises it; what is queued behind would wait as long again.
                    if producer.failure is not None:
                        producer.abort()
                        break
        except BaseException:
            summary = f"{_stored(producer, topic)}, of {sent:,} that were read"
            typer.echo(f"penstock: {summary}", err=True)
            raise
        if not quiet:
            typer.echo(f"penstock: {_stored(producer, topic)}", err=True)


def _split(record: bytes, delimiter: bytes) -> tuple[bytes | None, bytes]:
    """The key and the payload of a record that was read."""
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


@commands.command()
def consume(
    broker: Broker,
    topic: Name,
    offset: Annotated[
        str,
        option(
            "Where to start: an offset, -N for the last N, earliest, latest, or a time "
            "(@2026-01-31T12:00, or @ and milliseconds).",
            "-o",
        ),
    ] = "earliest",
    exit_at_end: Annotated[
        bool, option("Exit at the end of the topic instead of waiting.", "--exit", "-e")
    ] = False,
    count: Annotated[int | None, option("Exit after this many records.", "-n", min=1)] = None,
    format: Annotated[
        str,
        option(
            r"Format: %s payload, %S its length, %o offset, %t topic, %k key, %h headers, "
            r"%T timestamp, %p partition, %% %, \n, \t, \0.",
            "-f",
        ),
    ] = r"%s\n",
    partition: Annotated[int, option("Partition to read.", "-p", min=0)] = 0,
    group: Annotated[
        str | None,
        option("Read as a member of this consumer group, and commit printed records.", "-g"),
    ] = None,
    json: Annotated[bool, option("One JSON object per line.", "-J")] = False,
    quiet: Annotated[bool, option("Do not show progress.", "-q")] = False,
) -> None:
    """Print records from an offset on, and wait for new ones unless you use --exit.

    Examples:

    `penstock topic consume orders -o @2026-01-31T12:00 -e --json | jq -r .payload`

    `penstock topic consume orders -o -10 -e -f '%o %s\\n'`

    `penstock topic consume orders -g billing | ./charge`
    """
    render = _as_json if json else _renderer(format)
    with broker.connect() as client:
        reader = client.topic(topic).reader(
            _start(client, partition_label(topic, partition), offset),
            partition=partition,
            follow=not exit_at_end,
            group=group,
            max_records=min(count or MAX_LEASED_RECORDS, MAX_LEASED_RECORDS),
        )
        _write(reader, topic, count, render, quiet)


@commands.command()
def tail(
    broker: Broker,
    topic: Name,
    count: Annotated[int, option("Number of existing records to print first.", "-n", min=0)] = 10,
    follow: Annotated[bool, option("Wait for new records.", "--follow/--no-follow", "-F")] = True,
    format: Annotated[str, option("Output format, as in `consume`.", "-f")] = r"%s\n",
    json: Annotated[bool, option("One JSON object per line.", "-J")] = False,
) -> None:
    """Print the last records, and new ones as they are appended.

    Example: `penstock topic tail logs -n 100 | grep -i error`
    """
    render = _as_json if json else _renderer(format)
    with broker.connect() as client:
        start = _start(client, topic, f"-{count}")
        reader = client.topic(topic).reader(start, follow=follow, max_records=MAX_LEASED_RECORDS)
        _write(reader, topic, None, render, quiet=True)


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
    raise usage(f"{text!r} is no offset: a number, -N, earliest, latest, or @time")


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


def _message(topic: str, record: Record) -> Message:
    if record.timestamp is None:
        return message(topic, *record)
    value = None if record.tombstone else record.payload
    key, headers = record.key, record.headers
    return record_message(topic, KafkaRecord(record.offset, record.timestamp, key, value, headers))


def _renderer(format: str) -> Callable[[Batch], bytes]:
    r"""A function from a batch to its text; `%s\n` and the like take no look at single records."""
    pieces: list[bytes | str] = []  # bytes: as they are; str: which value
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


def _sources(files: list[Path] | None) -> Iterator[BinaryIO]:
    if not files:
        yield sys.stdin.buffer
        return
    for path in files:
        try:
            file = sys.stdin.buffer if str(path) == "-" else path.open("rb")
        except OSError as error:
            typer.echo(f"penstock: {path}: {error.strerror}", err=True)
            raise typer.Exit(1) from None
        with file:
            yield file


def _size_of(files: list[Path] | None) -> int | None:
    try:
        return sum(path.stat().st_size for path in files) if files else None
    except OSError:
        return None


def _records(files: list[Path] | None, end: bytes | None) -> Iterator[tuple[list[bytes], int]]:
    """The records of all inputs, as many as a read brings, and the bytes that were read."""
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
    """Counts bytes and records on a terminal; silent otherwise."""
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
