"""Choose the partition of a record whose producer names none, as Kafka's clients do. So the records
of a key are in the same partition, whichever client appended them. Decode which partitions a member
of a Kafka group has.
"""

from random import randrange
from struct import Struct, error

_SHORT, _INT = Struct(">h"), Struct(">i")


def murmur2(data: bytes) -> int:
    """Return Kafka's hash of a key: 32 bits, unsigned."""
    mask, multiplier = 0xFFFFFFFF, 0x5BD1E995
    size = len(data)
    mixed = 0x9747B28C ^ size
    whole = size & ~3
    for at in range(0, whole, 4):
        part = int.from_bytes(data[at : at + 4], "little") * multiplier & mask
        part = (part ^ part >> 24) * multiplier & mask
        mixed = mixed * multiplier & mask ^ part
    if size > whole:
        mixed = (mixed ^ int.from_bytes(data[whole:], "little")) * multiplier & mask
    mixed = (mixed ^ mixed >> 13) * multiplier & mask
    return mixed ^ mixed >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition of the records with this key."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


class Rotation:
    """Choose one partition after another, for batches without keys."""

    __slots__ = ("_latest",)

    def __init__(self) -> None:
        self._latest = randrange(1 << 16)

    def next(self, partitions: int) -> int:
        self._latest += 1
        return self._latest % partitions


def assigned_partitions(assignment: bytes) -> dict[str, list[int]]:
    """Return the partitions by topic of an assignment, which the group's leader wrote:

    version i16 | topics i32 | per topic: name i16 + UTF-8 | partitions i32 | partition i32 each
    | user data

    Empty if the bytes have another format: groups that are not of consumers have their own.
    """
    partitions: dict[str, list[int]] = {}
    try:
        (topics,), at = _INT.unpack_from(assignment, _SHORT.size), _SHORT.size + _INT.size
        for _ in range(topics):
            (length,) = _SHORT.unpack_from(assignment, at)
            at += _SHORT.size
            (count,) = _INT.unpack_from(assignment, at + length)
            if length < 0 or count < 0:
                return {}
            name = assignment[at : at + length].decode()
            at += length + _INT.size
            partitions[name] = [_INT.unpack_from(assignment, at + 4 * i)[0] for i in range(count)]
            at += 4 * count
    except (error, UnicodeDecodeError):
        return {}
    return partitions
