"""The space of a disk that refuses writes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import StorageFull
from penstock.io.space import Space


def test_the_reason_stays_the_same_while_more_writes_are_refused() -> None:
    disk: Any = SimpleNamespace(free_bytes=lambda _: free)
    space, free = Space(disk, Path("/"), 100, "appends"), 120
    for free in (120, 110):
        with pytest.raises(StorageFull, match=f"has {free} bytes free"):
            space.take(50)
        assert space.full == "the disk has 120 bytes free, of which 100 are kept in reserve"
