"""Requests that share a call: what each of them gets, whatever becomes of the others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from penstock.errors import ConnectionLost, InvalidRequest, PenstockError, Unavailable
from penstock.queues.merge import Merger, Pending, completed
from penstock.queues.retry import MAX_ATTEMPTS

Run = Callable[[list[int], bool], Awaitable[list[str | PenstockError]]]


def merger(run: Run, **more: Any) -> Merger[int, str]:
    return Merger(run, size=lambda _: 1, limit=100, slots=1, **more)


async def test_a_refused_batch_is_halved_until_the_culprit_is_alone() -> None:
    calls: list[list[int]] = []

    async def call(requests: list[int], again: bool) -> list[str | PenstockError]:
        assert not again
        calls.append(requests)
        if 5 in requests:
            raise asyncpg.DataError("no good")
        return [str(request) for request in requests]

    merging = merger(call)
    pending = [merging.submit(Pending(n)) for n in range(8)]
    outcomes = await asyncio.gather(*pending, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [str] * 5 + [InvalidRequest] + [str] * 2
    assert [requests for requests in calls if 5 not in requests] == [[0, 1, 2, 3], [4], [6, 7]]


async def test_a_lost_connection_is_tried_again_and_a_database_that_is_down_is_not() -> None:
    attempts: list[bool] = []
    error: PenstockError = ConnectionLost("lost")

    async def call(requests: list[int], again: bool) -> list[str | PenstockError]:
        attempts.append(again)
        raise error

    merging = merger(call)
    with pytest.raises(ConnectionLost):
        await merging.submit(Pending(1))
    assert attempts == [False] + [True] * (MAX_ATTEMPTS - 1)
    attempts.clear()
    error = Unavailable("the database is down")
    with pytest.raises(Unavailable):
        await merging.submit(Pending(1))
    assert attempts == [False]


async def test_an_answer_that_cannot_be_made_fails_its_own_request_only() -> None:
    async def call(requests: list[int], again: bool) -> list[str | PenstockError]:
        return [str(request) for request in requests]

    merging = merger(call)
    bad, good = (
        merging.submit(Pending(0)).then(lambda _: 1 // 0),
        merging.submit(Pending(1)).then(len),
    )
    assert await good == 1
    with pytest.raises(ZeroDivisionError):
        await bad
    assert await completed(2, ["a"]).then(len) == 1


async def test_what_is_cancelled_before_it_is_sent_is_not_and_whoever_intercepts_it_hears_of_it() -> (
    None
):
    sent: list[int] = []
    seen: list[Any] = []

    async def call(requests: list[int], again: bool) -> list[str | PenstockError]:
        sent.extend(requests)
        return [str(request) for request in requests]

    merging = merger(call)
    gone, stays = merging.submit(Pending(0)), merging.submit(Pending(1))
    gone.intercept = lambda pending, outcome: bool(seen.append((pending.request, outcome)))
    gone.cancel()
    assert await stays == "1"
    assert sent == [1]
    [(request, outcome)] = seen
    assert request == 0
    assert isinstance(outcome, Unavailable)


async def test_what_nobody_waits_for_any_more_goes_to_the_orphans() -> None:
    orphans: list[str] = []
    under_way = asyncio.Event()
    answered = asyncio.Event()

    async def call(requests: list[int], again: bool) -> list[str | PenstockError]:
        under_way.set()
        await answered.wait()
        return [str(request) for request in requests]

    merging = merger(call, orphan=orphans.append)
    pending = merging.submit(Pending(7))
    await under_way.wait()
    pending.cancel()
    answered.set()
    await merging.drain()
    await asyncio.sleep(0)  # completing comes after the next call is on its way
    assert orphans == ["7"]
