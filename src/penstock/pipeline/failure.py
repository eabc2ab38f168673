"""What went wrong, told in a line or two: the innermost cause, without Spark's stack."""

import re
import traceback
from collections.abc import Iterator

from penstock.errors import ConfigError, PenstockError

FULL = "No space left on device"
WRITING = re.compile(r"writing rows to (?:file:)?(\S+?)\.?\s")


class PipelineFailed(PenstockError):
    """A query ended with an error; the text is the cause."""


def step_failed(name: str, error: Exception) -> ConfigError:
    """A step could not be built: which, why, and for a function of the user's the line that
    raised.
    """
    ours = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
    ]
    last = ours[-1] if ours else None
    place = (
        f" ({last.filename}, line {last.lineno})"
        if last and "/penstock/pipeline/" not in last.filename
        else ""
    )
    kind = "" if type(error).__module__.startswith("pyspark") else f"{type(error).__name__}: "
    return ConfigError(f"step {name}: {kind}{cause(error)}{place}")


def _chain(error: BaseException | None) -> Iterator[str]:
    """What Spark says, and what that came from: a write that could not even be aborted tells the
    reason there only.
    """
    for _ in range(8):
        if error is None:
            return
        yield str(error)
        error = getattr(error, "_cause", None) or error.__cause__


def cause(error: BaseException) -> str:
    """The innermost reason, in a line or two: a Python error raised in a task, or Spark's own
    message.
    """
    text = "\n".join(_chain(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("penstock.")]
    if ours:
        return ours[-1].partition(": ")[2] or ours[-1]
    if FULL in text:
        target = WRITING.search(text)
        place = (
            target[1]
            if target
            else "the checkpoint, the target or Spark's own files (spark.local.dir)"
        )
        return f"the disk is full: no space is left for {place}. Free some and run it again"
    python = [
        line
        for line in lines
        if ("Error: " in line or "Exception: " in line) and not line.startswith("at ")
    ]
    return (python[-1] if python else lines[0] if lines else type(error).__name__).removeprefix(
        "Caused by: "
    )[:2000]
