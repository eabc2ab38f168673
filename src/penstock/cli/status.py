"""`penstock status`: the whole broker on one screen, problems first.

It shows the same problems and counts as the Console. With `--check` the exit code is that of
monitoring plugins: 0 ok, 1 a warning, 2 an error, 3 unknown (no broker answers, or it refuses the
request).
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from penstock import __version__
from penstock.cli import BrokerApi, WatchApi, app, explain, say
from penstock.cli.live import figures_of
from penstock.cli.queue import FIGURES
from penstock.cli.tables import (
    UNKNOWN,
    Column,
    Facts,
    TableBlock,
    TextLine,
    View,
    count,
    duration,
    fact,
    rate,
    size,
)
from penstock.errors import PenstockError

WELL, WARNING, ERROR, UNANSWERED = 0, 1, 2, 3  # exit codes of --check
BUSIEST_QUEUES = 5
BRIEF_PROBLEMS = 3  # that `top` shows: one line each, so that queues fit on 80x24
TERMS = (
    *("completed", "delivered", "dead", "dropped", "skipped", "waiting"),
    *("kept", "removed", "compacted"),
)
COMMANDS = {  # view of the Console -> the command that shows the same
    "queues": "queue describe {}",
    "routes": "route list {}",
    "topics": "topic list {}",
    "buffers": "buffer status",
    "pipelines": "pipeline list",
    "dead-letters": "queue dlq list {} --by-error",
}


@app.command
def status(*, check: bool = False, api: WatchApi = WatchApi()) -> View:
    """Show the whole broker on one screen: problems first, then each part.

    Examples:

    `penstock status --watch`

    `penstock status --check || echo "the broker has problems"`

    :param check: Exit with 1 on a warning, 2 on an error, 3 if the state is unknown.
    """
    try:
        view = whole(api, figures_of(api))
    except PenstockError as error:
        if not check:
            raise
        say(f"penstock: {explain(error)}")
        raise SystemExit(UNANSWERED) from None
    levels = {problem["level"] for problem in view.data["problems"]}
    found = ERROR if "error" in levels else WARNING if levels else WELL
    return replace(view, failed=found if check else WELL)


def whole(
    api: BrokerApi,
    now: dict[str, Any],
    sort: str = "-waiting",
    limit: int = BUSIEST_QUEUES,
    *,
    brief: bool = False,
) -> View:
    """Return the view of the whole broker. `brief`: for a small screen, with few problems and the
    queues above the rest.
    """
    todo = [problem | {"command": _command(problem)} for problem in now["problems"]]
    state = now | {"problems": todo, "queues": [], "routes": [], "pipelines": []}
    counts = now["counts"]
    if counts.get("queues"):
        # as recent as the rest of it
        page = api.get("/api/v1/queues", sort=sort, limit=limit, recent="true")
        state["queues"] = [
            {key: value for key, value in row.items() if key != "history"} for row in page["queues"]
        ]
    for part in ("routes", "pipelines"):
        if counts.get(part):
            state[part] = api.get(f"/api/v1/{part}")[part]
    queues = TableBlock((Column("queue", "name"), *FIGURES), state["queues"])
    rest: list[Facts | TableBlock] = [Facts(list(_parts(state)))]
    if state["queues"]:
        rest.insert(0 if brief else 1, queues)
    return View(state, [*problems(api.url, state, brief), *rest])


def problems(url: str, now: dict[str, Any], brief: bool) -> Iterator[TextLine | TableBlock]:
    """Yield what needs attention, worst first."""
    rows = now["problems"]
    mine = next((one for one in now["brokers"] if one.get("self")), {"version": __version__})
    title = f"Penstock {mine['version']} at {url}"
    if not rows:
        yield TextLine(f"{title}: all is well", "green")
        return
    things = "1 problem" if len(rows) == 1 else f"{len(rows)} problems"
    if brief and len(rows) > BRIEF_PROBLEMS:
        things += f", {BRIEF_PROBLEMS} are shown"
        rows = rows[:BRIEF_PROBLEMS]
    yield TextLine(f"{title}: {things}", "bold red")
    columns = (
        Column("level"),
        Column("what", "text", prose=True, wrap=not brief),
        Column("for", _age, duration),
        Column("command", optional=True),
    )
    yield TableBlock(columns, rows)


def _age(problem: dict[str, Any]) -> float | None:
    since = problem["since"]
    return None if since is None else max(0.0, time.time() - since / 1000)


def _command(problem: dict[str, Any]) -> str | None:
    path = urlsplit(problem["path"])
    view, _, name = path.path.strip("/").partition("/")
    name = unquote(name) or "".join(parse_qs(path.query).get("queue", []))
    command = COMMANDS.get(view)
    return None if command is None else f"penstock {command.format(name)}".rstrip()


def _parts(now: dict[str, Any]) -> Iterator[Column]:
    counts, sample = now["counts"], now.get("sample") or {}
    yield fact("PostgreSQL", _database(now["database"]))
    yield fact(
        "queues",
        f"{_count(counts['queues'])}: {_rate(sample.get('pushed'))} pushed/s, "
        f"{_rate(sample.get('completed'))} completed/s, {_count(sample.get('waiting'))} waiting, "
        f"oldest {_or(duration, now['oldest'])}, {_count(counts['deadLetters'])} dead letters",
    )
    if unlimited := counts.get("queuesWithoutRetention"):
        yield fact(
            "retention",
            f"{_count(unlimited)} of {_count(counts['queues'])} queues have no retention and keep "
            "completed messages (penstock doctor shows how to limit them)",
        )
    if latency := now["latency"]:
        text = f"half within {duration(latency['p50'])}, 99 % within {duration(latency['p99'])}"
        yield fact("push to ack", text)
    if counts.get("topics") is not None:
        yield fact("topics", _count(counts["topics"]))
    for part in ("routes", "pipelines"):
        if counts.get(part) is not None:
            states = Counter(one["state"] for one in now[part])
            each = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
            yield fact(part, f"{counts[part]}: {each}" if each else "0")
    if counts.get("schedules") is not None:
        yield fact("schedules", _count(counts["schedules"]))
    buffers = now["buffers"]
    yield fact(
        "buffers",
        f"{buffers['mode']}, {_count(buffers['pending'])} waiting"
        + ("" if buffers["oldest"] is None else f" (oldest {duration(buffers['oldest'])})")
        + f", {_count(buffers['failed'])} failed",
    )
    if disk := now["disk"]:
        yield fact("disk", f"{size(disk['free'])} of {size(disk['total'])} free")
    for books in now["ledger"]:
        yield fact(f"all {books['part']}", _books(books))
    yield fact("brokers", ", ".join(str(one["id"]) for one in now["brokers"]))


def _books(books: dict[str, Any]) -> str:
    """Return how the accepted messages or records add up."""
    terms = [name for name in TERMS if name in books]
    right = " + ".join(f"{_count(books[name])} {name}" for name in terms)
    verdict = {True: "", False: " (does NOT agree)", None: " (not known to agree)"}[books["agrees"]]
    return f"{_count(books['accepted'])} accepted = {right}{verdict}"


def _database(about: dict[str, Any] | None) -> str:
    if about is None:
        return UNKNOWN
    if not about["up"]:
        return "down"
    text = (
        f"commits in {_or(duration, about['commitSeconds'])}, {_count(about['connections'])} of "
        f"{_count(about['maxConnections'])} connections, {_count(about['deadRows'])} dead rows"
    )
    if oldest := about.get("oldestTransaction"):
        text += f", oldest transaction {duration(oldest['seconds'])} ({oldest['who']})"
    return text


def _or(format: Any, value: Any) -> str:
    return UNKNOWN if value is None else str(format(value))


def _count(value: int | None) -> str:
    return _or(count, value)


def _rate(value: float | None) -> str:
    return _or(rate, value)
