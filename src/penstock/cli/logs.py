"""`penstock logs`: the recent log lines of a broker."""

from penstock.cli import Limit, WatchApi, app
from penstock.cli.tables import Column, View, table, when


@app.command
def logs(*, level: str = "info", limit: Limit = 50, api: WatchApi = WatchApi()) -> View:
    """Show the latest log lines of the broker, newest last.

    Example: `penstock logs --level warning`

    :param level: Lowest level to show: info, warning or error.
    :param limit: Most lines to show.
    """
    return table(
        api.get("/api/v1/logs", level=level, limit=limit)["lines"][::-1],
        Column("at", format=when),
        Column("level"),
        Column("logger", optional=True),
        Column("message", prose=True, wrap=True),
        empty=f"no line of level {level} or above",
    )
