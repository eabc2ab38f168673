"""`penstock maintenance`: let pushes wait in files, or stop pops, while PostgreSQL is worked on."""

from typing import Annotated

import typer

from penstock.cli import Api, Commands, app, option
from penstock.cli.tables import Column, Facts, View, count

MAINTENANCE = "/api/v1/system/maintenance"
commands = Commands(
    "Buffer pushes on disk, or stop pops, during maintenance of PostgreSQL.",
    app,
    name="maintenance",
)
Pops = Annotated[bool, option("Apply to pops instead of pushes: pops return no messages.")]


@commands.command(watch=True)
def status(api: Api) -> View:
    """Show whether maintenance is on, and how many messages are buffered.

    Example: `penstock maintenance status --watch`
    """
    report = api.get(MAINTENANCE)
    columns = (
        Column("pushes", lambda one: _goes(one["maintenanceMode"], "to the buffer")),
        Column("pops", lambda one: _goes(one["popMaintenanceMode"], "find nothing")),
        Column("buffered messages", "bufferedMessages", count),
        Column("failed events", "bufferStats.failedCount", count),
        Column("database", lambda one: "up" if one["bufferStats"]["dbHealthy"] else "down"),
    )
    return View(report, [Facts(columns, report)])


@commands.command()
def on(api: Api, pops: Pops = False) -> None:
    """Start maintenance: pushes are accepted and buffered on disk until `off`.

    Examples:

    `penstock maintenance on`

    `penstock maintenance on --pops`
    """
    _switch(api, pops, True)


@commands.command()
def off(api: Api, pops: Pops = False) -> None:
    """End maintenance: buffered messages are written to the database.

    Example: `penstock maintenance off && penstock buffer status --watch`
    """
    _switch(api, pops, False)


def _switch(api: Api, pops: bool, enabled: bool) -> None:
    target = f"{MAINTENANCE}/pop" if pops else MAINTENANCE
    typer.echo(api.post(target, body={"enabled": enabled})["message"], err=True)


def _goes(maintenance: bool, where: str) -> str:
    return where if maintenance else "as always"
