"""The audit log over HTTP."""

from typing import Annotated

import msgspec

from penstock.monitor.audit import Audit, Entry
from penstock.wire.auth import Role
from penstock.wire.http.routes import route


class AuditQuery(msgspec.Struct, frozen=True):
    filter: str = ""  # part of who, action or object
    before: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class AuditPage(msgspec.Struct):
    entries: list[Entry]
    next: int | None  # `before` of the next page; null: these were the last


class AuditApi:
    tag = "system"

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    @route("GET", "/api/v1/audit", role=Role.ADMIN)
    async def page(self, args: AuditQuery) -> AuditPage:
        """Audit log: who changed what and when, newest first."""
        return AuditPage(*await self._audit.page(args.filter, args.before, args.limit))
