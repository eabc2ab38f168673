"""Show the result of a command to three kinds of readers.

A command returns a `View`: the data, and the tables, facts and lines that people see. `show` prints
one of:

- `--json`: the data, indented on a terminal and on one line in a pipe.
- a terminal: tables with numbers aligned right and human-readable units (`1.2 GiB`, `14 min`).
  In a table that is too wide, long prose is cut first (with an ellipsis), then columns marked
  `optional` are left out (and named), and last names are cut.
- a pipe: tab-separated lines under a header, with plain numbers and the unit in the header.

`--watch` redraws the view every few seconds until Ctrl-C. If the broker becomes unavailable, the
view says so, and watching continues when it is back.

Colour comes from rich, which uses it only on a terminal and respects NO_COLOR. Names and errors are
never interpreted as markup, and their unprintable characters are escaped.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich import table as rich_table
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from penstock.errors import PenstockError
from penstock.protocol.times import utc_time

GAP = 2  # blanks between columns
MIN_WRAPPED, MIN_PROSE, MIN_NAME = 30, 16, 8  # characters: text is not cut below this
UNKNOWN = "-"
STYLES = {
    **dict.fromkeys(("active", "direct", "running", "ready", "Stable", "up", "closed"), "green"),
    **dict.fromkeys(
        ("warning", "paused", "draining", "half_open", "failover", "maintenance", "stopping"),
        "yellow",
    ),
    **dict.fromkeys(
        ("blocked", "broken", "damaged", "down", "error", "failed", "lost", "open"), "red"
    ),
}


# Formats for people


def count(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}"


def size(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def duration(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.00095 or not seconds else "< 1 ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 120:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.0f} h" if minutes < 48 * 60 else f"{minutes / 1440:,.0f} d"


def estimate(seconds: float) -> str:
    """Format a remaining time; negative: it will not end at this rate."""
    return "never" if seconds < 0 else duration(seconds)


def moment(value: float | str) -> datetime:
    """Parse a time as the API writes it: milliseconds since 1970, or ISO 8601."""
    if isinstance(value, str):
        return utc_time(value)
    return datetime.fromtimestamp(value / 1000, UTC)


def when(value: float | str) -> str:
    """Format a time in the local zone: with seconds today, with the date on other days."""
    at = moment(value).astimezone()
    today = at.date() == datetime.now().astimezone().date()
    return at.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M")


def text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown
    )


NUMBERS: Mapping[Callable[[Any], str], str] = {  # formats aligned right -> unit in a pipe
    count: "",
    rate: "/s",
    size: "bytes",
    duration: "s",
    estimate: "s",
}


# Views


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    value: str | Callable[[Any], Any] = ""  # a key of the row (a.b for nested ones), or a function
    format: Callable[[Any], str] = text
    prose: bool = False  # long text that may be cut
    wrap: bool = False  # wrapped between words instead of cut
    optional: bool = False  # left out if it does not fit

    def of(self, row: Any) -> Any:
        if callable(self.value):
            return self.value(row)
        for name in (self.value or self.title).split("."):
            row = row.get(name) if isinstance(row, Mapping) else getattr(row, name)
            if row is None:
                return None
        return row

    def cell(self, row: Any) -> Text:
        value = self.of(row)
        shown = UNKNOWN if value is None else self.format(value)
        return Text(shown, STYLES.get(shown, "") if self.format is text else "")

    @property
    def header(self) -> str:
        """Return the title in a pipe, with the unit of its plain numbers."""
        unit = NUMBERS.get(self.format, "")
        return f"{self.title} ({unit})" if unit and unit != "/s" else self.title

    def plain(self, row: Any) -> str:
        value = self.of(row)
        if value is None:
            return ""
        if self.format is when:
            return moment(value).isoformat()
        if self.format in NUMBERS:
            return f"{value:.6g}" if isinstance(value, float) else str(value)
        return self.format(value)


@dataclass(frozen=True, slots=True)
class TableBlock:
    columns: Sequence[Column]
    rows: Sequence[Any]
    empty: str = ""  # shown to people instead of an empty table

    def plain(self) -> Iterable[str]:
        yield "\t".join(column.header for column in self.columns)
        for row in self.rows:
            yield "\t".join(column.plain(row) for column in self.columns)

    def drawn(self, width: int) -> RenderableType:
        if not self.rows:
            return Text(self.empty or "none", "dim")
        columns = [
            one
            for one in self.columns
            if not one.optional or any(one.of(row) not in (None, "") for row in self.rows)
        ]
        cells = [[column.cell(row) for row in self.rows] for column in columns]
        widths = [
            max(cell_len(column.title), *(cell.cell_len for cell in texts))
            for column, texts in zip(columns, cells, strict=True)
        ]
        shown, dropped = _fit(columns, widths, width)
        drawn = rich_table.Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
        for at in shown:
            drawn.add_column(
                Text(columns[at].title, "bold"),
                justify="right" if columns[at].format in NUMBERS else "left",
                no_wrap=not columns[at].wrap,
                overflow="ellipsis",
                width=widths[at],
            )
        for row in zip(*(cells[at] for at in shown), strict=True):
            drawn.add_row(*row)
        if not dropped:
            return drawn
        note = f"not shown at this width: {', '.join(dropped)} (--json has everything)"
        return Group(drawn, Text(note, "dim"))


def _fit(columns: Sequence[Column], widths: list[int], width: int) -> tuple[list[int], list[str]]:
    """Choose the columns that fit and cut `widths`. Return also the titles of the other columns."""
    shown = list(range(len(columns)))

    def excess() -> int:
        return sum(widths[at] + GAP for at in shown) - GAP - width

    def cut(able: list[int], least: int) -> None:
        """Narrow the widest column, one character at a time."""
        floors = {at: max(least, cell_len(columns[at].title)) for at in able}
        if least != MIN_NAME:
            floors |= {at: MIN_WRAPPED for at in able if columns[at].wrap}
        while excess() > 0:
            able = [at for at in able if widths[at] > floors[at]]
            if not able:
                return
            widths[max(able, key=lambda at: widths[at])] -= 1

    prose = [at for at in shown if columns[at].prose]
    natural = list(widths)
    cut(prose, MIN_PROSE)
    dropped: list[str] = []
    for at in reversed(range(len(columns))):
        if excess() > 0 and columns[at].optional:
            shown.remove(at)
            dropped.insert(0, columns[at].title)
    widths[:] = natural  # dropping columns has made room
    cut([at for at in prose if at in shown], MIN_PROSE)
    cut([at for at in shown if columns[at].format is text], MIN_NAME)
    return shown, dropped


@dataclass(frozen=True, slots=True)
class Facts:
    """One row, shown as lines of a name and a value."""

    columns: Sequence[Column]
    row: Any = None

    def plain(self) -> Iterable[str]:
        for column in self.columns:
            yield f"{column.header}\t{column.plain(self.row)}"

    def drawn(self, width: int) -> RenderableType:
        del width
        drawn = rich_table.Table.grid(padding=(0, GAP, 0, 0))
        for column in self.columns:
            drawn.add_row(Text(column.title, "bold"), column.cell(self.row))
        return drawn


def fact(title: str, value: Any, format: Callable[[Any], str] = text) -> Column:
    """Return a column with a fixed value."""
    return Column(title, lambda _: value, format)


@dataclass(frozen=True, slots=True)
class TextLine:
    """A sentence for people. In a pipe, it goes to standard error."""

    content: str
    style: str = ""

    def plain(self) -> Iterable[str]:
        return ()

    def drawn(self, width: int) -> RenderableType:
        del width
        return Text(text(self.content), self.style)


@dataclass(frozen=True, slots=True)
class View:
    data: Any  # what `--json` prints
    parts: Sequence[TableBlock | Facts | TextLine] = ()
    failed: int = 0  # the exit code, unless watching

    def drawn(self, console: Console) -> Group:
        drawn: list[RenderableType] = []
        for part in self.parts:
            if drawn and not isinstance(part, TextLine):
                drawn.append("")
            drawn.append(part.drawn(console.width))
        return Group(*drawn)

    def print_plain(self) -> None:
        blocks = ("\n".join(part.plain()) for part in self.parts)
        if shown := "\n\n".join(block for block in blocks if block):
            sys.stdout.write(shown + "\n")
        for part in self.parts:
            if isinstance(part, TextLine):
                sys.stderr.write(text(part.content) + "\n")


def table(rows: Sequence[Any], *columns: Column, empty: str = "", note: str = "") -> View:
    """Return a view of one table and a note below it. The rows are its data."""
    return View(rows, [TableBlock(columns, rows, empty), *([TextLine(note)] if note else [])])


# Output


def print_json(value: Any) -> None:
    """Print a value as JSON, indented on a terminal."""
    if sys.stdout.isatty():
        made = msgspec.json.format(msgspec.json.encode(value), indent=2)
        sys.stdout.write(made.decode() + "\n")
    else:
        print_line(value)


def print_line(value: Any) -> None:
    """Print a value as JSON on one line."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def _print(view: View, as_json: bool) -> None:
    console = Console()
    if as_json:
        print_json(view.data)
    elif console.is_terminal:
        console.print(view.drawn(console))
    else:
        view.print_plain()


def show(
    look: Callable[[], View],
    as_json: bool = False,
    watch: float | None = None,
    *,
    paced: bool = False,
) -> View | None:
    """Show the view once and return it, or show it every `watch` seconds until Ctrl-C. With
    `paced`, `look` itself waits until there is something new.
    """
    if watch is None:
        view = look()
        _print(view, as_json)
        return view
    with contextlib.suppress(KeyboardInterrupt):
        _watch(look, as_json, watch, 0.0 if paced else watch)
    return None


def _watch(
    look: Callable[[], View], as_json: bool, retry_seconds: float, sleep_seconds: float
) -> None:
    from penstock.cli import explain

    console = Console()
    view = look()  # the first failure ends the command, as without --watch
    if as_json or not console.is_terminal:
        while True:
            _print(view, as_json)
            sys.stdout.flush()
            time.sleep(sleep_seconds)
            view = look()
    with Live(view.drawn(console), console=console, auto_refresh=False) as screen:
        while True:
            time.sleep(sleep_seconds)
            try:
                view = look()
                screen.update(view.drawn(console), refresh=True)
            except PenstockError as error:
                screen.update(Group(Text(explain(error), "red"), view.drawn(console)), refresh=True)
                time.sleep(retry_seconds)
