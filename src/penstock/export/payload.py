"""Encode and compress the records of a batch as the body of a block.

The encoding is that of the destination, so a batch is encoded and compressed only once.

    0 frames   each record as 4-byte little-endian length and bytes: any bytes
    1 ndjson   one JSON value per line
    2 json     one JSON array
    3 raw      the body is one record of any bytes

In a JSON body, a record that is not JSON becomes a string if it is UTF-8, else
{"$base64": "..."}.
"""

import base64
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import msgspec

FRAMES, NDJSON, JSON, RAW = range(4)
ENCODINGS = {"frames": FRAMES, "ndjson": NDJSON, "json": JSON, "raw": RAW}
NONE, SNAPPY, ZSTD, GZIP = range(4)
COMPRESSIONS = {"none": NONE, "snappy": SNAPPY, "zstd": ZSTD, "gzip": GZIP}
AS_IS = (bytes, bytes)  # for an unknown compression
CONTENT_ENCODINGS = {SNAPPY: "snappy", ZSTD: "zstd", GZIP: "gzip"}

_LENGTH = struct.Struct("<I")
_raw_list = msgspec.json.Decoder(list[msgspec.Raw])
_raw_one = msgspec.json.Decoder(msgspec.Raw)


def join(records: Sequence[bytes], encoding: int) -> bytes:
    if encoding == FRAMES:
        parts = []
        for record in records:
            parts.append(_LENGTH.pack(len(record)))
            parts.append(record)
        return b"".join(parts)
    if encoding == RAW:
        if len(records) != 1:
            raise ValueError("a raw body is exactly one record")
        return records[0]
    if encoding == JSON:
        body = b"[" + b",".join(records) + b"]"
        if _contains_exactly(body, records, _raw_list.decode):
            return body
        return b"[" + b",".join(as_json(record) for record in records) + b"]"
    body = b"\n".join([*records, b""])
    if body.count(b"\n") == len(records) and _contains_exactly(
        body, records, _raw_one.decode_lines
    ):
        return body
    lines = [
        msgspec.json.format(record, indent=-1) if b"\n" in record else record
        for record in map(as_json, records)
    ]
    return b"\n".join([*lines, b""])


def split(body: bytes, encoding: int) -> list[bytes]:
    if encoding == RAW:
        return [body]
    if encoding == NDJSON:
        return body.split(b"\n")[:-1]
    if encoding == JSON:
        return [bytes(record) for record in _raw_list.decode(body)]
    records, at = [], 0
    while at < len(body):
        (length,) = _LENGTH.unpack_from(body, at)
        records.append(body[at + 4 : at + 4 + length])
        at += 4 + length
    return records


def as_json(record: bytes) -> bytes:
    """Return `record` if it is JSON, else JSON that contains it."""
    try:
        text = record.decode()
    except UnicodeDecodeError:  # the decoder does not check strings
        return msgspec.json.encode({"$base64": base64.b64encode(record).decode()})
    try:
        return bytes(_raw_one.decode(record))
    except msgspec.DecodeError:
        return msgspec.json.encode(text)


def _contains_exactly(
    body: bytes, records: Sequence[bytes], decode: Callable[[bytes], list[msgspec.Raw]]
) -> bool:
    """Return whether the body is valid and its values are exactly the records. (A record `1,2`
    would become two values.)

    Comparing lengths is sufficient: if each value is as long as its record, there is no room for
    anything else.
    """
    try:
        if not body.isascii():
            body.decode()  # the decoder does not check strings
        return list(map(len, decode(body))) == list(map(len, records))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


@cache
def _codecs() -> dict[int, tuple[Callable[[bytes], Any], Callable[[bytes], Any]]]:
    import cramjam  # imported here, since it needs 2 MiB and most brokers do not use it

    return {
        SNAPPY: (cramjam.snappy.compress_raw, cramjam.snappy.decompress_raw),
        ZSTD: (partial(cramjam.zstd.compress, level=3), cramjam.zstd.decompress),
        GZIP: (partial(cramjam.gzip.compress, level=6), cramjam.gzip.decompress),
    }


def compress(data: bytes, compression: int) -> bytes:
    return data if compression == NONE else bytes(_codecs().get(compression, AS_IS)[0](data))


def decompress(data: bytes, compression: int) -> bytes:
    return data if compression == NONE else bytes(_codecs().get(compression, AS_IS)[1](data))
