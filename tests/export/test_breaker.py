"""When a route holds back: the circuit breaker and the backoff."""

import asyncio
from dataclasses import replace

from penstock.config.schema import BackoffSettings as Settings
from penstock.config.schema import CircuitBreaker, SendQueueSettings
from penstock.export.health import Breaker, RouteBackoff
from tests.export.making import FakeClock
from tests.support.wait import eventually


async def test_the_breaker_opens_probes_once_and_wakes_everybody_when_it_closes():
    clock = FakeClock()
    breaker = Breaker("r", CircuitBreaker(threshold=3, reset_timeout=30.0), clock)
    for _ in range(3):
        breaker.failed(await breaker.admit())
    assert breaker.state == "open"
    waiting = [asyncio.ensure_future(breaker.admit()) for _ in range(5)]
    await asyncio.sleep(0)
    await clock.advance(29)
    assert not any(each.done() for each in waiting)
    await clock.advance(2)
    [probe] = [each.result() for each in waiting if each.done()]
    assert breaker.state == "half_open"
    breaker.failed(probe)
    await clock.advance(29)
    assert sum(each.done() for each in waiting) == 1
    await clock.advance(2)
    probe = next(each.result() for each in waiting if each.done() and each.result() is not probe)
    breaker.release(probe)  # its holder died without a word: the slot must come back
    # another worker has the probe slot now
    await eventually(lambda: sum(each.done() for each in waiting) == 3)
    permits = [each.result() for each in waiting if each.done()]
    for permit in permits:
        breaker.succeeded(permit)
    await asyncio.gather(*waiting)
    assert breaker.state == "closed"


async def test_a_success_in_between_starts_the_count_again():
    breaker = Breaker("r", CircuitBreaker(threshold=2), FakeClock())
    for _ in range(5):
        breaker.failed(await breaker.admit())
        breaker.succeeded(await breaker.admit())
    assert breaker.state == "closed"
    disabled = Breaker("r", CircuitBreaker(enabled=False, threshold=1), FakeClock())
    disabled.failed(await disabled.admit())
    assert disabled.state == "closed"


def test_backoff_grows_with_full_jitter_up_to_its_cap_and_honours_retry_after():
    clock = FakeClock()
    on = SendQueueSettings(
        retry_interval=5.0, max_retry_delay=60.0, backoff=Settings(multiplier=2.0)
    )
    most = RouteBackoff(on, clock, lambda: 1.0)
    assert [most.failed() for _ in range(6)] == [5, 10, 20, 40, 60, 60]
    half = RouteBackoff(on, clock, lambda: 0.5)
    assert [half.failed() for _ in range(3)] == [2.5, 5, 10]
    half.succeeded()
    assert half.failed() == 2.5
    assert half.failed(retry_after=120) == 120
    assert half.remaining == 120
    half.reset()
    assert half.remaining == 0
    off = replace(on, backoff=Settings(enabled=False))
    plain = RouteBackoff(off, clock, lambda: 0.1)
    assert [plain.failed() for _ in range(3)] == [5, 5, 5]
