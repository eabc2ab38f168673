"""Where the client looked for it before the outbox needed it too."""

from penstock.protocol.payload import check_payload

__all__ = ["check_payload"]
