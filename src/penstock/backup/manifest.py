"""The list of what a backup holds, with the checksum of each file and of itself."""

import msgspec

from penstock.errors import InvalidRequest
from penstock.object_store import pack_document, parse_document

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
    tier: str = ""  # where older records of topics are that are not in the backup
    format: int = FORMAT

    def pack(self) -> bytes:
        return pack_document(self)

    @classmethod
    def parse(cls, data: bytes) -> "Manifest":
        manifest = parse_document(data, cls, NAME)
        if manifest.format != FORMAT:
            raise InvalidRequest(
                f"this backup has format {manifest.format}, made by Penstock {manifest.version}: "
                "restore it with that release"
            )
        return manifest
