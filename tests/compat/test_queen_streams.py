"""The streams of the published client `queen-mq` 0.15.0, unchanged, against a real broker process."""

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from queen import Queen
from queen.streams import Stream

from tests.support.wait import eventually

pytestmark = pytest.mark.xdist_group("compat")


@pytest.fixture
def name() -> str:
    return f"s-{uuid.uuid4().hex[:12]}"


async def collected(
    queen: Queen, queue: str, enough: Callable[[list[Any]], bool]
) -> list[dict[str, Any]]:
    """Pop and acknowledge until it is enough."""
    found: list[dict[str, Any]] = []

    async def more() -> bool:
        popped = await queen.queue(queue).group("check").batch(100).wait(False).pop()
        if popped:
            found.extend(popped)
            await queen.ack(popped, True, {"group": "check"})
        return enough(found)

    await eventually(more, 60)
    return found


async def push(queen: Queen, queue: str, partition: str, *values: Any) -> None:
    await queen.queue(queue).partition(partition).push([{"data": value} for value in values])


async def test_what_a_stream_maps_reaches_the_sink_once(broker, queen, name):
    source, sink = queen.queue(f"{name}-in"), queen.queue(f"{name}-out")
    for partition in "abc":
        await push(queen, f"{name}-in", partition, *({"n": n} for n in range(20)))
    handle = await (
        Stream.from_(source)
        .filter(lambda message: message["data"]["n"] % 2 == 0)
        .map(lambda message: {"half": message["data"]["n"] // 2})
        .to(sink)
        .run(query_id=name, url=broker.url, batch_size=7)
    )
    try:
        found = await collected(queen, f"{name}-out", lambda found: len(found) >= 30)
        await eventually(lambda: handle.metrics()["messagesTotal"] == 60, 60)
    finally:
        await handle.stop()
    assert sorted(one["data"]["half"] for one in found) == sorted([*range(10)] * 3)
    assert handle.metrics()["errorsTotal"] == 0


async def test_a_window_counts_each_message_once_through_a_restart(broker, queen, name):
    """Event time: what closes a window is a later message, and not the clock of the test."""

    def stream() -> Any:
        return (
            Stream.from_(queen.queue(f"{name}-in"))
            .window_tumbling(seconds=10, event_time=lambda message: message["data"]["at"])
            .aggregate({"count": lambda m: 1, "sum": lambda m: m["v"]})
            .to(queen.queue(f"{name}-out"))
        )

    async def handled(messages: int, **options: Any) -> None:
        handle = await stream().run(query_id=name, url=broker.url, **options)
        try:
            await eventually(lambda: handle.metrics()["messagesTotal"] == messages, 60)
        finally:
            await handle.stop()
        assert handle.metrics()["errorsTotal"] == 0

    base = 1_800_000_000_000
    await push(queen, f"{name}-in", "p", *({"at": base + n * 1000, "v": n} for n in range(5)))
    await handled(5)
    await push(queen, f"{name}-in", "p", *({"at": base + n * 1000, "v": n} for n in range(5, 11)))
    await handled(6)
    [window] = await collected(queen, f"{name}-out", lambda found: len(found) >= 1)
    assert (window["data"]["count"], window["data"]["sum"]) == (10, 45)


async def test_what_a_gate_refuses_comes_again_in_order(broker, queen, name):
    await queen.queue(f"{name}-in").config({"leaseTime": 1, "retryLimit": 1}).create()
    await push(queen, f"{name}-in", "p", *({"n": n} for n in range(6)))
    asked: list[int] = []

    def allow(message: Any, context: Any) -> bool:
        """Two messages per lease, so that the rest needs several."""
        asked.append(message["n"])
        return asked.count(message["n"]) > message["n"] // 2

    handle = await (
        Stream.from_(queen.queue(f"{name}-in"))
        .map(lambda message: message["data"])
        .gate(allow)
        .to(queen.queue(f"{name}-out"))
        .run(query_id=name, url=broker.url)
    )
    try:
        found = await collected(queen, f"{name}-out", lambda found: len(found) >= 6)
    finally:
        await handle.stop()
    assert [one["data"]["n"] for one in found] == list(range(6))
    assert asked.count(5) == 3  # refused twice, and not a dead letter though the limit is 1


async def test_a_changed_stream_needs_a_reset(broker, queen, name):
    source, sink = queen.queue(f"{name}-in"), queen.queue(f"{name}-out")
    await source.create()
    plain = Stream.from_(source).map(lambda message: message["data"])
    await (await plain.to(sink).run(query_id=name, url=broker.url)).stop()
    changed = plain.filter(lambda value: True).to(sink)
    with pytest.raises(Exception, match="config_hash mismatch"):
        await changed.run(query_id=name, url=broker.url)
    async with asyncio.timeout(60):
        await (await changed.run(query_id=name, url=broker.url, reset=True)).stop()
