"""Queues: configured, emptied and deleted."""

from typing import Any

import msgspec

from penstock.contract import operations
from penstock.contract.queries import ClearQuery
from penstock.contract.queues import (
    ConfigureBody,
    Configured,
    OptionMeaning,
    OptionsOfQueue,
    QueueCleared,
    QueueDeleted,
)
from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.status import NOT_JSON
from penstock.queues.engine import Queues
from penstock.queues.options import BY_NAME, OPTIONS, parse
from penstock.wire.http.decoding import body_decoder
from penstock.wire.http.messages import Request
from penstock.wire.http.routes import serves

ABOUT = [OptionMeaning(option.name, option.default, option.meaning) for option in OPTIONS]
read_options = body_decoder(dict[str, msgspec.Raw])
read_configure = body_decoder(ConfigureBody)


class ConfigureApi:
    tag = "queues"

    def __init__(self, queues: Queues) -> None:
        self._admin = queues.admin
        self._catalog = queues.catalog

    @serves(operations.CONFIGURE_QUEUE)
    async def configure(self, request: Request) -> Configured:
        body = read_configure(request.body)
        if not body.queue:
            raise InvalidRequest("queue is required")
        misplaced = [name for name in read_options(request.body) if name in BY_NAME]
        if misplaced:  # it would silently not be in force
            raise InvalidRequest(f"{', '.join(misplaced)} must be in options")
        options = parse({name: _option(name, raw) for name, raw in (body.options or {}).items()})
        return await self._admin.configure(body.queue, options, body.namespace, body.task)

    @serves(operations.GET_QUEUE_OPTIONS)
    async def options(self, queue: str) -> OptionsOfQueue:
        info = await self._catalog.queue(queue)
        if info is None:
            raise NotFound(f"queue '{queue}' does not exist")
        return OptionsOfQueue(info.name, info.options, ABOUT)

    @serves(operations.CHANGE_QUEUE_OPTIONS)
    async def change(self, request: Request, queue: str) -> OptionsOfQueue:
        values = {name: _option(name, raw) for name, raw in read_options(request.body).items()}
        options = parse(values)
        only = {BY_NAME[name].field for name, value in values.items() if value is not None}
        return OptionsOfQueue(queue, await self._admin.change(queue, options, only), ABOUT)

    @serves(operations.DELETE_QUEUE)
    async def delete(self, queue: str) -> QueueDeleted:
        return QueueDeleted(True, queue, await self._admin.delete(queue))

    @serves(operations.CLEAR_QUEUE)
    async def clear(self, queue: str, args: ClearQuery) -> QueueCleared:
        partition = args.partition or None
        return QueueCleared(queue, partition, await self._admin.clear(queue, partition))


def _option(name: str, raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except NOT_JSON as error:
        raise InvalidRequest(f"option {name[:60]} is not understood: {error}") from None
