"""`penstock schedule`: messages that are pushed at the times a cron expression gives."""

import json as text
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from penstock.cli import (
    AnyText,
    BrokerApi,
    JsonApi,
    WatchApi,
    Yes,
    command_group,
    completer,
    confirm,
    usage,
)
from penstock.cli.tables import Column, Facts, TableBlock, View, table, when

commands = command_group("schedule")

SCHEDULES = "/api/v1/schedules"
Name = Annotated[
    str,
    Parameter(help="Name of the schedule.", completer=completer(SCHEDULES, "schedules")),
]


def _next(schedule: dict[str, Any]) -> str | None:
    return schedule["nextRuns"][0] if schedule["nextRuns"] else None


def _last(schedule: dict[str, Any]) -> dict[str, Any]:
    runs = schedule["lastRuns"]
    return runs[0] if runs else {"dueAt": None, "result": None}


COLUMNS = (
    Column("schedule", "name"),
    Column("cron"),
    Column("zone", "timezone", optional=True),
    Column("queue"),
    Column("state", lambda one: "paused" if one["paused"] else "active"),
    Column("next", _next, when),
    Column("last", lambda one: _last(one)["dueAt"], when, optional=True),
    Column("result", lambda one: _last(one)["result"]),
    Column("partition", optional=True),
    Column("catch-up", "catchUp", optional=True),
)
RUNS = (
    Column("due", "dueAt", when),
    Column("pushed", "firedAt", when),
    Column("result"),
    Column("by hand", "manual"),
    Column("transaction id", "transactionId"),
    Column("error", prose=True),
)
FACTS = (
    *COLUMNS[:6],
    Column("then", lambda one: ", ".join(map(when, one["nextRuns"][1:])) or None),
    Column("partition"),
    Column("payload", format=text.dumps),
    Column("headers", format=text.dumps),
    Column("catch-up", "catchUp"),
)
NO_SCHEDULES = (
    "no schedules; one for every night: "
    "penstock schedule create nightly --cron '0 3 * * *' --queue reports"
)


@commands.command
def create(
    schedule: str,
    /,
    *,
    cron: str,
    queue: Annotated[str, Parameter(alias="-q")],
    payload: AnyText = "null",
    tz: str = "UTC",
    partition: Annotated[str | None, Parameter(alias="-p")] = None,
    header: list[str] | None = None,
    catch_up: Literal["none", "one", "all"] = "one",
    paused: bool = False,
    api: JsonApi = JsonApi(),
) -> View:
    """Create a schedule, or change the one with this name.

    Example: `penstock schedule create nightly --cron '0 3 * * *' --tz Europe/Rome --queue reports
    --payload '{"kind": "daily"}'`

    :param schedule: Name of the schedule.
    :param cron: Cron expression: minute, hour, day of month, month, day of week; or @daily etc.
    :param queue: Queue to push to.
    :param payload: Payload of the messages, as JSON.
    :param tz: Time zone, such as Europe/Rome.
    :param partition: Partition to push to.
    :param header: Header of the messages, NAME=VALUE; may be repeated.
    :param catch_up: What to push for runs missed while no broker ran.
    :param paused: Create the schedule paused.
    """
    pairs = [one.partition("=") for one in header or ()]
    if any(not equals for _, equals, _ in pairs):
        raise usage("--header takes NAME=VALUE")
    try:
        text.loads(payload)
    except ValueError as error:
        raise usage(f"--payload is not JSON: {error}") from None
    body = {
        "cron": cron,
        "timezone": tz,
        "queue": queue,
        "payload": msgspec.Raw(payload.encode()),
        "headers": {name: value for name, _, value in pairs} or None,
        "catchUp": catch_up,
        "paused": paused,
    }
    if partition is not None:
        body["partition"] = partition
    return _view(api.put(SCHEDULES, schedule, body=body))


@commands.command(name="list")
def list_schedules(schedule: Name = "", /, *, api: WatchApi = WatchApi()) -> View:
    """List the schedules, or show one with what it pushes and its last and next runs.

    Examples:

    `penstock schedule list --watch`

    `penstock schedule list nightly`
    """
    if schedule:
        return _view(api.get(SCHEDULES, schedule))
    return table(api.get(SCHEDULES)["schedules"], *COLUMNS, empty=NO_SCHEDULES)


@commands.command
def pause(schedule: Name, /, *, api: BrokerApi = BrokerApi()) -> None:
    """Pause a schedule until you resume it.

    Example: `penstock schedule pause nightly`
    """
    api.post(SCHEDULES, schedule, "pause")


@commands.command
def resume(schedule: Name, /, *, api: BrokerApi = BrokerApi()) -> None:
    """Resume a schedule. Runs that were due while it was paused are skipped.

    Example: `penstock schedule resume nightly`
    """
    api.post(SCHEDULES, schedule, "resume")


@commands.command(name="run")
def run_now(schedule: Name, /, *, api: JsonApi = JsonApi()) -> View:
    """Push the message of a schedule now. Its next runs do not change.

    Example: `penstock schedule run nightly`
    """
    run = api.post(SCHEDULES, schedule, "run")
    return View(run, [TableBlock(RUNS, [run])])


@commands.command
def delete(schedule: Name, /, *, yes: Yes = False, api: BrokerApi = BrokerApi()) -> None:
    """Delete a schedule. Messages that it has pushed are kept.

    Example: `penstock schedule delete nightly --yes`
    """
    confirm(f"Delete schedule {schedule}?", yes)
    api.delete(SCHEDULES, schedule)


def _view(schedule: dict[str, Any]) -> View:
    return View(
        schedule,
        [Facts(FACTS, schedule), TableBlock(RUNS, schedule["lastRuns"], "no runs yet")],
    )
