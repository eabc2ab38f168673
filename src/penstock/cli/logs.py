"""`penstock logs`: the broker's recent log lines, from wherever this is run."""

from typing import Annotated

import typer

from penstock.cli import LOCAL_URL, Json, Token, Url, Watch, app, ask, resource
from penstock.cli.tables import Column, View, show, table, when


@app.command()
def logs(
    level: Annotated[
        str, typer.Option(help="Lowest level to show: info, warning or error.")
    ] = "info",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Most lines to show.")] = 50,
    as_json: Json = False,
    watch: Watch = None,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Show the latest log lines of the broker, newest last.

    Example: `penstock logs --level warning`
    """

    def look() -> View:
        page = ask(url, token, "GET", resource("/api/v1/logs", level=level, limit=limit))
        return table(
            page["lines"][::-1],
            Column("at", format=when),
            Column("level"),
            Column("logger", optional=True),
            Column("message", prose=True, wrap=True),
            empty=f"no line of level {level} or above",
        )

    show(look, as_json, watch)
