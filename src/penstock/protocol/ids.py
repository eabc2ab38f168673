"""Time-ordered identifiers (UUID version 7, RFC 9562).

The standard library gains `uuid7` only in Python 3.14. Ids made by one process are strictly
increasing: within one millisecond the 12 bits after the timestamp and the first random bits form a
counter, so names sort as they were made.
"""

import os
import time
from uuid import UUID

# the last id's top 80 bits: 48 of milliseconds, then a counter of 32 (version and variant taken
# out)
_last = 0


def uuid7() -> UUID:
    """A new id, greater than every id this process made before, also when the clock steps back."""
    global _last
    chance = int.from_bytes(os.urandom(9), "big")
    fresh = (time.time_ns() // 1_000_000) << 32 | chance >> 48
    _last = fresh if fresh > _last else _last + 1
    milliseconds, counter = _last >> 32, _last & 0xFFFF_FFFF
    value = milliseconds << 80
    value |= 0x7000 << 64 | (counter >> 20) << 64
    value |= 0x8000_0000_0000_0000 | (counter & 0xF_FFFF) << 42
    value |= chance & 0x3FF_FFFF_FFFF
    return UUID(int=value)
