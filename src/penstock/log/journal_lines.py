"""A line of a journal: a checksum and a JSON array. A line that was damaged or cut is recognised
and left out.

<8 hexadecimal digits: CRC32C of the rest> <JSON array>\\n
"""

import contextlib
import json
from typing import Any

from crc32c import crc32c


def line(event: list[Any]) -> bytes:
    body = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
    return b"%08x %b\n" % (crc32c(body), body)


def parse(text: bytes) -> Any:
    """What the line says; None when it does not match its checksum."""
    check, _, body = text.partition(b" ")
    with contextlib.suppress(ValueError):
        if len(check) == 8 and int(check, 16) == crc32c(body):
            return json.loads(body)
    return None
