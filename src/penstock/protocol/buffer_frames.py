"""Read buffer files of Queen MQ that consist of frames instead of lines.

| bytes | what                                                    |
|-------|---------------------------------------------------------|
| 4     | length of the event, little-endian                      |
| n     | the event: a JSON object with camelCase keys            |

Both formats use the same file names. The first bytes of a file show its format: the fourth byte of
a frame is at most 8, since events are smaller than 144 MiB, and JSON text has no such byte.

After a damaged or truncated frame, reading resumes at the next whole event.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from struct import Struct

import msgspec

from penstock.protocol.buffer_lines import Event, decode

_LENGTH = Struct("<I")
# Three bytes of any value, the highest byte of a length, the first byte of a JSON object.
_HEADER = re.compile(rb"(?=[\s\S]{3}[\x00-\x08]\{)")


@dataclass(slots=True)
class FrameWindow:
    """Some events of a file, in order."""

    events: list[Event] = field(default_factory=list)
    bad: list[bytes] = field(default_factory=list)  # damaged bytes between two events
    torn: bytes = b""  # the last frame of the file, if incomplete


def is_framed(start: bytes) -> bool:
    """Return whether a file that starts with these bytes consists of frames."""
    return _HEADER.match(start) is not None and any(start[:4])


def read_frames(pieces: Iterable[bytes], origin: str) -> Iterator[FrameWindow]:
    """Decode a file that comes in pieces; `origin` identifies the file (buffer_lines.decode)."""
    data, offset = b"", 0
    for piece in pieces:
        data += piece
        window, used = _split(data, origin, offset, final=False)
        yield window
        data, offset = data[used:], offset + used
    if data:
        yield _split(data, origin, offset, final=True)[0]


def _split(data: bytes, origin: str, offset: int, *, final: bool) -> tuple[FrameWindow, int]:
    """Decode the events at the start of `data`. Return them and the bytes consumed."""
    window = FrameWindow()
    position = 0
    while position < len(data):
        end = _end(data, position)
        if event := _event(data, position, origin, offset):
            window.events.append(event)
            position = end
            continue
        cut = end > len(data)
        if cut and not final:
            break
        following = _find_frame(data, position + 1, final=final)
        if following is not None:
            window.bad.append(data[position:following])
            position = following
        elif not final:
            break
        else:
            if cut:
                window.torn = data[position:]
            else:
                window.bad.append(data[position:])
            position = len(data)
    return window, position


def _end(data: bytes, position: int) -> int:
    """Return the end of the frame at `position`; beyond `data` if the frame is incomplete."""
    if len(data) - position <= _LENGTH.size:
        return len(data) + 1
    if not _HEADER.match(data, position):
        return position
    return position + _LENGTH.size + int(_LENGTH.unpack_from(data, position)[0])


def _event(data: bytes, position: int, origin: str, offset: int) -> Event | None:
    begin, end = position + _LENGTH.size, _end(data, position)
    if not begin < end <= len(data):
        return None
    try:
        return decode(data[begin:end], f"{origin}:{offset + position}")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _find_frame(data: bytes, start: int, *, final: bool) -> int | None:
    """Return the position of the next event, or of one that more data may complete."""
    for match in _HEADER.finditer(data, start):
        position = match.start()
        more = not final and _end(data, position) > len(data)
        if more or _event(data, position, "?", 0):
            return position
    return None
