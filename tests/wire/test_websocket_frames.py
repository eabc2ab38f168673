"""WebSocket frames that break the protocol: the client hears of it, the log does not."""

import asyncio
import logging
from pathlib import Path

import pytest

from tests.support.served import serving
from tests.support.wait import eventually

UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
FRAMES = {
    "not masked": b"\x81\x05hello",
    "unknown opcode": b"\x83\x80abcd",
    "too large": b"\x81\xff" + (1 << 40).to_bytes(8, "big") + b"abcd",
    "a long ping": b"\x89\xfe\x00\x80abcd" + b"x" * 128,
    "half a close code": b"\x88\x81abcdx",
}


async def test_a_frame_that_breaks_the_protocol_is_counted_and_not_logged_as_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(tmp_path) as served:
        for count, frame in enumerate(FRAMES.values(), start=1):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.websocket.port)
            writer.write(UPGRADE)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(frame)
            assert (await reader.readexactly(1))[0] == 0x88, "a close frame"
            writer.close()
            name = "penstock_websocket_protocol_errors_total"
            await eventually(lambda name=name, count=count: said(served, name) == count)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def said(served, name: str) -> float:
    return served.metrics.samples()[name]
