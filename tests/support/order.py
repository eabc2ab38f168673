"""A random order of the tests, which finds tests that need one another.

TEST_ORDER=<number> in the environment chooses it; workers of pytest-xdist must agree on it. The
tests of a module stay together, and so do the modules of a package, because they share fixtures.
"""

import itertools
import os
from random import Random

import pytest

SEED = int(os.environ.get("TEST_ORDER") or 0)


def shuffle(items: list[pytest.Item]) -> None:
    """Put the items into the order that TEST_ORDER names; without it, leave them."""
    if SEED:
        items[:] = _shuffled(items, 0, Random(SEED))


def _shuffled(items: list[pytest.Item], depth: int, random: Random) -> list[pytest.Item]:
    """Shuffle what is below the same `depth` parts of a path, keeping directories together."""
    if len({item.path for item in items}) == 1:
        random.shuffle(items)
        return items
    items = sorted(items, key=lambda item: item.path.parts[: depth + 1])
    groups = itertools.groupby(items, key=lambda item: item.path.parts[: depth + 1])
    parts = [_shuffled(list(group), depth + 1, random) for _, group in groups]
    random.shuffle(parts)
    return [item for part in parts for item in part]
