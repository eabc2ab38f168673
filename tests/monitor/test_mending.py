"""What an operator does to single messages keeps every byte of them."""

import json

import pytest

from penstock.errors import Conflict, NotFound
from penstock.monitor.mending import Mending
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Item
from penstock.queues.admin.dead_letters import Which
from tests.queues.support import answer, pop, running

EXACT = b'{"id": 9007199254740993, "total": 0.10000000000000000000001, "big": 1e400}'


async def kill(queues, payload: bytes, queue: str = "q") -> int:
    """Push a message and make it a dead letter; its number."""
    await queues.push([Item(queue, payload, headers=b'{"tenant": "t-7"}')])
    await answer(queues, (await pop(queues, queue, group="g")).messages, "dlq", "no such street")
    return (await queues.dead.listing(Which(queue=queue))).messages[0].number


async def test_a_copy_has_the_bytes_and_headers_of_the_message(database_url):
    async with running(database_url) as queues:
        await queues.push([Item("q", EXACT, "p", headers=b'{"tenant": "t-7"}')])
        [first] = (await pop(queues, "q", group="g")).messages
        mending = Mending(queues)
        stored = await queues.messages.detail(first.partition_id, first.transaction_id)
        assert stored.payload == EXACT
        copied = await mending.copy(first.partition_id, first.transaction_id, "ana")
        [second] = (await pop(queues, "q", group="other", partition="p", batch=9)).messages[1:]
        assert (second.payload, second.producer) == (EXACT, "ana")
        assert json.loads(second.headers or b"") == {"tenant": "t-7"}
        assert second.transaction_id == copied.transaction_id != first.transaction_id


async def test_an_edited_dead_letter_is_pushed_and_the_old_payload_is_kept(database_url):
    async with running(database_url) as queues:
        number = await kill(queues, EXACT)
        mending = Mending(queues)
        pushed = await mending.edit(number, b'{"id": 9007199254740995}', "ana")
        assert await queues.dead.count(Which()) == 0
        [message] = (await pop(queues, "q", group="g")).messages
        assert message.payload == b'{"id": 9007199254740995}'
        assert json.loads(message.headers or b"") == {"tenant": "t-7"}
        [trace] = await queues.traces.of_message(message.partition_id, pushed.transaction_id)
        assert EXACT in trace.data
        assert (trace.event_type, trace.worker) == ("edited", "ana")
        with pytest.raises(NotFound):
            await mending.edit(number, b"{}", "ana")


async def test_an_edit_that_was_cut_off_is_repeated_without_a_second_message(
    database_url, monkeypatch
):
    async with running(database_url) as queues:
        number = await kill(queues, EXACT)

        async def cut_off(_: Which) -> int:
            raise ConnectionError("killed")

        with monkeypatch.context() as killed:
            killed.setattr(queues.dead, "purge", cut_off)
            with pytest.raises(ConnectionError):
                await Mending(queues).edit(number, b"{}", None)
        assert await queues.dead.count(Which()) == 1, "the dead letter is still there"
        again = await Mending(queues).edit(number, b"{}", None)
        assert again.status == "duplicate"
        assert len((await pop(queues, "q", group="g")).messages) == 1
        assert await queues.dead.count(Which()) == 0


async def test_an_edit_that_does_not_fit_keeps_the_dead_letter(database_url):
    async with running(database_url) as queues:
        number = await kill(queues, b"1")
        await queues.admin.configure("q", QueueOptions(max_size=1))
        await queues.push([Item("q", b"2")])
        with pytest.raises(Conflict, match="full"):
            await Mending(queues).edit(number, b"3", None)
        assert await queues.dead.count(Which()) == 1


async def test_only_the_chosen_dead_letters_are_requeued_or_deleted(database_url):
    async with running(database_url) as queues:
        numbers = [await kill(queues, str(n).encode()) for n in range(5)]
        mending = Mending(queues)
        assert await mending.requeue([numbers[0], numbers[3], 10**9]) == 2
        assert await mending.purge([numbers[1]]) == 1
        left = (await queues.dead.listing(Which())).messages
        assert sorted(letter.number for letter in left) == sorted([numbers[2], numbers[4]])
        again = (await pop(queues, "q", group="g")).messages
        assert sorted(message.payload for message in again) == [b"0", b"3"]
