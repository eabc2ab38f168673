"""Penstock: queues on PostgreSQL, topics on disk, pipelines on Spark, in one broker.

`from penstock import Client` gives the client of a broker, and everything beside it that a program
may catch, annotate or construct. It is imported when first asked for, so that the server and the
command line do not load it (type checkers see it in `__init__.pyi`).
"""

import importlib.util
from typing import Any

__version__ = "0.2.0"


def _client() -> Any:
    return importlib.import_module("penstock.client")


def __getattr__(name: str) -> Any:
    # `from penstock import errors` asks here first, and needs no client.
    if importlib.util.find_spec(f"penstock.{name}"):
        return importlib.import_module(f"penstock.{name}")
    if not name.startswith("_") and name in _client().__all__:
        return getattr(_client(), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), *_client().__all__))
