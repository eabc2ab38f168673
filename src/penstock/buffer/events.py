"""The events of a buffer file: encode items, and read a file window by window.

`penstock.protocol.buffer_lines` has the format of a line. JSON may have newlines between tokens.
Such a payload is compacted, so that one line is one event for us, `wc -l`, `jq` and `grep` alike.
That removes only white space: numbers and strings keep their bytes. A JSON string never contains a
raw newline.

A file consists of lines (our format, and one of Queen MQ's) or of frames (the other format of Queen
MQ). Its first bytes show which.

A last line that a crash cut short is not an event: its push was never acknowledged. A whole line
that is not an event, or does not match its checksum, is damaged. Both are set aside, and the events
around them are read.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from uuid import UUID

import msgspec

from penstock.buffer.backlog import Key, keys_of
from penstock.errors import InvalidRequest
from penstock.io.fs import Fs
from penstock.protocol import buffer_lines
from penstock.protocol.buffer_frames import FrameWindow, is_framed, read_frames
from penstock.protocol.buffer_lines import Event
from penstock.protocol.headers import decode as decode_headers
from penstock.queues.types import Item

WINDOW_BYTES = 4 << 20


def encode(items: Iterable[Item]) -> list[bytes]:
    """Return a line per item. Raise InvalidRequest if a payload is not JSON."""
    lines = [buffer_lines.encode(_event(item)) for item in items]
    try:  # a cheap check, and the last chance to reject an unreadable line
        readable = len(buffer_lines.parse(b"".join(lines))) == len(lines)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"a payload is not valid JSON: {error}") from None
    if not readable:
        raise InvalidRequest("a payload is not valid JSON")
    return lines


def _event(item: Item) -> Event:
    payload, headers = bytes(item.payload), item.headers
    assert not isinstance(item.due, float), "Queues.at_rest turns a delay into a time"
    if item.key_id is not None:
        payload = b'"%b"' % b64encode(payload)
        if headers is not None:
            headers = b'"%b"' % b64encode(headers)
    elif b"\n" in payload:
        try:
            payload = msgspec.json.format(payload, indent=-1)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"the payload is not valid JSON: {error}") from None
    return Event(
        queue=item.queue,
        payload=msgspec.Raw(payload),
        partition=item.partition,
        transaction_id=item.transaction_id or "",
        trace_id=item.trace_id,
        producer=item.producer,
        sealed=item.key_id,
        headers=msgspec.Raw(headers or b""),
        deliver_at=item.due,
        unordered=item.ordering == "none",
    )


def item_of(event: Event) -> Item:
    """Return the item of an event. Raise msgspec.DecodeError if its fields are invalid."""
    payload = bytes(event.payload)
    headers = bytes(event.headers) or None
    if event.sealed is not None:
        payload = _unquoted(payload)
        headers = None if headers is None else _unquoted(headers)
    elif headers is not None:
        decode_headers(headers)  # a file may come from anywhere
    return Item(
        queue=event.queue,
        payload=payload,
        partition=event.partition,
        transaction_id=event.transaction_id,
        trace_id=event.trace_id if event.trace_id and _is_uuid(event.trace_id) else None,
        producer=event.producer,
        key_id=event.sealed,
        headers=headers,
        due=event.deliver_at,
        ordering="none" if event.unordered else None,
    )


def _is_uuid(text: str) -> bool:
    """Return whether the text is a UUID. Queen MQ accepts any text as a trace id."""
    try:
        UUID(text)
    except ValueError:
        return False
    return True


def _unquoted(text: bytes) -> bytes:
    try:
        return b64decode(msgspec.json.decode(text, type=str), validate=True)
    except ValueError as error:  # includes binascii.Error and ValidationError
        raise msgspec.DecodeError(f"the encrypted payload is not base64: {error}") from None


@dataclass(slots=True)
class Window:
    """Consecutive events of a file."""

    items: list[Item] = field(default_factory=list)
    bad: list[bytes] = field(default_factory=list)  # whole lines that are not events
    torn: bytes = b""  # the end of the file, without a newline


def windows(fs: Fs, path: Path) -> Iterator[Window]:
    """Yield the content of a file, about `WINDOW_BYTES` or one event at a time. Blocks."""
    pieces = _pieces(fs, path)
    start = next(pieces, b"")
    contents = chain([start], pieces)
    name = path.name.removesuffix(".tmp")
    if is_framed(start):
        return map(_from_frames, read_frames(contents, name))
    return _line_windows(contents, name)


def _line_windows(pieces: Iterable[bytes], name: str) -> Iterator[Window]:
    rest, offset = b"", 0
    for data in pieces:
        end = data.rfind(b"\n") + 1
        if end:
            yield decode_window(rest + data[:end], name, offset)
            offset += len(rest) + end
            rest = data[end:]
        else:
            rest += data
    if rest:
        last = decode_window(rest + b"\n", name, offset)
        yield last if last.items else Window(torn=rest)


def _from_frames(frames: FrameWindow) -> Window:
    window = Window(bad=frames.bad, torn=frames.torn)
    for event in frames.events:
        try:
            window.items.append(item_of(event))
        except msgspec.DecodeError:
            window.bad.append(buffer_lines.encode(event))
    return window


def _pieces(fs: Fs, path: Path) -> Iterator[bytes]:
    with closing(fs.open(path, write=False)) as file:
        position = 0
        while data := file.read_at(position, WINDOW_BYTES):
            yield data
            position += len(data)


def decode_window(data: bytes, name: str = "", offset: int = 0) -> Window:
    """Return the events of whole lines, which are in the file `name` at `offset`. An event without
    a transaction id gets one made of these two; without a `name`, it is bad.
    """
    try:
        return Window([item_of(event) for event in buffer_lines.decode_all(data)])
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # a line is not an event: decode them one by one
    window = Window()
    for line in _lines(data):
        if line.strip():
            try:
                place = f"{name}:{offset}" if name else ""
                window.items.append(item_of(buffer_lines.decode(line, place)))
            except (msgspec.DecodeError, UnicodeDecodeError):
                window.bad.append(line)
        offset += len(line)
    return window


def _lines(data: bytes) -> list[bytes]:
    return [line + b"\n" for line in data.split(b"\n")[:-1]]


def count_events(fs: Fs, path: Path) -> int:
    """Return the number of events in the file. Lines are counted, not decoded."""
    pieces = _pieces(fs, path)
    start = next(pieces, b"")
    if is_framed(start):
        return sum(len(window.items) + len(window.bad) for window in windows(fs, path))
    last = start
    lines = start.count(b"\n")
    for last in pieces:
        lines += last.count(b"\n")
    return lines + (last.rstrip().endswith(b"}") and not last.endswith(b"\n"))


def keys_in(fs: Fs, path: Path) -> set[Key]:
    """Return the partitions whose events are in a file."""
    keys: set[Key] = set()
    for window in windows(fs, path):
        keys |= keys_of(window.items)
    return keys
