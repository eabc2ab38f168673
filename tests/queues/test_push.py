"""What a push stores, refuses and says."""

import asyncio
import json
import random
from collections.abc import Awaitable
from typing import Any

import pytest

from penstock.errors import InvalidRequest
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Item, ItemOutcome, PopRequest, Queues, engine
from tests.queues.support import complete, pop, push, running, values


async def test_a_transaction_id_is_stored_once_per_partition(queues: Queues) -> None:
    items = [
        Item("q", b"1", transaction_id="a"),
        Item("q", b"2", transaction_id="a"),
        Item("q", b"3", "p", "a"),
    ]
    first = await queues.push(items)
    assert [answer.status for answer in first] == ["queued", "duplicate", "queued"]
    assert first[1].message_id == first[0].message_id != first[2].message_id
    racing = await asyncio.gather(
        *(queues.push([Item("q", b"9", transaction_id="race")]) for _ in range(8))
    )
    assert sorted(pushed[0].status for pushed in racing) == ["duplicate"] * 7 + ["queued"]
    assert len({pushed[0].message_id for pushed in racing}) == 1
    again = await queues.push(items)
    assert [answer.status for answer in again] == ["duplicate"] * 3
    assert [answer.message_id for answer in again] == [answer.message_id for answer in first]
    assert values(await pop(queues, "q", partition="Default")) == [1, 9]


async def test_a_transaction_id_may_have_any_character_but_nul(queues: Queues) -> None:
    names = ['"', "\\", '\\"', "a,b", "{}", "{", "NULL", " ", "\n", "\x01", "ä€𝄞", "'", '","']
    pushed = await queues.push([Item("q", b"1", transaction_id=name) for name in names])
    assert [answer.status for answer in pushed] == ["queued"] * len(names)
    assert [one.transaction_id for one in (await pop(queues, "q")).messages] == names


async def test_max_size_refuses_what_does_not_fit_and_says_which(queues: Queues) -> None:
    await queues.admin.configure("q", QueueOptions(max_size=3))
    items = [Item("q", b"1") for _ in range(3)] + [Item("q", b"1", transaction_id="same")] * 2
    pushed = [(one.index, one.status) for one in await queues.push(items)]
    assert pushed == [*((n, "queued") for n in range(3)), (3, "full"), (4, "full")]
    await complete(queues, await pop(queues, "q", 2))
    racing = await asyncio.gather(*(queues.push([Item("q", b"2")]) for _ in range(10)))
    assert sorted(pushed[0].status for pushed in racing) == ["full"] * 8 + ["queued"] * 2


async def test_one_bad_request_fails_alone(queues: Queues) -> None:
    async def pushed(item: Item) -> list[ItemOutcome]:
        return await queues.push([item])

    good = [pushed(Item("q", str(n).encode())) for n in range(20)]
    bad: list[Awaitable[Any]] = [
        pushed(Item("q", b"1", trace_id="not a uuid")),
        pushed(Item("q", b"1", transaction_id="nul\x00")),
        pushed(Item("q", b"1", transaction_id="\ud800")),
        pushed(Item("", b"1")),
        pushed(Item("q", b"1", "p" * 5000)),
    ]
    mixed = await asyncio.gather(*good[:10], *bad, *good[10:], return_exceptions=True)
    assert sum(isinstance(result, InvalidRequest) for result in mixed) == 5
    assert sum(isinstance(result, list) for result in mixed) == 20
    assert len((await pop(queues, "q")).messages) == 20


async def test_payload_bytes_come_back_untouched(queues: Queues) -> None:
    payloads = [
        b"null",
        b"{}",
        b'{ "b":1,  "a":2, "a":3 }',
        b"1e400",
        '"ü\\u0000"'.encode(),
        b"[]",
    ]
    await queues.push([Item("q", payload) for payload in payloads])
    assert [message.payload for message in (await pop(queues, "q")).messages] == payloads


async def test_large_pushes_share_no_call_however_few_they_are(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is merged is one message to PostgreSQL, which takes a gigabyte at most."""
    monkeypatch.setattr(engine, "HEAVY_BYTES", 100)

    async with running(database_url, merge_max=10) as queues:
        await asyncio.gather(*(push(queues, "q", "x" * 398) for _ in range(12)))
        counted = await queues.database.fetch("SELECT count(*) FROM messages GROUP BY xmin::text")
        assert sum(row["count"] for row in counted) == 12
        assert max(row["count"] for row in counted) <= 2


async def test_names_that_cannot_be_indexed_are_refused_by_name(database_url: str) -> None:
    long = json.dumps([random.Random(1).random() for _ in range(300)])

    async with running(database_url) as queues:
        await push(queues, "q", 1)
        with pytest.raises(InvalidRequest, match="consumerGroup"):
            await queues.pop(PopRequest(queue="q", group=long))
        (message,) = (await pop(queues, "q")).messages
        with pytest.raises(InvalidRequest, match="trace name"):
            await queues.traces.add(
                message.partition_id, message.transaction_id, b"1", names=[long]
            )
        with pytest.raises(InvalidRequest, match="consumerGroup"):
            await queues.messages.move_to_dead_letters(
                message.partition_id, message.transaction_id, long
            )


async def test_the_payload_is_whole_json_after_everything(database_url: str) -> None:
    async with running(database_url) as queues:
        big = {"text": "x" * 300_000, "n": list(range(1000))}
        await push(queues, "q", big)
        (message,) = (await pop(queues, "q")).messages
        assert json.loads(message.payload) == big
