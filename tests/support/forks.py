"""Forks brokers from a process that has imported the program: `python -m tests.support.forks`.

Importing is most of a broker's start, and a run of the suite starts hundreds. Orders and answers are
those of `penstock.server.forks`, but a broker has the database that its settings name. Brokers that
still run when standard input ends are left alone: the run reports them, and the guard ends them.
"""

import gc
import importlib
import json
import os
import signal
import sys
from typing import Any

import msgspec

from penstock.config.load import parse_settings
from penstock.server.forks import LATER, Forks, StartBroker
from tests.support import leftovers


class StartProcess(StartBroker):
    directory: str  # where it works; `env` is all of its environment


class PlainForks(Forks):
    def __init__(self) -> None:
        self._running: set[int] = set()

    def _serve(self, order: Any) -> int:
        from penstock.server import process

        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(order.directory)
        for name in os.environ.keys() - order.env.keys():
            del os.environ[name]
        leftovers.note_test()
        return process.main(json.dumps([None, order.flags | parse_settings(order.settings)]))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C ends the tests, and then our input ends
    forks = PlainForks()
    for module in LATER:
        importlib.import_module(module)
    gc.freeze()  # otherwise a child's collector copies every page
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=StartProcess | int)
        answer = forks.poll(order) if isinstance(order, int) else forks.start(order)
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
