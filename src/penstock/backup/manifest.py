"""The list of what a backup holds, with the checksum of each file and of itself."""

import msgspec
from crc32c import crc32c

from penstock.errors import Damaged, InvalidRequest

NAME = "manifest.json"
FORMAT = 1


class File(msgspec.Struct, frozen=True):
    size: int
    crc32c: int


class Manifest(msgspec.Struct):
    version: str  # of Penstock
    began_at: str
    ended_at: str = ""
    database_schema: str = ""  # empty: no queues in it
    topics: dict[str, int] = {}  # name -> next offset
    files: dict[str, File] = {}
    format: int = FORMAT

    def pack(self) -> bytes:
        body = msgspec.json.encode(self)
        return body + b"\n%08x\n" % crc32c(body)

    @classmethod
    def parse(cls, data: bytes) -> "Manifest":
        body, _, check = data.rstrip(b"\n").rpartition(b"\n")
        if b"%08x" % crc32c(body) != check:
            raise Damaged(f"{NAME} does not match its checksum")
        try:
            manifest = msgspec.json.decode(body, type=cls)
        except msgspec.ValidationError as error:
            raise Damaged(f"{NAME} is not one of this format: {error}") from None
        if manifest.format != FORMAT:
            raise InvalidRequest(
                f"this backup has format {manifest.format}, made by Penstock {manifest.version}: "
                "restore it with that release"
            )
        return manifest
