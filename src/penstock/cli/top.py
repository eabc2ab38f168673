"""`penstock top`: show the broker live on a full screen, with rates. Keys choose the order.

One thread reads the live figures; the main thread waits for keys and draws. After an error, the
screen shows it above the last figures.
"""

import contextlib
import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import SegmentLines
from rich.text import Text

from penstock.cli import BrokerApi, app, explain
from penstock.cli.live import LiveFigures
from penstock.cli.status import whole
from penstock.cli.tables import View, show
from penstock.errors import PenstockError

KEY_SECONDS = 0.2  # wait for a key before checking for new figures
FOOTER_LINES = 6  # including the error, so that the keys stay visible
OTHER_LINES = 14  # lines of the screen that do not show queues
SORTS = {
    "n": ("name", "name"),
    "w": ("-waiting", "waiting"),
    "p": ("-pushedRate", "pushed/s"),
    "d": ("-completedRate", "completed/s"),
    "o": ("-oldest", "oldest"),
    "x": ("-deadLetters", "dead"),
    "g": ("-groups", "groups"),
}
QUIT = ("q", "\x03", "\x04")


@app.command
def top(
    *,
    interval: Annotated[float, Parameter(validator=Number(gte=0.2))] = 1.0,
    sort: Literal["n", "w", "p", "d", "o", "x", "g"] = "w",
    json: Annotated[bool, Parameter(alias="-J")] = False,
    api: BrokerApi = BrokerApi(),
) -> None:
    """Watch the whole broker live.

    Keys: n w p d o x g sort by name, waiting, pushed/s, completed/s, oldest, dead letters, groups;
    r reverses the order, q quits. In a pipe, or with --json, it prints the figures at every
    interval.

    Example: `penstock top --sort p`

    :param interval: Seconds between updates.
    :param sort: Initial order, by the key to press.
    :param json: Print JSON instead of text.
    """
    figures = LiveFigures(api)
    if json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        show(lambda: whole(api, figures.take(interval)), json, interval, paced=True)
    else:
        _Screen(api, figures, interval).run(SORTS[sort][0])


class _Screen:
    def __init__(self, api: BrokerApi, figures: LiveFigures, interval: float) -> None:
        self._api = api
        self._figures = figures
        self._interval = interval
        self._console = Console()
        self._new = threading.Event()  # figures or an error to draw
        self._stopped = threading.Event()
        self._now: dict[str, Any] = {}
        self._error = ""

    def run(self, sort: str) -> None:
        self._now = self._figures.take()  # fails like any other command
        threading.Thread(target=self._read, daemon=True).start()  # it ends with the process
        view = self._look(sort)
        try:
            with (
                _single_keys(),
                Live(
                    self._drawn(view, sort), console=self._console, screen=True, auto_refresh=False
                ) as live,
            ):
                while (key := _key(KEY_SECONDS)) not in QUIT:
                    if key in SORTS:
                        sort = SORTS[key][0]
                    elif key == "r":
                        sort = sort.removeprefix("-") if sort.startswith("-") else f"-{sort}"
                    elif not self._new.is_set():
                        continue
                    self._new.clear()
                    try:
                        view = self._look(sort)
                    except PenstockError as error:
                        self._error = explain(error)
                    live.update(self._drawn(view, sort), refresh=True)
        except KeyboardInterrupt:
            pass
        finally:
            self._stopped.set()

    def _read(self) -> None:
        while not self._stopped.is_set():
            try:
                self._now, self._error = self._figures.take(self._interval), ""
            except PenstockError as error:
                self._error = explain(error)
                self._stopped.wait(self._interval)
            self._new.set()

    def _look(self, sort: str) -> View:
        rows = max(1, self._console.height - OTHER_LINES)
        return whole(self._api, self._now, sort, rows, brief=True)

    def _drawn(self, view: View, sort: str) -> RenderableType:
        keys = " · ".join(
            f"{key} {title}{'*' if by.strip('-') == sort.strip('-') else ''}"
            for key, (by, title) in SORTS.items()
        )
        footer = Text(f"sort: {keys}\nr reverse · q quit", "dim")
        error = [Text(self._error, "red")] if self._error else []
        lines = self._console.render_lines(view.drawn(self._console), pad=False)
        room = max(1, self._console.height - FOOTER_LINES - len(error))
        return Group(*error, SegmentLines(lines[:room], new_lines=True), "", footer)


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Read keys one by one, without echo."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _key(seconds: float) -> str:
    """Return the key pressed within this time, or nothing."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if not ready:
        return ""
    pressed = os.read(sys.stdin.fileno(), 1)
    return pressed.decode("latin-1") if pressed else "q"
