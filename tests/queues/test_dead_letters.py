"""Dead letters: listed, put back, purged."""

import pytest

from penstock.errors import Conflict
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Item, Queues
from penstock.queues.admin import dead_letters
from penstock.queues.admin.dead_letters import Which
from tests.queues.support import answer, complete, pop, push, running, values


async def test_dead_letters_are_listed_put_back_and_purged(queues: Queues) -> None:
    await queues.admin.configure("q", QueueOptions(retry_limit=0))
    await push(queues, "q", *range(6))
    for group in ("a", "b"):
        await answer(queues, (await pop(queues, "q", group=group)).messages, "failed", "bad")
    page = await queues.dead.listing(Which(queue="q", group="a"), limit=2, offset=1)
    assert (page.total, [letter.data for letter in page.messages]) == (6, [b"4", b"3"])
    one = page.messages[0].number
    assert await queues.dead.requeue(Which(id=one)) == 1
    assert values(await pop(queues, "q", group="a")) == [4]
    assert (await pop(queues, "q", group="b")).messages == []
    assert await queues.dead.purge(Which(group="a")) == 5
    await queues.admin.clear("q")
    assert (
        await queues.dead.requeue(Which(queue="q")) == 6
    )  # the originals are gone: copies are appended
    assert values(await pop(queues, "q", group="b")) == list(range(6))
    assert (await queues.dead.listing(Which())).total == 0


async def test_a_dead_letter_that_cannot_be_put_back_stays_one(queues: Queues) -> None:
    await queues.admin.configure("q", QueueOptions(retry_limit=0, max_size=3))
    await push(queues, "q", 1, 2)
    await answer(queues, (await pop(queues, "q")).messages, "failed")
    await push(queues, "q", 3)
    await answer(queues, (await pop(queues, "q", 1)).messages, "failed")
    await queues.admin.clear("q")  # the originals are gone: putting back stores copies
    await push(queues, "q", "a", "b")
    assert await queues.dead.requeue(Which(queue="q")) == 1  # there was room for one
    page = await queues.dead.listing(Which(queue="q"))
    assert page.total == 2
    with pytest.raises(Conflict):
        await queues.dead.requeue(Which(id=page.messages[0].number))
    await complete(queues, await pop(queues, "q"))
    assert await queues.dead.requeue(Which(queue="q")) == 2
    assert sorted(values(await pop(queues, "q"))) == [2, 3]

    await push(queues, "other", "for a group that goes")
    await answer(queues, (await pop(queues, "other", group="g")).messages, "dlq")
    await queues.groups.delete("g")
    assert await queues.dead.requeue(Which(queue="other")) == 0
    assert (await queues.dead.listing(Which(queue="other"))).total == 1


async def test_two_dead_letters_of_one_transaction_id_become_one_message(queues: Queues) -> None:
    await queues.admin.configure("q", QueueOptions(retry_limit=0))
    for _ in range(2):
        await queues.push([Item("q", b"1", transaction_id="t")])
        await answer(queues, (await pop(queues, "q")).messages, "failed")
        await queues.admin.clear("q")
    assert await queues.dead.requeue(Which(queue="q")) == 2
    assert [m.transaction_id for m in (await pop(queues, "q")).messages] == ["t"]


async def test_a_page_of_dead_letters_holds_so_many_bytes_and_says_what_it_left_out(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "MAX_PAGE_BYTES", 1000)

    async with running(database_url) as queues:
        await push(queues, "q", *("x" * 600 for _ in range(4)))
        await answer(queues, (await pop(queues, "q")).messages, "dlq")
        page = await queues.dead.listing(Which(queue="q"))
        sizes = [letter.data and len(letter.data) for letter in page.messages]
        assert sizes == [602, 602, None, None]
