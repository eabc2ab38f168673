"""`penstock audit`: who changed what and when."""

import json
from typing import Any

from penstock.cli import Limit, WatchApi, app
from penstock.cli.tables import Column, View, table, when

PAGE_ROWS = 1000  # that the broker answers at most


@app.command
def audit(filter: str = "", /, *, limit: Limit = 50, api: WatchApi = WatchApi()) -> View:
    """Show who changed what and when, newest first.

    Examples:

    `penstock audit orders -n 20`

    `penstock audit queue.delete --json | jq -r '.[].who'`

    :param filter: Show only entries with this text in who, action or object.
    :param limit: Most entries to show.
    """
    entries: list[dict[str, Any]] = []
    before = None
    while True:
        query = {"filter": filter, "before": before, "limit": min(limit, PAGE_ROWS)}
        page = api.get("/api/v1/audit", **query)
        entries += page["entries"]
        before = page["next"]
        if before is None or len(entries) >= limit:
            break
    return table(
        entries[:limit],
        Column("at", format=when),
        Column("who"),
        Column("action"),
        Column("object"),
        Column("detail", _detail, prose=True, wrap=True),
        empty="nothing was changed yet",
        note="" if before is None else "there is more: --limit",
    )


def _detail(entry: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in entry["detail"].items()
    )
