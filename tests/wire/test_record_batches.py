"""Keys, headers, timestamps and partitions over HTTP, server-sent events, WebSocket and TCP."""

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

from penstock.protocol import frames
from penstock.protocol.kafka_batch import decode_batch
from tests.support.http import Wire, connected, get, post
from tests.support.served import serving

NOW = 1_700_000_000_000


async def ask(wire: Wire, request: bytes) -> Any:
    reply = await wire.ask(request)
    return reply.status, json.loads(reply.body)


def produce(topic: str, query: str = "", **body: Any) -> bytes:
    return post(
        f"/topics/{topic}/produce{query}",
        json.dumps(body).encode(),
        "Content-Type: application/json",
    )


async def test_records_have_keys_headers_and_timestamps_over_http(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, connected(served.http) as wire:
        await ask(wire, post("/topics/t?format=kafka", b""))
        status, answer = await ask(
            wire,
            produce(
                "t",
                payload="hello",
                key="k",
                headers=[["a", "1"], ["a", None], ["b", {"base64": "/w=="}]],
                timestamp=NOW,
            ),
        )
        assert (status, answer) == (201, {"topic": "t", "offset": 0})
        records = [
            {"payload": None, "key": {"base64": "/w=="}, "timestamp": NOW + 1},
            {"payload": "/w==", "encoding": "base64", "timestamp": NOW + 2},
        ]
        assert await ask(wire, produce("t", records=records)) == (
            201,
            {"topic": "t", "first_offset": 1, "count": 2},
        )
        assert await ask(wire, get("/topics/t/consume")) == (
            200,
            [
                {
                    "offset": 0,
                    "topic": "t",
                    "payload": "hello",
                    "key": "k",
                    "headers": [["a", "1"], ["a", None], ["b", {"base64": "/w=="}]],
                    "timestamp": NOW,
                },
                {
                    "offset": 1,
                    "topic": "t",
                    "payload": None,
                    "key": {"base64": "/w=="},
                    "timestamp": NOW + 1,
                },
                {
                    "offset": 2,
                    "topic": "t",
                    "payload": "/w==",
                    "encoding": "base64",
                    "timestamp": NOW + 2,
                },
            ],
        )
        status, error = await ask(wire, produce("plain", payload="x", key="k"))
        assert status == 400
        assert "format 'aiq'" in error["error"]
        for body in ({}, {"payload": "x", "records": []}, {"records": []}):
            assert (await ask(wire, produce("t", **body)))[0] == 400


async def test_partitions_are_named_over_http(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, connected(served.http) as wire:
        await ask(wire, post("/topics/t?format=kafka&partitions=3", b""))
        assert await ask(wire, produce("t", "?partition=2", payload="x")) == (
            201,
            {"topic": "t", "offset": 0, "partition": 2},
        )
        assert (await ask(wire, produce("t", "?partition=3", payload="x")))[0] == 404
        assert (await ask(wire, get("/topics/t/consume")))[1] == []
        (found,) = (await ask(wire, get("/topics/t/consume?partition=2")))[1]
        assert (found["payload"], found["topic"]) == ("x", "t")
        assert (await ask(wire, get("/topics/t/next_offset?partition=2")))[1]["next_offset"] == 1
        assert (await ask(wire, get("/topics")))[1] == ["t"]
        assert (await ask(wire, post("/topics/u?partitions=2", b"")))[0] == 400


async def test_fetch_gives_batches_to_who_can_read_them_and_payloads_to_others(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as served, connected(served.http) as wire:
        await ask(wire, post("/topics/t?format=kafka", b""))
        await ask(wire, produce("t", payload="one", key="k", timestamp=NOW))
        await ask(wire, produce("t", payloads=["two", "three"]))
        body = struct.pack(">H", 1) + b"t" + frames.FETCH_REQUEST.pack(1, 1 << 20, 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.tcp.port)

        async def fetch(flags: int) -> tuple[tuple[int, ...], bytes]:
            request = body + bytes([flags])
            writer.write(frames.REQUEST.pack(frames.Command.FETCH, len(request)) + request)
            _, status, size = frames.ANSWER.unpack(await reader.readexactly(frames.ANSWER.size))
            answer = await reader.readexactly(size)
            assert status == 0
            fixed = frames.FETCH_ANSWER.unpack_from(answer)
            return fixed[1:], answer[frames.FETCH_ANSWER.size :]

        try:
            assert await fetch(frames.LENGTHS) == (
                (1, 3, 3, 2),
                struct.pack(">II", 3, 5)
                + struct.pack("<QI", 1, 3)
                + b"two"
                + struct.pack("<QI", 2, 5)
                + b"three",
            )
            numbers, raw = await fetch(frames.FORMAT)
            assert numbers == (1, 3, 3, 2)
            assert raw[0] == frames.RECORD_BATCHES
            assert [record.value for record in decode_batch(raw[1:])] == [b"two", b"three"]
        finally:
            writer.close()
