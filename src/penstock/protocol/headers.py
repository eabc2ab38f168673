"""Check, encode and decode the headers of a message: a flat map of strings beside its payload.

Headers are JSON text, like the payload. Only producer and consumer decode it; in between, the bytes
are copied as they are. A message without headers has None, not `{}`, which costs nothing to carry.
The headers of one request are checked together (`checked`): decoding and encoding the headers of
each message is by far their largest cost in a broker.

A name consists of the characters of an HTTP header's name, so that routes can send headers as HTTP
headers. Case is preserved and significant. A value is any text.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

from penstock.errors import InvalidRequest

MAX_HEADERS = 64
MAX_BYTES = 8192  # of all names and values of a message together, in UTF-8
MAX_NAME_BYTES = 128

is_name = re.compile(rf"[A-Za-z0-9!#$%&'*+.^_`|~-]{{1,{MAX_NAME_BYTES}}}").fullmatch
_encode = msgspec.json.Encoder().encode
_names: set[str] = set()  # names that passed the check; a look-up is cheaper than another check
MAX_NAMES = 1000
_decode = msgspec.json.Decoder(dict[str, str]).decode
_decode_all = msgspec.json.Decoder(list[dict[str, str]]).decode


def encode(headers: Mapping[str, str]) -> bytes | None:
    """Check headers and return their JSON text, or None if there are none."""
    if not headers:
        return None
    # The JSON is longer than the names and values in it. If it is short enough, so are they.
    if (
        isinstance(headers, dict)
        and len(headers) <= MAX_HEADERS
        and _names.issuperset(headers)
        and {*map(type, headers.values())} == {str}
    ):
        try:
            text = _encode(headers)
        except UnicodeEncodeError:
            text = None
        if text is not None and len(text) <= MAX_BYTES:
            return text
    check(headers)
    if len(_names) > MAX_NAMES:
        _names.clear()
    _names.update(headers)
    return _encode(headers)


def checked(texts: Sequence[bytes]) -> list[bytes | None]:
    """Check JSON texts of headers and return what `encode` would return for each.

    A text that is already in that form is returned unchanged. Texts often repeat in a request (a
    tenant, the trace of one call), so each distinct text is decoded once.
    """
    different = [b"{}" if text == b"null" else text for text in dict.fromkeys(texts)]
    whole = b",".join(different)
    try:
        maps = _decode_all(b"[%b]" % whole)
    except msgspec.ValidationError:
        raise InvalidRequest("headers must be an object of strings") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"Invalid JSON: {error}") from None
    if (
        all(maps)
        and max(map(len, maps)) <= MAX_HEADERS
        and max(map(len, different)) <= MAX_BYTES
        and _names.issuperset(set().union(*maps))
        # four quotes per header: no name is repeated, and no quote is escaped
        and whole.count(b'"') == 4 * sum(map(len, maps))
        and b"\n" not in whole  # buffer files have one event per line
    ):
        return list(texts)
    encoded = {text: encode(headers) for text, headers in zip(different, maps, strict=True)}
    return [encoded.get(text) for text in texts]  # None for `null`


def check(headers: Mapping[str, str]) -> None:
    """Raise InvalidRequest if these are not valid headers. They may be any Python value."""
    if not isinstance(headers, Mapping):
        raise InvalidRequest(f"headers are a map of strings, not {str(headers)[:80]!r}")
    if len(headers) > MAX_HEADERS:
        raise InvalidRequest(f"a message has at most {MAX_HEADERS} headers, not {len(headers)}")
    size = 0
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidRequest(
                f"names and values of headers are strings, not {str({name: value})[:80]}"
            )
        if not is_name(name):
            raise InvalidRequest(
                f"header name {name[:80]!r} must have 1 to {MAX_NAME_BYTES} characters, each a "
                "letter, a digit or one of !#$%&'*+-.^_`|~"
            )
        if value.isascii():
            size += len(name) + len(value)
            continue
        try:
            size += len(name) + len(value.encode())
        except UnicodeEncodeError:
            raise InvalidRequest(f"the value of header '{name}' is not valid Unicode") from None
    if size > MAX_BYTES:
        raise InvalidRequest(
            f"the headers of a message have at most {MAX_BYTES} bytes, names and values together; "
            f"these have {size}"
        )


def decode(text: bytes) -> dict[str, str]:
    """Decode what `encode` returned."""
    return _decode(text)
