"""Attempts: how often a message is tried, what the handler knows of it, and what is left of it."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import Client, Message, Retry, SyncClient, backoff
from penstock.errors import InvalidRequest
from penstock.net.addresses import resource
from tests.client.support import consume_until
from tests.support.wait import eventually


async def test_the_broker_counts_the_attempts_of_a_backoff_and_the_dead_letter_says_how_many(
    broker, queue
):
    async with Client(broker.url) as client, Client(broker.url) as other:
        await client.push(queue, "bad")
        seen: list[tuple[int, int]] = []

        def attempt(message: Message) -> None:
            seen.append((message.attempt, message.max_attempts))
            raise ValueError("not yet")

        client.consumer(f"{queue}@g", retry=backoff(5, first=0.02))(attempt)
        await consume_until(client, lambda: len(seen) >= 2)
        # Another process goes on where the first one stopped.
        other.consumer(f"{queue}@g", retry=backoff(5, first=0.02))(attempt)

        async def dead() -> bool:
            return (await other.admin.dead_letters(queue)).total == 1

        await consume_until(other, dead)
        assert seen == [(n, 5) for n in range(1, 6)]
        ((letter,),) = [(await other.admin.dead_letters(queue)).messages]
        assert letter.attempts == 5
        assert letter.error is not None
        assert letter.error.startswith("ValueError: not yet\n\nTraceback")


async def test_exceptions_that_another_attempt_cannot_mend_are_not_retried(broker, queue):
    async with Client(broker.url) as client:
        errors = {"time": TimeoutError, "value": ValueError, "key": KeyError}
        calls: list[str] = []

        @client.consumer(
            f"{queue}@g",
            concurrency=3,
            retry=backoff(
                3, first=0, retry_on=(TimeoutError, LookupError), dead_letter_on=(KeyError,)
            ),
        )
        async def handle(kind: str) -> None:
            calls.append(kind)
            raise errors[kind]("no")

        await client.push_many(queue, errors)

        async def dead() -> bool:
            return (await client.admin.dead_letters(queue)).total == 3

        await consume_until(client, dead)
        assert {kind: calls.count(kind) for kind in errors} == {"time": 3, "value": 1, "key": 1}


async def test_a_handler_that_calls_sys_exit_has_failed_and_the_consumer_goes_on(
    broker, queue, caplog
):
    async with Client(broker.url) as client:
        await client.push_many(queue, ["bad", "fine"])
        await client.push_many(f"{queue}-plain", ["bad", "fine"])
        done: list[str] = []

        @client.consumer(f"{queue}@g", retry=backoff(2, first=0))
        async def handle(word: str) -> None:
            if word == "bad":
                sys.exit("no such file")
            done.append(word)

        @client.consumer(f"{queue}-plain@g", retry=backoff(2, first=0))
        def plain(word: str) -> None:
            if word == "bad":
                sys.exit("no such file")
            done.append(word)

        def finished() -> bool:
            return len(done) == 2 and handle.failed == plain.failed == 2

        await consume_until(client, finished)
        for name in (queue, f"{queue}-plain"):
            ((letter,),) = [(await client.admin.dead_letters(name)).messages]
            assert letter.error is not None
            assert letter.error.startswith("SystemExit: no such file\n\nTraceback")
            assert letter.attempts == 2
    lines = [r.getMessage() for r in caplog.records if "SystemExit: no such file" in r.getMessage()]
    assert len(lines) == 4, "each failure in one line"


def test_the_delay_grows_up_to_the_longest_and_jitter_shortens_it():
    policy = backoff(first=1, factor=3, longest=5, jitter=False)
    assert [policy.delay(attempt) for attempt in (1, 2, 3)] == [1, 3, 5]
    random = {backoff(first=1).delay(1) for _ in range(50)}
    assert len(random) > 40
    assert all(0.5 <= delay <= 1 for delay in random)


async def test_a_retry_waits_in_the_broker_for_its_delay_and_keeps_its_reason(broker, queue):
    async with Client(broker.url) as client:
        await client.push(queue, 1)
        async with Client(broker.url) as other:
            (message,) = await other.pop(f"{queue}@g")
            began = time.monotonic()
            await message.retry("the shop is closed", delay=1)
        assert await client.pop(f"{queue}@g") == [], "it waits although its client has closed"
        (message,) = await client.pop(f"{queue}@g", wait=10)
        assert time.monotonic() - began >= 1
        assert (message.attempt, message.first_pushed_at) == (1, message.created_at)
        with pytest.raises(InvalidRequest, match="delay"):
            await message.retry(delay=1e10)
        with pytest.raises(InvalidRequest, match="delay"):
            await client.ack(message, "completed", delay=5)
        await client.ack(message, "failed", error="still closed", delay=0.2, group="g")
        (message,) = await client.pop(f"{queue}@g", wait=10)
        assert (message.attempt, message.max_attempts) == (2, 4)
        assert message.headers == {"penstock-attempt": "2"}
        await message.dead_letter("enough")
        ((letter,),) = [(await client.admin.dead_letters(queue)).messages]
        assert (letter.attempts, letter.error) == (2, "enough")


async def test_raising_retry_sends_its_reason_and_its_delay(broker, queue):
    async with Client(broker.url) as client:
        await client.push(queue, 1)
        times: list[float] = []
        life: tuple[str, ...] = ()

        @client.consumer(f"{queue}@g", name="patient")
        async def handle(message: Message) -> None:
            nonlocal life
            life = ("/api/v1/messages", message.partition_id, message.transaction_id, "lifeline")
            times.append(time.monotonic())
            if len(times) == 1:
                raise Retry("why", delay=0.5)

        await consume_until(client, lambda: handle.handled == 1)
        assert times[1] - times[0] >= 0.5

        async def noted() -> bool:
            events = await asyncio.to_thread(httpx.get, broker.url + resource(*life))
            return any(
                "why" in str(event) and "patient" in str(event) for event in events.json()["events"]
            )

        await eventually(noted)


async def test_a_handler_that_hangs_fails_after_its_timeout_and_the_dead_letter_says_where(
    broker, queue
):
    async with Client(broker.url) as client:
        await client.push(queue, 1)
        cancelled: list[int] = []

        @client.consumer(f"{queue}@g", timeout=0.3, retry=backoff(2, first=0))
        async def handle(message: Message) -> None:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                cancelled.append(message.attempt)
                raise

        await consume_until(client, lambda: handle.failed == 2)
        assert cancelled == [1, 2]
        assert handle.last_error == "TimeoutError: the handler did not end within 0.3 s"
        ((letter,),) = [(await client.admin.dead_letters(queue)).messages]
        assert letter.error is not None
        first, traceback = letter.error.split("\n\n", 1)
        assert first == handle.last_error
        assert "await asyncio.sleep(600)" in traceback
        assert f"{Path('penstock', 'client')}" not in traceback


def test_a_plain_function_that_hangs_fails_its_attempt_and_ends_the_consumer(broker, queue):
    import threading

    release = threading.Event()
    with SyncClient(broker.url) as client:
        client.push(queue, 1)

        @client.consumer(f"{queue}@g", timeout=0.3, retry=backoff(2, first=0))
        def handle(message: Any) -> None:
            release.wait(60)

        client.run(handle_signals=False)  # it returns: a thread cannot be stopped
        assert (handle.failed, handle.hanging) == (1, 1)
        assert handle.last_error == "TimeoutError: the handler did not end within 0.3 s"
        (message,) = client.pop(f"{queue}@g", wait=10)
        assert message.attempt == 2
        release.set()


async def test_a_consumer_begins_no_more_messages_than_its_rate(broker, queue):
    async with Client(broker.url) as client:
        await client.push_many(queue, range(30))
        times: list[float] = []

        @client.consumer(f"{queue}@g", batch=10, concurrency=3, rate="20/s")
        async def handle(number: int) -> None:
            times.append(time.monotonic())

        await consume_until(client, lambda: len(times) == 30)
        assert times[-1] - times[0] >= 27 * 0.05 - 0.005, "two at once, then one every 50 ms"
        for wrong in ("100", "0/s", "5/parsec", "fast"):
            with pytest.raises(InvalidRequest, match="is not a rate such as 100/s"):
                client.consumer(queue, rate=wrong)(lambda message: None)


async def test_consumers_of_a_group_share_its_rate(broker, queue):
    async def handle(number: int) -> None: ...

    async with Client(broker.url) as client, Client(broker.url) as other:
        client.consumer(f"{queue}@g", group_rate="20/s")(handle)
        limit = other.consumer(f"{queue}@g", group_rate="20/s")(handle).shared_rate
        assert limit is not None
        with pytest.raises(InvalidRequest, match="a rate or a group_rate, not both"):
            client.consumer(queue, rate="1/s", group_rate="1/s")(handle)

        async def known() -> bool:
            return len(await client.admin.consumers(queue, group="g")) == 1

        running = asyncio.create_task(client.run(handle_signals=False))
        await eventually(known)
        await consume_until(other, lambda: limit.consumers == 2)
        client.stop()
        await running
    began = time.monotonic()
    for _ in range(6):
        await limit.take(1)
    # The clock and the timers of uvloop have steps of a millisecond.
    assert time.monotonic() - began >= 5 * 0.1 - 0.005, "one at once, then half of the rate"


async def test_messages_pushed_without_a_partition_run_in_parallel_and_poison_holds_up_nobody(
    broker, queue
):
    async with Client(broker.url) as client:
        await client.push_many(queue, ["poison", *range(24)])
        done: list[Any] = []
        all_busy = asyncio.Event()

        @client.consumer(f"{queue}@g", concurrency=8, retry=backoff(3, first=600))
        async def handle(message: Message) -> None:
            if message.data == "poison":
                raise ValueError("never")
            if handle.in_flight == 8:
                all_busy.set()
            await all_busy.wait()
            done.append(message.data)

        await consume_until(client, lambda: len(done) == 24)
        assert handle.failed == 1
        assert (await client.configure(queue)).ordering == "none"


async def test_order_is_kept_where_it_is_asked_for(broker, queue):
    async with Client(broker.url) as client:
        await client.push(f"{queue}-a", 1, partition="Default")
        await client.configure(f"{queue}-b")
        await client.push(f"{queue}-b", 1)
        async with client.transaction() as transaction:
            transaction.push(f"{queue}-c", 1)
        orders = {name: (await client.configure(f"{queue}-{name}")).ordering for name in "abc"}
        assert orders == {"a": "partition", "b": "partition", "c": "none"}


async def test_handlers_that_idle_because_of_order_are_reported_with_the_remedy(
    broker, queue, monkeypatch, caplog
):
    monkeypatch.setattr("penstock.client.health.REPORT_SECONDS", 0.1)
    async with Client(broker.url) as client:
        await client.push_many(queue, range(100), partition="one")
        client.consumer(f"{queue}@g", concurrency=4)(lambda message: time.sleep(0.02))

        def warned() -> bool:
            return any("handlers idle" in record.getMessage() for record in caplog.records)

        await consume_until(client, warned)
        (text,) = [r.getMessage() for r in caplog.records if "handlers idle" in r.getMessage()]
        assert text == (
            f"{queue}@g: messages wait while handlers idle, because the queue keeps order in 1 "
            "partition(s) and the concurrency is 4. Push with partition=, or give up order: "
            "configure(queue, ordering='none')"
        )
