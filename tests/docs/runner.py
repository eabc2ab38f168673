"""Runs the blocks of a page as a reader would: one after the other, in one directory, with what they
print compared with what the page says.

Addresses of a broker with its defaults are replaced by those of the one that the test has. Python
blocks of a page share their names, as in a notebook, and may `await`.
"""

import ast
import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path
from typing import Any

from tests.docs.blocks import Block, blocks, prints
from tests.support import guard

BLOCK_SECONDS = 120  # one block may take; far more than any needs
SHELL = ["bash", "-euo", "pipefail", "-c"]


class Background:
    """A block that runs beside the others, with what it has printed so far."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.printed = ""
        guard.watch(process.pid)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(60)
        self._reader.join(10)


class PageRunner:
    """One page in a directory of its own."""

    def __init__(
        self,
        directory: Path,
        environment: dict[str, str],
        addresses: dict[str, str],
        block_seconds: float = BLOCK_SECONDS,
    ) -> None:
        self.directory = directory
        self._block_seconds = block_seconds
        self.environment = environment
        self._addresses = addresses  # as a page writes them -> where the broker is
        self._names: dict[str, Any] = {"__name__": "page"}
        self._background: list[Background] = []

    def run(self, page: Path) -> int:
        """How many blocks were run."""
        count = 0
        with asyncio.Runner() as loop:
            try:
                for block in blocks(page):
                    text = self._replaced(block.text)
                    if block.kind == "file":
                        (self.directory / block.about).write_text(text)
                    elif block.kind == "appears there":
                        self._wait_for(self._background[-1], block, f"...\n{text}")
                    elif block.is_run:
                        self._run(block, text, loop)
                        count += 1
            finally:
                for process in reversed(self._background):
                    process.stop()
        return count

    def _replaced(self, text: str) -> str:
        for written, real in self._addresses.items():
            text = text.replace(written, real)
        return text

    def _run(self, block: Block, text: str, loop: asyncio.Runner) -> None:
        expected = None if block.output is None else self._replaced(block.output)
        if block.kind == "background":
            self._start(block, text, expected)
            return
        printed = self._shell(block, text) if block.language == "bash" else self.python(text, loop)
        if expected is not None:
            assert prints(expected, printed), (
                f"{block.name} prints\n{printed}\nand the page says\n{expected}"
            )

    def _start(self, block: Block, text: str, expected: str | None) -> None:
        process = subprocess.Popen(
            [*SHELL, text],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        running = Background(process)
        self._background.append(running)
        if expected is not None:
            self._wait_for(running, block, expected)

    def _wait_for(self, running: Background, block: Block, expected: str) -> None:
        end = time.monotonic() + self._block_seconds
        while not prints(expected + "...\n", running.printed + "\n-"):
            assert time.monotonic() < end, (
                f"{block.name} prints\n{running.printed}\nand the page says\n{expected}"
            )
            time.sleep(0.02)

    def _shell(self, block: Block, text: str) -> str:
        done = subprocess.run(
            [*SHELL, text],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self._block_seconds,
        )
        assert done.returncode == 0, f"{block.name} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def python(self, text: str, loop: asyncio.Runner | None = None) -> str:
        """Run it with the names of the page; what it prints."""
        code = compile(textwrap.dedent(text), "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        printed = io.StringIO()
        before = dict(os.environ)
        os.environ.update(self.environment)
        try:
            with contextlib.chdir(self.directory), contextlib.redirect_stdout(printed):
                result = types.FunctionType(code, self._names)()
                if asyncio.iscoroutine(result):
                    assert loop is not None
                    loop.run(result)
        finally:
            os.environ.clear()
            os.environ.update(before)
        return printed.getvalue()


def clean_environment(programs: Path, **variables: str) -> dict[str, str]:
    """PATH begins with `programs` and the environment of these tests, without anybody's settings."""
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    kept.pop("DATABASE_URL", None)
    return {**kept, "PATH": path, **variables}
