"""Read a buffer file window by window, and separate the bytes that are not events.

A file consists of lines (our format, and one of Queen MQ's) or of frames (the other format of Queen
MQ). Its first bytes show which.

A last line that a crash cut short is not an event: its push was never acknowledged. A whole line
that is not an event, or does not match its checksum, is damaged. Both are set aside, and the events
around them are read.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import msgspec

from penstock.buffer.backlog import Key, keys_of
from penstock.buffer.events import decode, decode_all, item_of
from penstock.io.fs import Fs
from penstock.protocol.buffer_frames import FrameWindow, is_framed, read_frames
from penstock.protocol.buffer_lines import encode as encode_line
from penstock.queues.types import Item

WINDOW_BYTES = 4 << 20


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
            window.bad.append(encode_line(event))
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
        return Window(decode_all(data))
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # a line is not an event: decode them one by one
    window = Window()
    for line in _lines(data):
        if line.strip():
            try:
                window.items.append(decode(line, f"{name}:{offset}" if name else ""))
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
