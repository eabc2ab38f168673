"""`penstock logs`: the broker's recent log lines, from wherever this is run."""

from typing import Annotated

from penstock.cli import Api, app, option
from penstock.cli.tables import Column, View, table, when


@app.command(watch=True)
def logs(
    api: Api,
    level: Annotated[str, option("Lowest level to show: info, warning or error.")] = "info",
    limit: Annotated[int, option("Most lines to show.", "-n", min=1)] = 50,
) -> View:
    """Show the latest log lines of the broker, newest last.

    Example: `penstock logs --level warning`
    """
    return table(
        api.get("/api/v1/logs", level=level, limit=limit)["lines"][::-1],
        Column("at", format=when),
        Column("level"),
        Column("logger", optional=True),
        Column("message", prose=True, wrap=True),
        empty=f"no line of level {level} or above",
    )
