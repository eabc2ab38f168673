"""Schedules: when they are due, and that each due time gives one message."""

import asyncio
import itertools
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import pytest
from msgspec import Raw

from penstock.contract.schedules import ScheduleDefinition as Definition
from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Queues
from penstock.queues.background import cron as times
from penstock.queues.background.cron import Cron, due_until
from penstock.queues.types import Item
from tests.queues.support import answer, pop, running, values
from tests.support.wait import eventually

EVERY_SECOND = "* * * * * *"


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def days(expression: str, zone: str, since: str, count: int) -> list[str]:
    result = list(islice(Cron(expression, zone).times(at(since)), count))
    assert result == sorted(set(result))
    return [due.strftime("%d %H:%M") for due in result]


def test_a_time_that_does_not_exist_runs_right_after_the_gap() -> None:
    # clocks go from 2:00 (+01:00) to 3:00 (+02:00) on 29 March 2026 in Rome; these are UTC
    since = "2026-03-28T00:00+00:00"
    assert days("30 2 * * *", "Europe/Rome", since, 3) == ["28 01:30", "29 01:00", "30 00:30"]
    assert days("0 3 * * *", "Europe/Rome", since, 3) == ["28 02:00", "29 01:00", "30 01:00"]
    assert days("30 * * * *", "Europe/Rome", "2026-03-29T00:00+00:00", 3) == [
        "29 00:30", "29 01:30", "29 02:30",
    ]  # fmt: skip


def test_a_time_that_comes_twice_runs_once() -> None:
    # clocks go from 3:00 (+02:00) to 2:00 (+01:00) on 25 October 2026
    since = "2026-10-24T00:00+00:00"
    assert days("30 2 * * *", "Europe/Rome", since, 3) == ["24 00:30", "25 00:30", "26 01:30"]
    # also for who asks in the second of the two hours
    assert days("30 2 * * *", "Europe/Rome", "2026-10-25T01:15+00:00", 1) == ["26 01:30"]
    # what follows the clock on the wall runs in both hours
    assert days("30 * * * *", "Europe/Rome", "2026-10-24T23:59+00:00", 4) == [
        "25 00:30", "25 01:30", "25 02:30", "25 03:30",
    ]  # fmt: skip


def test_expressions_and_zones_that_are_wrong_are_refused_in_words() -> None:
    for expression in ("", "0 3 * *", "61 * * * *", "nightly", "0 0 30 2 *", "x" * 300):
        with pytest.raises(InvalidRequest, match="cron"):
            Cron(expression, "UTC")
    for zone in ("", "Mars/Olympus", "../etc/passwd", "/etc/passwd", "Europe"):
        with pytest.raises(InvalidRequest, match="time zone"):
            Cron("0 3 * * *", zone)
    assert Cron("@daily", "UTC").after(at("2026-01-01T00:00+00:00")) == at("2026-01-02T00:00+00:00")


def test_missed_times_are_made_up_for_as_asked() -> None:
    hourly = Cron("@hourly", "UTC")
    first, now = at("2026-01-01T01:00+00:00"), at("2026-01-03T12:30+00:00")
    last, following = at("2026-01-03T12:00+00:00"), at("2026-01-03T13:00+00:00")
    assert due_until(hourly, "one", first, now) == ([last], [first], following)
    assert due_until(hourly, "none", first, now) == ([], [first, last], following)
    on_time = last + timedelta(seconds=1)
    assert due_until(hourly, "none", last, on_time) == ([last], [], following)
    due = due_until(hourly, "all", first, now)
    assert (len(due.times), due.times[0], due.times[-1]) == (60, first, last)
    assert (due.skipped, due.next_at) == ([], following)
    # a million of them, in steps or as one
    second, later = Cron(EVERY_SECOND, "UTC"), first + timedelta(seconds=1_000_000)
    assert due_until(second, "one", first, later).times == [later]
    assert len(due_until(second, "all", first, later).times) == times.MAX_DUE
    yearly = Cron("0 0 29 2 *", "UTC")
    assert due_until(yearly, "one", at("2020-02-29T00:00+00:00"), now).times == [
        at("2024-02-29T00:00+00:00")
    ]


