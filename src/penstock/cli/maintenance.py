"""`penstock maintenance`: let pushes wait in files, or stop pops, while PostgreSQL is worked on."""

from typing import Annotated, Any

import typer

from penstock.cli import LOCAL_URL, Commands, Json, Token, Url, Watch, app, ask
from penstock.cli.tables import Column, Facts, View, count, show

MAINTENANCE = "/api/v1/system/maintenance"
commands = Commands(
    "Buffer pushes on disk, or stop pops, during maintenance of PostgreSQL.",
    app,
    name="maintenance",
)
Pops = Annotated[
    bool, typer.Option("--pops", help="Apply to pops instead of pushes: pops return no messages.")
]


@commands.command()
def status(
    as_json: Json = False, watch: Watch = None, url: Url = LOCAL_URL, token: Token = ""
) -> None:
    """Show whether maintenance is on, and how many messages are buffered.

    Example: `penstock maintenance status --watch`
    """

    def look() -> View:
        report = ask(url, token, "GET", MAINTENANCE)
        columns = (
            Column("pushes", lambda one: _goes(one["maintenanceMode"], "to the buffer")),
            Column("pops", lambda one: _goes(one["popMaintenanceMode"], "find nothing")),
            Column("buffered messages", "bufferedMessages", count),
            Column("failed events", "bufferStats.failedCount", count),
            Column("database", lambda one: "up" if one["bufferStats"]["dbHealthy"] else "down"),
        )
        return View(report, [Facts(columns, report)])

    show(look, as_json, watch)


@commands.command()
def on(pops: Pops = False, url: Url = LOCAL_URL, token: Token = "") -> None:
    """Start maintenance: pushes are accepted and buffered on disk until `off`.

    Examples:

    `penstock maintenance on`

    `penstock maintenance on --pops`
    """
    _switch(url, token, pops, True)


@commands.command()
def off(pops: Pops = False, url: Url = LOCAL_URL, token: Token = "") -> None:
    """End maintenance: buffered messages are written to the database.

    Example: `penstock maintenance off && penstock buffer status --watch`
    """
    _switch(url, token, pops, False)


def _switch(url: str, token: str, pops: bool, enabled: bool) -> None:
    target = f"{MAINTENANCE}/pop" if pops else MAINTENANCE
    answer: dict[str, Any] = ask(url, token, "POST", target, {"enabled": enabled})
    typer.echo(answer["message"], err=True)


def _goes(maintenance: bool, where: str) -> str:
    return where if maintenance else "as always"
