"""Celery on Penstock: a transport of kombu, the messaging library that Celery uses.

    import penstock.celery
    app = Celery("shop", broker="penstock://127.0.0.1:6632")

The import registers the schemes `penstock://` and `penstocks://` (TLS). Without it, set
`broker_transport = "penstock.celery:Transport"`.

- `channel` maps what kombu declares, publishes and consumes to queues, groups and partitions.
- `kombu_transport` waits for messages: in Celery's event loop, or blocking.
"""

from kombu.transport import TRANSPORT_ALIASES

from penstock.celery.kombu_transport import Transport

__all__ = ["Transport"]

TRANSPORT_ALIASES.setdefault("penstock", "penstock.celery:Transport")
TRANSPORT_ALIASES.setdefault("penstocks", "penstock.celery:Transport")
