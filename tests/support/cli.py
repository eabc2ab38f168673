"""Runs commands in the test's own process, with pipes around them."""

import io
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest import mock

from cyclopts import App

from penstock import cli


@dataclass
class Result:
    exit_code: int
    stdout_bytes: bytes
    stderr_bytes: bytes

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode()

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode()

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class CliRunner:
    """Runs command lines; `env` is added to the environment."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = dict(env or {})

    def invoke(
        self,
        commands: App,
        words: Sequence[Any],
        input: str | bytes = "",
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Run a command of the program, or of one of its groups."""
        group = [] if commands is cli.app else [commands.name[0]]
        given = input.encode() if isinstance(input, str) else input
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in "oe")
        stdin = io.TextIOWrapper(io.BytesIO(given), "utf-8")
        with (
            mock.patch.dict(os.environ, {**self._env, **(env or {})}),
            mock.patch.object(sys, "stdin", stdin),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            code = cli.run([*group, *map(str, words)])
        return Result(code, *(one.buffer.getvalue() for one in (out, err)))
