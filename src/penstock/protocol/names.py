"""Define the names that broker and client share, and check the names of topics.

A topic's name becomes a directory name, so it is checked before it reaches the disk. So is every
path from a manifest or a listing.
"""

import re

from penstock.errors import InvalidRequest

QUEUE_MODE = "__QUEUE_MODE__"  # the group of consumers that name none
DEFAULT_PARTITION = "Default"  # of messages that name none
MAX_NAME_BYTES = 249
LOST_FOUND = "lost+found"  # created by ext4 if the data directory is a mount point
RESERVED = (".", "..", ".penstock", LOST_FOUND)
_INCARNATION = re.compile("[0-9a-f]{32}")


def check_name(name: str, what: str = "topic") -> str:
    """Return the name. Raises InvalidRequest if it is invalid."""
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
    """Return the label of a partition: the topic's name, with `/number` except for partition 0."""
    return f"{topic}/{partition}" if partition else topic


def split_label(label: str) -> tuple[str, int]:
    """Return the topic and the number of the partition with this label."""
    topic, _, number = label.partition("/")
    return topic, int(number or 0)
