"""Many clients in a process of their own, so that a test measures the server alone and each side
has its file handles.

    python -m tests.support.idle_clients PORT COUNT HELLO_IN_HEX MARKER

Connects COUNT times and sends HELLO, prints "connected", reads until MARKER came on every
connection, prints "reached".
"""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process

import uvloop


async def start(port: int, count: int, hello: bytes, marker: str) -> Process:
    module = ("-m", "tests.support.idle_clients", str(port), str(count), hello.hex(), marker)
    return await asyncio.create_subprocess_exec(sys.executable, *module, stdout=PIPE)


async def said(process: Process, word: str) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(120):
        assert (await process.stdout.readline()).decode().strip() == word


async def main(port: int, count: int, hello: bytes, marker: bytes) -> None:
    connections = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(hello)
        connections.append((reader, writer))
    print("connected", flush=True)
    for reader, _ in connections:
        await reader.readuntil(marker)
    print("reached", flush=True)


if __name__ == "__main__":
    uvloop.run(
        main(int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3]), sys.argv[4].encode())
    )
