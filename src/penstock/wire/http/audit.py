"""Record the requests that change something in the audit log.

A route declares it: `audit=Audited("queue.delete")`. Its handler is wrapped when the router is
built, so requests that move messages (push, pop, ack) cost nothing. A request is recorded if it
succeeded, or if it failed in the broker, since it may have done a part of its work. A refused
request has changed nothing and is not recorded.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from penstock.contract.operation import Audited
from penstock.monitor.audit import Record
from penstock.protocol.status import NOT_JSON, status_of
from penstock.wire.http.messages import Answer, Handler, Request, Response, finished

_NOT_RECORDED = ("access_token",)
_NAMES = ("queue", "topic", "name", "group", "consumerGroup", "partition", "transaction")


def recording(record: Record, audited: Audited, call: Handler) -> Handler:
    """Return the handler of a route that changes something, with a record of each change."""

    async def recorded(request: Request) -> Answer:
        try:
            answer = await finished(call(request))
        except Exception as error:
            if status_of(error).http >= 500:
                await record(*_described(audited, request, {"error": str(error)}))
            raise
        if isinstance(answer, Response) and answer.status < 400:
            counts = _fields(bytes(answer.body), audited.answer)
            if not counts.pop("dryRun", False):
                await record(*_described(audited, request, counts))
        return answer

    return recorded


def _described(
    audited: Audited, request: Request, outcome: dict[str, Any]
) -> tuple[str, str, str, dict[str, Any]]:
    query = parse_qsl(request.head.query)
    asked = _fields(request.body, audited.body)
    asked |= {name: value for name, value in query if name not in _NOT_RECORDED}
    target = request.params.get("name", "")  # of a schedule, say; its queue is a property
    if not target:
        target = object_of({**asked, **request.params})
        asked = {name: value for name, value in asked.items() if name not in _NAMES}
    action = audited.action.format_map(request.params)
    return request.who, action, target, asked | outcome


def object_of(named: Mapping[str, Any]) -> str:
    """Return the object of a change: `orders`, `orders@billing` or `orders/c-7@billing`."""
    thing = named.get("queue") or named.get("topic") or named.get("name")
    path = "/".join(
        str(part) for part in (thing, named.get("partition"), named.get("transaction")) if part
    )
    group = named.get("group") or named.get("consumerGroup")
    return f"{path}@{group}" if group else path


def _fields(body: bytes, names: tuple[str, ...]) -> dict[str, Any]:
    if not names or not body:
        return {}
    try:
        value = msgspec.json.decode(body)
    except NOT_JSON:
        return {}  # only the handler knows what it is
    if not isinstance(value, dict):
        return {}
    return {name: value[name] for name in names if value.get(name) is not None}
