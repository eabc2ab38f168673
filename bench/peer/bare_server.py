"""The least that a server of PRODUCE does on this event loop, as a floor: it counts whole frames,
appends to three files, answers. No offsets, no checksums, no index, no limits, one connection.

    python -m bench.peer.bare_server DIRECTORY FSYNC FRAME_BYTES
"""

import asyncio
import os
import sys

import uvloop

ANSWER = b"\x81\x00" + bytes(12)
ROW = bytes(72)
INDEX = bytes(16)


class Bare(asyncio.Protocol):
    def __init__(self, directory: str, fsync: bool, frame: int) -> None:
        flags = os.O_CREAT | os.O_RDWR
        self._files = [os.open(f"{directory}/{name}", flags) for name in ("data", "rows", "index")]
        self._ends = [0, 0, 0]
        self._fsync = fsync
        self._frame = frame
        self._partial = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        data = self._partial + data
        count = len(data) // self._frame
        self._partial = data[count * self._frame :]
        if not count:
            return
        for i, piece in enumerate((data[: count * self._frame], ROW, INDEX * count)):
            os.pwrite(self._files[i], piece, self._ends[i])
            self._ends[i] += len(piece)
        if self._fsync:
            os.fdatasync(self._files[0])
        self._transport.write(ANSWER * count)


async def serve(directory: str, fsync: str, frame: str) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Bare(directory, fsync == "group", int(frame)), "127.0.0.1", 0
    )
    print(f'"tcp": {server.sockets[0].getsockname()[1]},', flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(*sys.argv[1:4]))
