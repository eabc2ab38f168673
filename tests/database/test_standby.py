"""A standby that does not answer."""

import asyncio

import pytest

from penstock.config.schema import DatabaseSettings
from penstock.database.standby import Standby


async def test_the_log_says_why_a_standby_that_hangs_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        settings = DatabaseSettings(
            read_url=f"postgresql://me@127.0.0.1:{port}/app?sslmode=disable", acquire_timeout=0.1
        )
        standby = Standby(settings, "penstock", lambda: None)
        assert await standby.read("SELECT 1") is None
        standby.stop()
    assert "cannot be used, the primary is read instead: TimeoutError" in caplog.text
