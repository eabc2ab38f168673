"""`penstock maintenance`: buffer pushes in files, or stop pops, while PostgreSQL is serviced."""

from typing import Literal

from penstock.cli import WatchApi, app
from penstock.cli.tables import Column, Facts, TextLine, View, count

BUFFERS = "/api/v1/buffers"


@app.command
def maintenance(
    switch: Literal["on", "off"] | None = None,
    /,
    *,
    pops: bool = False,
    api: WatchApi = WatchApi(),
) -> View:
    """Buffer pushes on disk, or stop pops, during maintenance of PostgreSQL.

    With `on`, pushes are accepted and buffered on disk. With `off`, buffered messages are written
    to the database. Without either, it shows whether maintenance is on.

    Examples:

    `penstock maintenance on`

    `penstock maintenance on --pops`

    `penstock maintenance off && penstock buffer status --watch`

    :param switch: Start or end maintenance; default: show its state.
    :param pops: Apply to pops instead of pushes: pops return no messages.
    """
    if switch is not None:
        modes = {"pop" if pops else "push": switch == "on"}
        answer = api.put(BUFFERS, "maintenance", body=modes)
        what = "pops" if pops else "pushes"
        return View(answer, [TextLine(f"maintenance of {what} is {switch}")])
    report = api.get("/api/v1/status/buffers")
    columns = (
        Column("pushes", lambda one: _goes(one["maintenanceMode"], "to the buffer")),
        Column("pops", lambda one: _goes(one["popMaintenanceMode"], "get no messages")),
        Column("buffered messages", "pending", count),
        Column("failed events", "failed", count),
        Column("database", lambda one: "up" if one["dbHealthy"] else "down"),
    )
    return View(report, [Facts(columns, report)])


def _goes(maintenance: bool, where: str) -> str:
    return where if maintenance else "as usual"