async def make_due(queues: Queues, name: str, ago: str) -> None:
    await queues.database.fetch(
        "UPDATE schedules SET next_at = date_trunc('minute', now()) - $2::text::interval,"
        " look_at = now() WHERE name = $1", name, ago,
    )  # fmt: skip
    queues.schedules.wake()


async def test_several_brokers_push_each_due_time_once(database_url: str) -> None:
    async with running(database_url) as one, running(database_url) as two:
        wanted = Definition(
            "* * * * *", "reports", "Europe/Rome", "p", Raw(b'{"a":1}'), {"h": "v"}, "all"
        )
        await one.schedules.put("minutely", wanted)
        await make_due(one, "minutely", "30 minutes")
        two.schedules.wake()
        await asyncio.gather(*(queues.schedules.fire() for queues in (one, two) for _ in range(4)))

        async def pushed() -> list[Any]:
            rows = await one.database.fetch(
                "SELECT transaction_id FROM messages ORDER BY partition_id, seq"
            )
            return [row[0] for row in rows]

        await eventually(
            lambda: one.database.fetch("SELECT 1 FROM schedules WHERE next_at > now()")
        )
        ids = await pushed()
        assert len(ids) == len(set(ids)) >= 31
        assert ids == sorted(ids)
        assert all(text.startswith("schedule:minutely:2") for text in ids)
        (message,) = (await pop(two, "reports", 1)).messages
        assert (message.payload, message.partition) == (b'{"a":1}', "p")
        assert message.headers == b'{"h":"v"}'
        shown = await two.schedules.get("minutely")
        assert [run.transaction_id for run in shown.last_runs] == ids[:-11:-1]
        assert {run.result for run in shown.last_runs} == {"queued"}
        assert len(shown.next_runs) == 5


async def test_a_change_is_noticed_and_the_next_run_comes_by_itself(database_url: str) -> None:
    async with running(database_url) as one, running(database_url) as two:
        await one.schedules.stop()  # the other broker hears of it and does it
        await one.schedules.put("ticker", Definition(EVERY_SECOND, "ticks", payload=Raw(b'"tick"')))
        for _ in range(2):
            popped = await pop(one, "ticks", 1, wait=True, timeout=30)
            assert values(popped) == ["tick"]
            (message,) = popped.messages
            due = at(message.transaction_id.removeprefix("schedule:ticker:").replace("Z", "+00:00"))
            assert message.created_at >= due  # never early
            await answer(one, popped.messages)
        await two.schedules.pause("ticker")
        shown = await one.schedules.get("ticker")
        assert (shown.paused, shown.next_runs) == (True, [])


async def test_schedules_are_paused_run_replaced_and_deleted(queues: Queues) -> None:
    schedules = queues.schedules
    with pytest.raises(NotFound, match="nightly"):
        await schedules.run("nightly")
    made = await schedules.put("nightly", Definition("0 3 * * *", "reports", "Europe/Rome"))
    assert {due.minute for due in made.next_runs} == {0}
    run = await schedules.run("nightly")
    assert (run.manual, run.result) == (True, "queued")
    assert len((await pop(queues, "reports")).messages) == 1
    # to say the same again while it is due loses nothing
    await queues.schedules.stop()
    await make_due(queues, "nightly", "1 minute")
    due = (await schedules.get("nightly")).next_runs[0]
    again = await schedules.put(
        "nightly", Definition("0 3 * * *", "reports", "Europe/Rome", payload=Raw(b"2"))
    )
    assert again.next_runs[0] == due
    await schedules.pause("nightly")
    assert await schedules.fire() is None
    resumed = await schedules.pause("nightly", paused=False)
    assert resumed.next_runs == made.next_runs
    assert await schedules.fire() > 0
    await schedules.delete("nightly")
    with pytest.raises(NotFound):
        await schedules.delete("nightly")
    assert await schedules.listing() == []


