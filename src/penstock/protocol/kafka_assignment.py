"""Decode the assignment of a member of a Kafka consumer group, which the group's leader wrote.

version i16 | topics i32 | per topic: name i16 + UTF-8 | partitions i32 | partition i32 each
| user data
"""

from struct import Struct, error

_SHORT, _INT = Struct(">h"), Struct(">i")


def assigned_partitions(assignment: bytes) -> dict[str, list[int]]:
    """Return the partitions by topic.

    Empty if the bytes have another format: groups that are not of consumers have their own.
    """
    partitions: dict[str, list[int]] = {}
    try:
        (topics,), at = _INT.unpack_from(assignment, _SHORT.size), _SHORT.size + _INT.size
        for _ in range(topics):
            (length,) = _SHORT.unpack_from(assignment, at)
            at += _SHORT.size
            name = assignment[at : at + length].decode()
            (count,) = _INT.unpack_from(assignment, at + length)
            at += length + _INT.size
            partitions[name] = [_INT.unpack_from(assignment, at + 4 * i)[0] for i in range(count)]
            at += 4 * count
    except (error, UnicodeDecodeError):
        return {}
    return partitions
