"""Penstock: queues on PostgreSQL, topics on disk, pipelines on Spark, in one broker.

`from penstock import Client` gives the client of a broker. It is imported when first asked for, so
that the server and the command line do not load it (type checkers see it in `__init__.pyi`).
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_FROM_CLIENT = ("Client", "SyncClient")


def __getattr__(name: str) -> Any:
    if name in _FROM_CLIENT:
        return getattr(importlib.import_module("penstock.client"), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), *_FROM_CLIENT))
