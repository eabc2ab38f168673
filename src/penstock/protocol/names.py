"""Names both ends agree on: those that stand for "none given", and what may be a topic's name.

A topic's name becomes a directory's name, so it is checked before anything touches the disk. So is
every path that a manifest or a listing contains.
"""

import re

from penstock.errors import InvalidRequest

QUEUE_MODE = "__QUEUE_MODE__"  # the group of consumers that name none
DEFAULT_PARTITION = "Default"  # of a message that names none
MAX_NAME_BYTES = 249
LOST_FOUND = "lost+found"  # a file system's own, where the data directory is its root
RESERVED = (".", "..", ".penstock", LOST_FOUND)
_INCARNATION = re.compile("[0-9a-f]{32}")


def check_name(name: str, what: str = "topic") -> str:
    """The name itself, or InvalidRequest."""
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"a {what} name must be valid UTF-8") from None
    if not 1 <= length <= MAX_NAME_BYTES:
        raise InvalidRequest(
            f"a {what} name has 1 to {MAX_NAME_BYTES} bytes, this one has {length}"
        )
    if name in RESERVED:
        raise InvalidRequest(f"{name!r} is not a {what} name")
    for character in name:
        if character in "/\\" or ord(character) < 32 or 127 <= ord(character) < 160:
            raise InvalidRequest(f"a {what} name must not contain {character!r}")
    return name


def is_topic_name(name: str) -> bool:
    try:
        check_name(name)
    except InvalidRequest:
        return False
    return True


def is_incarnation(text: str) -> bool:
    """Check the id that a topic gets when it is created: a UUID in hexadecimal digits."""
    return _INCARNATION.fullmatch(text) is not None


def is_relative_path(path: str) -> bool:
    """Check that a path with `/`, joined to a directory, stays below that directory."""
    return "\0" not in path and not {"", ".", ".."}.intersection(path.split("/"))


def partition_label(topic: str, partition: int) -> str:
    """The name of a partition's log: the topic's, and `/number` for all but partition 0."""
    return f"{topic}/{partition}" if partition else topic


def split_label(label: str) -> tuple[str, int]:
    """The topic and the number of the partition with this label."""
    topic, _, number = label.partition("/")
    return topic, int(number or 0)
