"""Runs commands in the test's own process.

Typer makes all commands of the program again for each run, which takes longer than most of them do:
here they are made once, and again when a module has brought more of them.
"""

import functools
import sys
from typing import Any

from typer import testing
from typer.testing import CliRunner

__all__ = ["CliRunner"]

_make = testing._get_command


@functools.cache
def _made(app: Any, _modules: int) -> Any:
    return _make(app)


def _get_command(app: Any) -> Any:
    return _made(app, sum(name.startswith("penstock.cli") for name in sys.modules))


testing._get_command = _get_command
