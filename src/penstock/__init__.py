"""Penstock: queues on PostgreSQL, topics on disk, pipelines on Spark, in one broker.

`from penstock import Client` imports the client of a broker. This package also has the classes that
programs construct beside it; `penstock.errors` has the errors, `penstock.types` the types of
results. The client is loaded on first access, so that the server and the command line do not load
it. Type checkers read `__init__.pyi`.
"""

import importlib.util
import warnings
from typing import Any

__version__ = "0.2.0"


def _client() -> Any:
    return importlib.import_module("penstock.client")


def __getattr__(name: str) -> Any:
    # `from penstock import errors` calls this first, and needs no client.
    if importlib.util.find_spec(f"penstock.{name}"):
        return importlib.import_module(f"penstock.{name}")
    if not name.startswith("_"):
        if name in _client().__all__:
            return getattr(_client(), name)
        for home in ("penstock.types", "penstock.errors"):  # former names, for one more release
            module = importlib.import_module(home)
            if name in getattr(module, "__all__", vars(module)):
                text = f"import {name} from {home}; the next release removes penstock.{name}"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                return getattr(module, name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), *_client().__all__))
