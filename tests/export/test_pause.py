"""A route that its destination denied: it pauses, probes, and resumes by itself."""

from pathlib import Path

import pytest

from tests.export.making import FakeClock, exports, http_route, status_of
from tests.export.scripted import ScriptedDestination, record
from tests.support.wait import eventually


async def test_a_denied_route_probes_ever_more_rarely_and_resumes_by_itself(tmp_path: Path):
    clock, answer = FakeClock(), 404
    async with ScriptedDestination(lambda ids, number: answer) as destination:
        spec = http_route(
            destination.url,
            circuit_breaker={"reset_timeout": "30s"},
            max_retry_delay="2m",
            meta_sync_interval="1h",
            workers=3,
        )
        async with exports(tmp_path, {"r": spec}, clock=clock) as running:
            route = running.get("r")
            await route.push([record(1)])
            await eventually(lambda: route.paused)
            await route.push([record(2)])
            for passed, requests in (
                (29, 1),
                (2, 2),
                (58, 2),
                (2, 3),
                (118, 3),
                (2, 4),
                (118, 4),
                (2, 5),
            ):
                await clock.advance(passed)
                await eventually(lambda requests=requests: destination.requests == requests)
                await eventually(lambda: route.delivery.inflight == 0)
                assert "404" in route.paused
            assert 0 < status_of(route)["triesAgainSeconds"] <= 120
            assert route.queue.books.attempts == {}, "it says nothing about the batch"
        async with exports(tmp_path, {"r": spec}, clock=clock) as running:  # over a restart too
            route = running.get("r")
            assert "404" in route.paused
            answer = 200
            await clock.advance(31)
            await eventually(lambda: route.paused is None)
            await eventually(lambda: destination.ids == [1, 2])
            await route.pause()
            await route.push([record(3)])
            await clock.advance(3600)
            assert destination.ids == [1, 2], "what a person paused stays paused"
        async with exports(tmp_path, {"r": spec}, clock=clock) as running:
            await clock.advance(3600)
            assert running.get("r").paused == "by hand"
            assert destination.ids == [1, 2]


@pytest.mark.parametrize("waiting", [1, 100])
async def test_a_denied_route_with_split_workers_probes_too(tmp_path: Path, waiting: int):
    answer = 401
    async with ScriptedDestination(lambda ids, number: answer) as destination:
        split = {"enabled": True, "preparer_count": 2, "sender_count": 2, "channel_size": 2}
        spec = http_route(
            destination.url,
            pipeline_split=split,
            circuit_breaker={"reset_timeout": "20ms"},
            batch={"records": 1},
            max_concurrent_sends=1,
        )
        async with exports(tmp_path, {"r": spec}) as running:
            route = running.get("r")
            await route.push([record(number) for number in range(waiting)])
            await eventually(lambda: route.paused and destination.requests > 4)
            assert destination.ids == []
            answer = 200
            await eventually(lambda: sorted(destination.ids) == list(range(waiting)))
            await eventually(lambda: route.paused is None)
