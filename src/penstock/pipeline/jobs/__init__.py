"""The built-in jobs: each a function here, each a command (`penstock pipeline run <job> ...`)."""

from collections.abc import Callable

Say = Callable[[str], None]  # what a job tells of its progress


def quiet(_: str) -> None:
    """For those who do not ask."""
