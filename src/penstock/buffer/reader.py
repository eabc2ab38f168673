"""Reads a buffer file window by window, and says which bytes of it are no events.

A last line without its newline was cut short by a crash: its push was never answered, and it is set
aside. A whole line that is no event or does not match its checksum is damage, and is set aside as
well. Neither stops the events around it.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.buffer.backlog import Key, keys_of
from penstock.buffer.events import decode, decode_all
from penstock.io.fs import Fs
from penstock.queues.types import Item

WINDOW_BYTES = 4 << 20


@dataclass(slots=True)
class Window:
    """Some events of a file, in order."""

    items: list[Item] = field(default_factory=list)
    bad: list[bytes] = field(default_factory=list)  # whole lines that are no events
    torn: bytes = b""  # what is left after the last newline of the file


def windows(fs: Fs, path: Path) -> Iterator[Window]:
    """The file's contents, about `WINDOW_BYTES` or one line at a time. Blocks."""
    rest = b""
    for data in _pieces(fs, path):
        end = data.rfind(b"\n") + 1
        if end:
            yield decode_window(rest + data[:end])
            rest = data[end:]
        else:
            rest += data
    if rest:
        yield Window(torn=rest)


def _pieces(fs: Fs, path: Path) -> Iterator[bytes]:
    with closing(fs.open(path, write=False)) as file:
        position = 0
        while data := file.read_at(position, WINDOW_BYTES):
            yield data
            position += len(data)


def decode_window(data: bytes) -> Window:
    """The events of whole lines."""
    try:
        return Window(decode_all(data))
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # some line is no event; find out which
    window = Window()
    for line in _lines(data):
        if not line.strip():
            continue
        try:
            window.items.append(decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            window.bad.append(line)
    return window


def _lines(data: bytes) -> list[bytes]:
    return [line + b"\n" for line in data.split(b"\n")[:-1]]


def count_events(fs: Fs, path: Path) -> int:
    """Lines in the file, without looking into them."""
    return sum(data.count(b"\n") for data in _pieces(fs, path))


def keys_in(fs: Fs, path: Path) -> set[Key]:
    """The partitions that a file has events of."""
    keys: set[Key] = set()
    for window in windows(fs, path):
        keys |= keys_of(window.items)
    return keys
