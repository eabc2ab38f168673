"""Format log lines: text on a terminal, JSON everywhere else."""

import logging
import sys
import time
from typing import Any

import msgspec

_COLOURS = {
    "WARNING": "\x1b[33m",
    "ERROR": "\x1b[31m",
    "CRITICAL": "\x1b[31;1m",
    "DEBUG": "\x1b[2m",
}


class TextLines(logging.Formatter):
    """Format a record as `12:00:01 info  penstock.broker  ready in 0.4 s`."""

    def __init__(self, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level, part = record.levelname.lower(), record.name.removeprefix("penstock.")
        line = f"{clock} {level:<7} {part:<9} {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        if self._colour and record.levelname in _COLOURS:
            line = f"{_COLOURS[record.levelname]}{line}\x1b[0m"
        return line


class JsonLines(logging.Formatter):
    """Format a record as one JSON object: time, level, logger, message and traceback."""

    def format(self, record: logging.LogRecord) -> str:
        created = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{created}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up(level: str, style: str) -> None:
    """Send everything under `penstock` (and warnings of libraries) to standard error."""
    terminal = sys.stderr.isatty()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        TextLines(colour=terminal)
        if style == "text" or (style == "auto" and terminal)
        else JsonLines()
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(level.upper())
