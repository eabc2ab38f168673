"""One broker for all tests of commands, and the commands as a shell would run them."""

import fcntl
import json
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.cli import app
from tests.conftest import fresh_database
from tests.support import guard
from tests.support.broker import BrokerProcess
from tests.support.cli import CliRunner


@pytest.fixture(scope="session")
def broker(postgres, tmp_path_factory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("cli")
    with BrokerProcess(directory, database_url=fresh_database(postgres)) as broker:
        yield broker


class Shell:
    """Runs commands in this process, with pipes around them."""

    def __init__(self, broker: BrokerProcess, commands: Any = app) -> None:
        self._commands = commands
        host, port = broker.tcp
        self.env = {"PENSTOCK_URL": broker.url, "PENSTOCK_BROKER": f"{host}:{port}"}

    def run(self, *words: str, given: str = "", code: int = 0) -> Any:
        done = CliRunner(env=self.env).invoke(self._commands, list(words), input=given)
        assert done.exit_code == code, done.output
        return done

    def lines(self, *words: str, given: str = "", code: int = 0) -> list[Any]:
        shown = self.run(*words, given=given, code=code).stdout
        return [json.loads(line) for line in shown.splitlines()]

    def rows(self, *words: str) -> list[dict[str, str]]:
        """The first table of what a pipe gets."""
        header, *rows = self.run(*words).stdout.partition("\n\n")[0].splitlines()
        return [dict(zip(header.split("\t"), row.split("\t"), strict=True)) for row in rows if row]


class Terminal:
    """A command in a process of its own, on a terminal of 80 columns."""

    def __init__(self, *words: str, lines: int = 40, **env: str) -> None:
        self.shown = ""
        pid, self._descriptor = pty.fork()
        if pid == 0:
            os.environ.update(env, TERM="xterm")
            os.environ.pop("COLUMNS", None)
            os.execv(sys.executable, [sys.executable, "-m", "penstock", *words])
        self._pid = pid
        guard.watch(pid)
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 80, 0, 0))

    def wait_for(self, condition: Callable[[str], bool], seconds: float = 60.0) -> str:
        """Read on until what was shown since the last call fits."""
        begun, deadline = len(self.shown), time.monotonic() + seconds
        while not condition(self.shown[begun:]):
            assert time.monotonic() < deadline, self.shown
            if select.select([self._descriptor], [], [], 1.0)[0]:
                self.shown += os.read(self._descriptor, 65_536).decode()
        return self.shown[begun:]

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def exit_code(self) -> int:
        while True:
            try:
                if not (more := os.read(self._descriptor, 65_536)):
                    break
                self.shown += more.decode()
            except OSError:  # the other end is closed
                break
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
