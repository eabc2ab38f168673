"""The built-in jobs: each a function here, each a command (`penstock pipeline run <job> ...`)."""

from collections.abc import Callable

Say = Callable[[str], None]  # called with a job's progress


def quiet(_: str) -> None:
    """Ignore the progress."""
