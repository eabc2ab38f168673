"""Consumer groups: who reads what, how far behind, and moving them."""

from penstock.contract import operations
from penstock.contract.groups import Group, GroupDeleted, GroupPositions, Seek
from penstock.contract.queries import DeleteGroupQuery, GroupListQuery, GroupPage, SeekBody
from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.times import time_field
from penstock.queues.engine import Queues
from penstock.wire.http.routes import serves


class GroupsApi:
    tag = "groups"

    def __init__(self, queues: Queues) -> None:
        self._groups = queues.groups

    @serves(operations.LIST_GROUPS)
    async def list_all(self, args: GroupListQuery) -> list[Group]:
        return await self._groups.listing(
            None, args.queue, args.limit, (args.after_queue, args.after_group)
        )

    @serves(operations.DESCRIBE_GROUP)
    async def describe(self, group: str, args: GroupPage) -> dict[str, GroupPositions]:
        positions = await self._groups.describe(group, args.limit, args.offset)
        if not positions and not await self._groups.listing(group, limit=1):
            raise NotFound(f"Consumer group not found: {group}")
        queues: dict[str, GroupPositions] = {}
        for position in positions:
            queues.setdefault(position.queue, GroupPositions([])).partitions.append(position)
        return queues

    @serves(operations.DELETE_GROUP)
    async def delete(self, group: str, queue: str | None, args: DeleteGroupQuery) -> GroupDeleted:
        return await self._groups.delete(group, queue, metadata=args.delete_metadata)

    @serves(operations.SEEK)
    async def seek(self, group: str, queue: str, body: SeekBody | None) -> Seek:
        body = body or SeekBody()
        if body.to_end + body.to_beginning + (body.timestamp is not None) != 1:
            raise InvalidRequest("Name one of toEnd, toBeginning and timestamp")
        at = time_field(body.timestamp, "timestamp") if body.timestamp is not None else None
        to = "beginning" if body.to_beginning else "end"
        move = self._groups.preview if body.dry_run else self._groups.seek
        return await move(group, queue, moment=at, to=to)
