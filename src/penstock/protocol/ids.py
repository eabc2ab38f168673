"""Create time-ordered identifiers (UUID version 7, RFC 9562).

The standard library has `uuid7` only from Python 3.14 on. Ids of one process are strictly
increasing: within a millisecond, the 12 bits after the timestamp and the first random bits form a
counter. So names made from them sort in the order of their creation.
"""

import os
import time
from uuid import UUID

# the top 80 bits of the last id: 48 of milliseconds, then a counter of 32 (without version and
# variant)
_last = 0


def uuid7() -> UUID:
    """Return an id greater than all earlier ids of this process, also if the clock steps back."""
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
