"""Compute the ids of partitions and messages. They are derived from numbers and never stored.

An id is a UUID of version 8. From the left:

    bits  32  installation  random, made once per database, so that ids of two databases differ
    bits  16  partition, its highest bits
    bits   4  version (8)
    bits  12  partition, its middle bits
    bits   2  variant (binary 10)
    bits  12  partition, its lowest bits
    bits  50  sequence number; 0 names the partition itself

So the partition of an acknowledgement is computed from its id. `message_uuid.sql` does the same in
the database.

The id of a lease is a UUID of version 7. A holder that must recognize its leases after a crash uses
version 8: 48 bits of the holder's number, the version, then random bits. So its leases are a range
of ids that contains no other lease.
"""

import secrets
from uuid import UUID

_MARKS = 0x8 << 76 | 0x2 << 62
_HOLDER = (1 << 48) - 1


def message_uuid(installation: int, partition: int, seq: int) -> UUID:
    return UUID(int=base_of(installation, partition) | seq)


def base_of(installation: int, partition: int) -> int:
    """Return the id of a partition as a number. A message's id is this plus its sequence number."""
    return (
        installation << 96
        | (partition >> 24) << 80
        | (partition >> 12 & 0xFFF) << 64
        | (partition & 0xFFF) << 50
        | _MARKS
    )


def text_of(number: int) -> str:
    """Return the text form of an id."""
    digits = f"{number:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def partition_of(installation: int, text: str) -> int | None:
    """Return the number of the partition with this id; None if it is of another installation."""
    try:
        number = UUID(text).int
    except ValueError:
        return None
    partition = (number >> 80 & 0xFFFF) << 24 | (number >> 64 & 0xFFF) << 12 | number >> 50 & 0xFFF
    return partition if number == base_of(installation, partition) else None


def sequence_of(text: str) -> int:
    """Return the sequence number in the id of a message."""
    return UUID(text).int & (1 << 50) - 1


def lease_of(holder: int) -> UUID:
    """Return a new lease id for this holder."""
    chance = secrets.randbits(76) & ~(0x3 << 62)
    return UUID(int=(holder & _HOLDER) << 80 | _MARKS | chance)


def leases_of(holder: int) -> tuple[UUID, UUID]:
    """Return the lowest and the highest id that `lease_of` can return."""
    first = (holder & _HOLDER) << 80 | 0x8 << 76
    return UUID(int=first), UUID(int=first | (1 << 76) - 1)
