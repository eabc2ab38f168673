"""Sizes, durations and shares as people write them: `256Ki`, `1Gi`, `100ms`, `5m`, `10%`."""

import math
import re
from decimal import Decimal

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]i?)?B?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d|w)")

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def parse_size(text: str | int | float) -> int:
    """Return the bytes in `text`: a number, or one with Ki/Mi/Gi/Ti/Pi (1024) or K/M/G/T/P
    (1000).
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        if not math.isfinite(text) or text < 0 or text != int(text):
            raise ValueError(text)
        return int(text)
    match = _SIZE.fullmatch(str(text).strip())
    if not match:
        raise ValueError(text)
    number, unit = match.groups()
    if unit is None:
        return int(Decimal(number))
    base = 1024 if unit[1:].lower() == "i" else 1000
    return int(Decimal(number) * base ** ("KMGTP".index(unit[0].upper()) + 1))


def parse_duration(text: str | int | float) -> float:
    """Return the seconds in `text`: a number (seconds), or `100ms`, `5m`, `1h30m`."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        if not math.isfinite(text) or text < 0:
            raise ValueError(text)
        return float(text)
    text = str(text).strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if not text or _DURATION.sub("", text).strip():
        raise ValueError(text)
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))


def parse_share(text: str | int | float) -> float:
    """Return a part of a whole, 0 to 1: `0.1`, or `10%`."""
    if isinstance(text, bool):
        raise ValueError(text)
    number = str(text).strip()
    share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    if not 0 <= share <= 1:  # also false for NaN
        raise ValueError(text)
    return share


def format_size(size: int) -> str:
    """Format `size` with the largest unit that divides it, so that it reads back the same."""
    for power in (5, 4, 3, 2, 1):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{'KMGTP'[power - 1]}i"
    return str(size)


def format_duration(seconds: float) -> str:
    """Format `seconds` in the largest unit that keeps them whole, else in seconds."""
    if seconds and seconds < 1 and abs(seconds * 1000 - round(seconds * 1000)) < 1e-9:
        return f"{round(seconds * 1000)}ms"
    for unit in ("d", "h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{int(seconds // _SECONDS[unit])}{unit}"
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"
