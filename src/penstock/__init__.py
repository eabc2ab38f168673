"""Penstock: queues on PostgreSQL, topics on disk, pipelines on Spark, in one broker.

`from penstock import Client` gives the client of a broker; it is imported when first asked for, and nothing of the
server with it.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.client import Client as Client
    from penstock.client import SyncClient as SyncClient

_FROM_CLIENT = ("Client", "SyncClient")


def __getattr__(name: str) -> Any:
    if name in _FROM_CLIENT:
        from penstock import client

        return getattr(client, name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), *_FROM_CLIENT))