async def test_a_push_that_is_refused_is_tried_again(database_url: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.queues.background.schedules.REFUSED_SECONDS", 0.05)

    async with running(database_url, encryption_key="00" * 32) as queues:
        await queues.admin.configure("small", QueueOptions(max_size=1))
        await queues.admin.configure("secret", QueueOptions(encryption_enabled=True))
        for queue in ("small", "secret"):
            await queues.schedules.put(
                queue, Definition("0 0 1 1 *", queue, payload=Raw(b'"clear"'))
            )
            await queues.schedules.run(queue)
        await make_due(queues, "small", "1 minute")

        async def refused() -> bool:
            runs = (await queues.schedules.get("small")).last_runs
            return [run.result for run in runs] == ["full", "queued"]

        await eventually(refused)
        popped = await pop(queues, "small")
        await answer(queues, popped.messages)
        assert len((await pop(queues, "small", wait=True, timeout=30)).messages) == 1
        runs = (await queues.schedules.get("small")).last_runs
        assert [run.result for run in runs] == ["queued", "full", "queued"]
        # an encrypted queue's payload is not in clear here either
        (row,) = await queues.database.fetch("SELECT payload FROM schedules WHERE name = 'secret'")
        assert b"clear" not in row["payload"]
        assert values(await pop(queues, "secret")) == ["clear"]
        assert (await queues.schedules.get("secret")).payload == b'"clear"'


async def runs_of(queues: Queues, name: str) -> list[datetime]:
    """The due times whose messages are stored, in order."""
    rows = await queues.database.fetch(
        "SELECT transaction_id FROM messages WHERE transaction_id LIKE $1 ORDER BY seq",
        f"schedule:{name}:%",
    )
    return [datetime.fromisoformat(row[0].removeprefix(f"schedule:{name}:")) for row in rows]


@pytest.mark.parametrize("change", ["cron", "zone", "pause", "put paused"])
async def test_a_change_pushes_first_what_was_due_before_it(database_url: str, change: str) -> None:
    async with running(database_url) as queues:
        schedules = queues.schedules
        await schedules.stop()  # nothing fires by itself
        before = Definition("* * * * *", "q", payload=Raw(b'"before"'), catch_up="all")
        await schedules.put("s", before)
        await make_due(queues, "s", "3 minutes")
        after = Definition("* * * * *", "q", payload=Raw(b'"after"'), catch_up="all")
        if change == "cron":
            after.cron = "*/5 * * * *"
        elif change == "zone":
            after.timezone = "Europe/Rome"
        elif change == "put paused":
            after.paused = True
        shown = await (schedules.pause("s") if change == "pause" else schedules.put("s", after))
        runs = await runs_of(queues, "s")
        assert len(runs) >= 4  # five when the next minute has begun meanwhile
        assert {b - a for a, b in itertools.pairwise(runs)} == {timedelta(minutes=1)}
        assert set(values(await pop(queues, "q"))) == {"before"}
        assert len(shown.last_runs) == len(runs)
        await schedules.fire()
        assert await runs_of(queues, "s") == runs


async def test_a_run_that_a_full_queue_refused_stays_due_over_a_change(database_url: str) -> None:
    async with running(database_url) as queues:
        schedules = queues.schedules
        await schedules.stop()
        await queues.admin.configure("q", QueueOptions(max_size=1))
        await queues.push([Item("q", b"0")])
        await schedules.put("s", Definition("* * * * *", "q", catch_up="all"))
        await make_due(queues, "s", "1 minute")
        await schedules.fire()
        assert await runs_of(queues, "s") == []
        await schedules.put("s", Definition("0 0 1 1 *", "q", catch_up="all"))
        assert (await schedules.get("s")).next_runs[0] < datetime.now(UTC)


async def test_a_schedule_that_is_edited_all_the_time_skips_no_run(database_url: str) -> None:
    async with running(database_url) as queues:
        schedules = queues.schedules
        expressions = itertools.cycle([EVERY_SECOND, "*/1 * * * * *"])
        for edits in itertools.count():
            wanted = Definition(next(expressions), "q", catch_up="all")
            await schedules.put("s", wanted)
            runs = await runs_of(queues, "s")
            if len(runs) >= 4:
                break
            assert edits < 100_000
        assert {b - a for a, b in itertools.pairwise(runs)} == {timedelta(seconds=1)}
