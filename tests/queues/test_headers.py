"""Headers: a map of strings beside the payload, from the push to whoever gets the message."""

import json

import pytest

from penstock.errors import InvalidRequest
from penstock.protocol import headers
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Item, Queues
from penstock.queues.admin.dead_letters import Which
from penstock.queues.admin.messages import MessageFilter
from tests.queues.support import answer, pop, push, running

TENANT = headers.encode({"tenant": "a", "naïve".encode().hex(): "é\n\0"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"": "x"}, "header name ''"),
        ({"a b": "x"}, "header name 'a b'"),
        ({"n" * 129: "x"}, "1 to 128 characters"),
        ({f"h{n}": "" for n in range(65)}, "at most 64 headers, not 65"),
        ({"h": "é" * 4096}, "at most 8192 bytes, names and values together; these have 8193"),
        ({"h": "\ud800"}, "header 'h' is not valid Unicode"),
        ({"h": b"x"}, "headers are strings, not {'h': b'x'}"),
        ({"h": None}, "headers are strings"),
        ({1: "x"}, "headers are strings, not {1: 'x'}"),
        (["h"], "a map of strings"),
    ],
)
def test_headers_out_of_bounds_are_refused_with_what_is_wrong(
    given: dict[str, str], said: str
) -> None:
    for _ in range(2):  # the second time with names that are known
        with pytest.raises(InvalidRequest, match=said):
            headers.encode(given)
        headers.encode({"h": "x"})


def test_headers_up_to_the_bounds_are_read_back_as_given() -> None:
    given = {f"h{n:02}": "é" * 62 for n in range(64)}  # 127 bytes each
    given["h00"] += "x" * 64
    text = headers.encode(given)
    assert text is not None
    assert headers.decode(text) == given
    assert headers.encode({}) is None


ONE = b'{"a":"1"}'


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (ONE, ONE),
        (b'{"a": "\xc3\xa9", "b": ","}', b'{"a": "\xc3\xa9", "b": ","}'),
        (b'{"a":"1","a":"2"}', b'{"a":"2"}'),
        (b'{"a" : "1","a":"2"}', b'{"a":"2"}'),
        (b'{"a":\n"1"}', ONE),
        (b'{"a":"\\"","\\u0061":"2"}', b'{"a":"2"}'),
        (b"{}", None),
        (b"null", None),
        (b'{"a":"%b"}' % (b"\\u0041" * 2000), b'{"a":"%b"}' % (b"A" * 2000)),
    ],
)
def test_headers_of_a_request_are_kept_as_they_came_where_they_are_a_map_on_one_line(
    text: bytes, kept: bytes | None
) -> None:
    headers.encode({"a": "known", "b": "known"})
    assert headers.checked([text]) == [kept]
    assert headers.checked([ONE, text, ONE, text]) == [ONE, kept, ONE, kept]


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1}',
        b'{"a":null}',
        b'["a"]',
        b'"a"',
        b'{"":"x"}',
        b'{"a b":"x"}',
        b'{"a":"\\ud800"}',
        b'{"a":"\\q"}',
        b'{"a":"%b"}' % (b"x" * 8192),
        b"{%b}" % b",".join(b'"h%d":""' % n for n in range(65)),
    ],
)
def test_one_bad_header_refuses_the_request_it_is_in(text: bytes) -> None:
    with pytest.raises(InvalidRequest):
        headers.checked([ONE, text])


@pytest.mark.parametrize("encrypted", [False, True])
async def test_headers_come_out_with_their_message_and_nothing_with_the_others(
    database_url: str, encrypted: bool
) -> None:
    """Pop, dead letters, putting back, and a copy of a dead letter whose original is gone."""

    keys = {"encryption_key": "ab" * 32} if encrypted else {}
    async with running(database_url, **keys) as queues:
        await queues.admin.configure("q", QueueOptions(retry_limit=0, encryption_enabled=encrypted))
        await push(queues, "q", "plain")
        assert [m.headers for m in (await pop(queues, "q", group="early")).messages] == [None]
        pushed = await queues.push([Item("q", b'"with"', headers=TENANT)])
        popped = await pop(queues, "q")
        assert [m.headers for m in popped.messages] == [None, TENANT]
        stored = await queues.database.fetch("SELECT headers FROM messages ORDER BY seq")
        assert stored[0][0] is None
        assert (stored[1][0] == TENANT) is not encrypted
        await answer(queues, popped.messages, "failed", "bad")
        tenant = headers.decode(TENANT or b"")
        page = await queues.dead.listing(Which(queue="q"))
        assert [letter.headers for letter in page.messages] == [tenant, {}]
        listed = await queues.messages.listing(MessageFilter(queue="q"))
        assert [message.headers for message in listed.messages] == [tenant, {}]
        one = await queues.messages.detail(pushed[0].partition_id, pushed[0].transaction_id)
        assert one.headers == tenant
        await queues.dead.requeue(Which(queue="q"))
        again = (await pop(queues, "q")).messages
        assert [m.headers for m in again] == [None, TENANT]
        await answer(queues, again, "failed", "bad")
        await queues.admin.clear("q")
        await queues.dead.requeue(Which(queue="q"))
        copies = (await pop(queues, "q")).messages
        assert {json.loads(m.payload): m.headers for m in copies} == {"plain": None, "with": TENANT}


async def test_a_transaction_carries_headers(queues: Queues) -> None:
    done = await queues.transaction([Item("q", b"1"), Item("q", b"2", headers=TENANT)])
    assert done.success
    assert [m.headers for m in (await pop(queues, "q")).messages] == [None, TENANT]
