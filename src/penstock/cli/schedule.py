"""`penstock schedule`: messages that are pushed at the times a cron expression gives."""

import json as text
from typing import Annotated, Any

import msgspec

from penstock.cli import Api, Commands, Yes, app, argument, completer, confirm, option, usage
from penstock.cli.tables import Column, Facts, Table, View, table, when

commands = Commands("Push messages on a cron schedule.", app, name="schedule")

SCHEDULES = "/api/v1/schedules"
Name = Annotated[
    str,
    argument(
        "Name of the schedule.",
        metavar="SCHEDULE",
        autocompletion=completer(SCHEDULES, "schedules"),
    ),
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


@commands.command()
def create(
    api: Api,
    name: Annotated[str, argument("Name of the schedule.", metavar="SCHEDULE")],
    cron: Annotated[
        str,
        option("Cron expression: minute, hour, day of month, month, day of week; or @daily etc."),
    ],
    queue: Annotated[str, option("Queue to push to.", "-q")],
    payload: Annotated[str, option("Payload of the messages, as JSON.")] = "null",
    tz: Annotated[str, option("Time zone, such as Europe/Rome.")] = "UTC",
    partition: Annotated[str | None, option("Partition to push to.", "-p")] = None,
    header: Annotated[
        list[str] | None, option("Header of the messages; may be repeated.", metavar="NAME=VALUE")
    ] = None,
    catch_up: Annotated[
        str, option("What to push for runs missed while no broker ran: none, one or all.")
    ] = "one",
    paused: Annotated[bool, option("Create the schedule paused.")] = False,
) -> View:
    """Create a schedule, or change the one with this name.

    Example: `penstock schedule create nightly --cron '0 3 * * *' --tz Europe/Rome --queue reports
    --payload '{"kind": "daily"}'`
    """
    pairs = [one.partition("=") for one in header or ()]
    if any(not equals for _, equals, _ in pairs):
        raise usage("--header takes NAME=VALUE")
    try:
        text.loads(payload)
    except ValueError as error:
        raise usage(f"--payload is no JSON: {error}") from None
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
    return _view(api.put(SCHEDULES, name, body=body))


@commands.command("list", watch=True)
def list_schedules(api: Api) -> View:
    """List the schedules with their last and next runs.

    Example: `penstock schedule list --watch`
    """
    return table(api.get(SCHEDULES)["schedules"], *COLUMNS, empty=NO_SCHEDULES)


@commands.command(watch=True)
def describe(api: Api, name: Name) -> View:
    """Show a schedule: what it pushes, and its last and next runs.

    Example: `penstock schedule describe nightly`
    """
    return _view(api.get(SCHEDULES, name))


@commands.command()
def pause(api: Api, name: Name) -> None:
    """Pause a schedule until you resume it.

    Example: `penstock schedule pause nightly`
    """
    api.post(SCHEDULES, name, "pause")


@commands.command()
def resume(api: Api, name: Name) -> None:
    """Resume a schedule. Runs that were due while it was paused are skipped.

    Example: `penstock schedule resume nightly`
    """
    api.post(SCHEDULES, name, "resume")


@commands.command("run")
def run_now(api: Api, name: Name) -> View:
    """Push the message of a schedule now. Its next runs do not change.

    Example: `penstock schedule run nightly`
    """
    run = api.post(SCHEDULES, name, "run")
    return View(run, [Table(RUNS, [run])])


@commands.command()
def delete(api: Api, name: Name, yes: Yes = False) -> None:
    """Delete a schedule. Messages that it has pushed are kept.

    Example: `penstock schedule delete nightly --yes`
    """
    confirm(f"Delete schedule {name}?", yes)
    api.delete(SCHEDULES, name)


def _view(schedule: dict[str, Any]) -> View:
    return View(
        schedule,
        [Facts(FACTS, schedule), Table(RUNS, schedule["lastRuns"], "no runs yet")],
    )
