"""The audit log over HTTP."""

from penstock.contract import operations
from penstock.contract.queries import AuditQuery
from penstock.contract.tasks import AuditPage
from penstock.monitor.audit import Audit
from penstock.wire.http.routes import serves


class AuditApi:
    tag = "system"

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    @serves(operations.LIST_CHANGES)
    async def page(self, args: AuditQuery) -> AuditPage:
        return await self._audit.page(args.filter, args.before, args.limit)
