"""Reject payloads that JSON would change silently.

JSON has no NaN, no infinity and no bytes. The encoder writes `null` and base64 text instead, and a
consumer cannot see the difference. So every payload is checked: first quickly for plain JSON types;
if it has others, again with the path to each value, for the error message.
"""

from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from math import isfinite as _isfinite
from typing import Any
from uuid import UUID

import msgspec

from penstock.errors import InvalidRequest

_AS_THEY_ARE = frozenset({str, int, bool, type(None), msgspec.Raw})
_AS_TEXT = (datetime, date, time, timedelta, UUID)  # encoded as text without loss
_BINARY = (bytes, bytearray, memoryview)


def encode_payload(value: Any) -> msgspec.Raw:
    """Return the JSON text of a payload: what JSON has, dataclasses, msgspec structs, and models of
    attrs and pydantic. Raises `InvalidRequest` like `check_payload`.
    """
    check_payload(value)
    return value if type(value) is msgspec.Raw else msgspec.Raw(_encode(value))


def _plain(value: Any) -> Any:
    """Convert a pydantic model to plain values. The encoder supports the other kinds itself."""
    dump = getattr(value, "model_dump", None)
    if dump is None or isinstance(value, type):
        raise TypeError(type(value).__qualname__)
    return dump()


_encode = msgspec.json.Encoder(enc_hook=_plain).encode


def check_payload(value: Any) -> None:
    """Raise `InvalidRequest` with the place of a value that JSON cannot represent."""
    if type(value) not in _AS_THEY_ARE and not _is_plain(value):
        _check(value, "")


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        if any(type(key) is not str for key in value):
            return False
        inside = value.values()
    elif kind is list:
        inside = value
    else:
        return kind is float and _isfinite(value)
    for inner in inside:  # noqa: SIM110  # a generator takes twice the time
        if type(inner) not in _AS_THEY_ARE and not _is_plain(inner):
            return False
    return True


def _check(value: Any, path: str) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if type(key) is not str:
                _check(key, f"{path}.{key}")
            if type(inner) not in _AS_THEY_ARE:
                _check(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple | set | frozenset):
        for index, inner in enumerate(value):
            if type(inner) not in _AS_THEY_ARE:
                _check(inner, f"{path}[{index}]")
    elif isinstance(value, float):
        if not _isfinite(value):
            raise InvalidRequest(
                f"{_place(path)} is {value}, which JSON cannot represent (it would become null): "
                "send None, a number or text"
            )
    elif isinstance(value, Decimal):
        if not value.is_finite():
            raise InvalidRequest(f"{_place(path)} is {value}: send None, a number or text")
    elif isinstance(value, _BINARY):
        whole = "" if path else ", or msgspec.Raw(...) if it contains JSON already"
        raise InvalidRequest(
            f"{_place(path)} is {type(value).__name__}, which JSON cannot represent: "
            "send text (.decode()), or base64.b64encode(...).decode() and decode it "
            f"in the consumer{whole}"
        )
    elif type(value) not in _AS_THEY_ARE and not isinstance(value, _AS_TEXT):
        try:
            plain = msgspec.to_builtins(
                value, builtin_types=(*_BINARY, *_AS_TEXT, Decimal), enc_hook=_plain
            )
        except TypeError as error:
            for name in _fields(type(value)):
                _check(getattr(value, name), f"{path}.{name}")
            raise InvalidRequest(
                f"{_place(path)} is an instance of {error}, which JSON cannot represent: send "
                "text, numbers, lists, dictionaries, or a dataclass, msgspec, attrs or pydantic "
                "model"
            ) from None
        # a struct or dataclass is a dictionary now, an enum its value
        if type(plain) is not type(value):
            _check(plain, path)


def _fields(kind: Any) -> Iterator[str]:
    """Yield the field names of a msgspec struct, a dataclass, or a model of pydantic or attrs."""
    for source in ("__struct_fields__", "__dataclass_fields__", "model_fields"):
        yield from getattr(kind, source, ())
    yield from (one.name for one in getattr(kind, "__attrs_attrs__", ()))


def _place(path: str) -> str:
    return f"the payload's {path.removeprefix('.')}" if path else "the payload"
