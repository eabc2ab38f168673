"""Requests that share a call: what each of them gets, whatever becomes of the others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from penstock.database.batching import Batcher
from penstock.database.retry import ATTEMPTS
from penstock.errors import ConnectionLost, InvalidRequest, PenstockError, Unavailable

Call = Callable[[list[int], bool], Awaitable[list[str | PenstockError]]]


def batcher(call: Call, **more: Any) -> Batcher[int, str]:
    return Batcher(call, limit=100, slots=1, **more)


async def test_a_refused_batch_is_halved_until_the_culprit_is_alone() -> None:
    calls: list[list[int]] = []

    async def call(requests: list[int], again: bool) -> list[str | PenstockError]:
        assert not again
        calls.append(requests)
        if 5 in requests:
            raise asyncpg.DataError("no good")
        return [str(request) for request in requests]

    batching = batcher(call)
    outcomes = await asyncio.gather(*(batching.submit(n) for n in range(8)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [str] * 5 + [InvalidRequest] + [str] * 2
    assert [requests for requests in calls if 5 not in requests] == [[0, 1, 2, 3], [4], [6, 7]]


async def test_a_lost_connection_is_tried_again_and_a_database_that_is_down_is_not() -> None:
    attempts: list[bool] = []
    error: PenstockError = ConnectionLost("lost")

    async def call(requests: list[int], again: bool) -> list[str | PenstockError]:
        attempts.append(again)
        raise error

    batching = batcher(call)
    with pytest.raises(ConnectionLost):
        await batching.submit(1)
    assert attempts == [False] + [True] * (ATTEMPTS - 1)
    attempts.clear()
    error = Unavailable("the database is down")
    with pytest.raises(Unavailable):
        await batching.submit(1)
    assert attempts == [False]


async def test_a_fault_in_a_call_fails_its_requests_and_the_next_call_is_made() -> None:
    async def call(requests: list[int], again: bool) -> list[str | PenstockError]:
        return [str(6 // request) for request in requests]

    batching = batcher(call)
    with pytest.raises(Unavailable):
        await batching.submit(0)
    assert await batching.submit(2) == "3"


async def test_what_is_cancelled_before_it_is_sent_is_not_sent() -> None:
    sent: list[int] = []

    async def call(requests: list[int], again: bool) -> list[str | PenstockError]:
        sent.extend(requests)
        return [str(request) for request in requests]

    batching = batcher(call)
    gone, stays = batching.submit(0), batching.submit(1)
    gone.cancel()
    assert await stays == "1"
    assert sent == [1]


async def test_a_result_whose_request_was_cancelled_meanwhile_is_given_back() -> None:
    returned: list[str] = []
    under_way = asyncio.Event()
    answered = asyncio.Event()

    async def call(requests: list[int], again: bool) -> list[str | PenstockError]:
        under_way.set()
        await answered.wait()
        return [str(request) for request in requests]

    batching = batcher(call, give_back=returned.append)
    future = batching.submit(7)
    await under_way.wait()
    future.cancel()
    answered.set()
    await batching.drain()
    assert returned == ["7"]


async def test_a_request_made_in_the_turn_in_which_a_call_ends_is_sent() -> None:
    async def call(requests: list[int], again: bool) -> list[str | PenstockError]:
        return [str(request) for request in requests]

    batching = batcher(call)
    for n in range(10):
        assert await batching.submit(n) == str(n)
