"""gzip for large text answers, for clients that say they accept it; and bodies that come as gzip or
zstd.

A few kilobytes can unpack to gigabytes. So unpacking has a limit, and never more than that is in
memory.
"""

import zlib

from penstock.errors import InvalidRequest, TooLarge
from penstock.wire.http.messages import Response

CODINGS = {b"gzip": "gzip", b"x-gzip": "gzip", b"zstd": "zstd"}
_FIRST_SIZE = 256 << 10
_NO_ROOM = "failed to write whole buffer"  # how cramjam says that the output is too small

_TEXTS = ("application/json", "application/javascript", "application/openapi", "image/svg", "text/")
_LEVEL = 1  # on JSON: most of the gain for a fraction of the time of the usual 6


def is_compressible(response: Response) -> bool:
    return response.content_type.startswith(_TEXTS) and not any(
        name.lower() == "content-encoding" for name, _ in response.headers
    )


def gzip(data: bytes | memoryview, level: int = _LEVEL) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, 31)
    return packer.compress(data) + packer.flush()


def compressed(response: Response) -> Response:
    headers = (*response.headers, ("Content-Encoding", "gzip"), ("Vary", "Accept-Encoding"))
    return Response(response.status, gzip(response.body), response.content_type, headers)


def unpack(data: bytes, coding: str, limit: int) -> bytes:
    """Return a body without its Content-Encoding, if it has at most `limit` bytes then."""
    return _unpack_gzip(data, limit) if coding == "gzip" else _unpack_zstd(data, limit)


def _unpack_gzip(data: bytes, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while data:  # a file may have several members, one after the other
        unpacker = zlib.decompressobj(31)
        try:
            piece = unpacker.decompress(data, limit + 1 - size)
        except zlib.error as error:
            raise InvalidRequest(
                f"The body is not gzip as its Content-Encoding says: {error}"
            ) from None
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        if not unpacker.eof:
            raise InvalidRequest(
                "The body is not gzip as its Content-Encoding says: its end is missing"
            )
        pieces.append(piece)
        data = unpacker.unused_data
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _unpack_zstd(data: bytes, limit: int) -> bytes:
    import cramjam  # 2 MiB that most brokers do without

    size = min(limit, max(_FIRST_SIZE, 4 * len(data)))
    while True:
        unpacked = bytearray(size)
        try:
            length = cramjam.zstd.decompress_into(data, unpacked)
        except cramjam.DecompressionError as error:
            if _NO_ROOM not in str(error):
                raise InvalidRequest(
                    f"The body is not zstd as its Content-Encoding says: {error}"
                ) from None
            if size >= limit:
                raise _too_large(limit) from None
            size = min(limit, 8 * size)
        else:
            return bytes(memoryview(unpacked)[:length])


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The body is larger than the limit of {limit} bytes once it is unpacked")
