"""Choose the partition of a record whose producer names none, as Kafka's clients do. So a key is
always in the same partition, whichever client appended it.
"""

from random import randrange


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
