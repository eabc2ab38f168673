"""Refuse names and texts that PostgreSQL cannot store or index."""

from penstock.errors import InvalidRequest

MAX_NAME_CHARS = 512


def check_name(kind: str, name: str) -> None:
    if not name:
        raise InvalidRequest(f"{kind} must not be empty")
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(f"{kind} is longer than {MAX_NAME_CHARS} characters")
    check_text(kind, name)


def check_group(name: str) -> None:
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(f"consumerGroup is longer than {MAX_NAME_CHARS} characters")
    check_text("consumerGroup", name)


def check_text(kind: str, text: str) -> None:
    """Refuse what PostgreSQL cannot store as text."""
    if "\x00" in text:
        raise InvalidRequest(f"{kind} contains a NUL character")
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{kind} is not valid Unicode") from None
