"""Stored messages one by one, and their traces: what an operator looks at and mends."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from penstock.errors import InvalidRequest
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.engine import Queues
from penstock.wire.http.api.bodies import Paged, answer, decoder, moment
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import Route

ONE = "/api/v1/messages/{partition}/{transaction}"
Limit = Annotated[int, msgspec.Meta(ge=0, le=10_000)]


class ListQuery(Paged, frozen=True):
    queue: str | None = None
    partition: str | None = None
    ns: str | None = None
    task: str | None = None
    status: Literal["pending", "processing", "completed", "dead_letter", ""] | None = None
    from_: str | None = msgspec.field(name="from", default=None)
    to: str | None = None
    limit: Limit = 200
    cursor: str | None = None

    farther: ClassVar[str] = (
        "read on with cursor=<next of the page before>, or narrow it with from and to"
    )


class GroupQuery(msgspec.Struct, rename="camel", frozen=True):
    consumer_group: str | None = None


class PageQuery(Paged, frozen=True):
    limit: Limit = 100

    farther: ClassVar[str] = "use more than one name for so many traces"


class NamesQuery(Paged, frozen=True):
    limit: Limit = 50

    farther: ClassVar[str] = "ask for the traces of a name or of a message"


class BuryBody(msgspec.Struct, rename="camel"):
    consumer_group: str | None = None
    error: str | None = None


class TraceBody(msgspec.Struct, rename="camel"):
    transaction_id: str | None = None
    partition_id: str | None = None
    data: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    consumer_group: str | None = None
    event_type: str | None = None
    trace_names: str | list[str] | None = None


read_bury = decoder(BuryBody, {}, empty=BuryBody())
_IDS = "transactionId and partitionId are required"
read_trace = decoder(TraceBody, {"transactionId": _IDS, "partitionId": _IDS})


def routes(queues: Queues) -> list[Route]:
    messages, traces = queues.messages, queues.traces

    async def list_messages(request: Request) -> Response:
        args: ListQuery = request.args
        found = await messages.listing(
            queue=args.queue or None,
            partition=args.partition or None,
            namespace=args.ns or None,
            task=args.task or None,
            status=args.status or None,
            since=moment(args.from_, "from") if args.from_ else None,
            until=moment(args.to, "to") if args.to else None,
            limit=args.limit,
            offset=args.offset,
            cursor=args.cursor,
        )
        return answer(found)

    async def detail(request: Request) -> Response:
        return answer(await messages.detail(*_ids(request)))

    async def delete(request: Request) -> Response:
        partition, transaction = _ids(request)
        deleted = await messages.delete(partition, transaction)
        found = {"success": deleted, "partitionId": partition, "transactionId": transaction}
        if deleted:
            return answer(found | {"message": "Message deleted successfully"})
        return answer(found | {"message": "Message not found", "error": "Message not found"}, 404)

    async def retry(request: Request) -> Response:
        partition, transaction = _ids(request)
        groups = await messages.retry(partition, transaction, request.args.consumer_group or None)
        return answer(
            {
                "success": True,
                "partitionId": partition,
                "transactionId": transaction,
                "groups": groups,
            }
        )

    async def bury(request: Request) -> Response:
        partition, transaction = _ids(request)
        body = read_bury(request.body)
        group = request.args.consumer_group or body.consumer_group or QUEUE_MODE
        moved = await messages.bury(partition, transaction, group, body.error)
        return answer(
            {"success": moved, "partitionId": partition, "transactionId": transaction, "dlq": moved}
        )

    async def add_trace(request: Request) -> Response:
        body = read_trace(request.body)
        if not body.transaction_id or not body.partition_id:
            raise InvalidRequest(_IDS)
        if not bytes(body.data):
            raise InvalidRequest("data is required")
        names = [body.trace_names] if isinstance(body.trace_names, str) else body.trace_names
        trace = await traces.add(
            body.partition_id,
            body.transaction_id,
            bytes(body.data),
            group=body.consumer_group or QUEUE_MODE,
            event_type=body.event_type or "info",
            names=[name for name in names or [] if name],
        )
        return answer({"success": True, "traceId": trace})

    async def of_message(request: Request) -> Response:
        return answer({"traces": await traces.of_message(*_ids(request))})

    async def by_name(request: Request) -> Response:
        return answer(
            await traces.by_name(request.params["name"], request.args.limit, request.args.offset)
        )

    async def names(request: Request) -> Response:
        return answer(await traces.names(request.args.limit, request.args.offset))

    about: dict[str, Any] = {"answer": dict[str, Any], "tag": "messages"}
    trace: dict[str, Any] = {"answer": dict[str, Any], "tag": "traces"}
    return [
        Route(
            "GET",
            "/api/v1/messages",
            list_messages,
            query=ListQuery,
            summary="Messages, newest first",
            **about,
        ),
        Route(
            "GET",
            ONE,
            detail,
            summary="A message with its payload and what groups did with it",
            **about,
        ),
        Route("DELETE", ONE, delete, summary="Delete a message", **about),
        Route(
            "POST",
            f"{ONE}/retry",
            retry,
            query=GroupQuery,
            summary="Deliver a message again",
            **about,
        ),
        Route(
            "POST",
            f"{ONE}/dlq",
            bury,
            query=GroupQuery,
            summary="Move a message to a group's dead letters",
            **about,
        ),
        Route(
            "POST",
            "/api/v1/traces",
            add_trace,
            body=TraceBody,
            decode=False,
            summary="Note about a message",
            **trace,
        ),
        Route(
            "GET",
            "/api/v1/traces/names",
            names,
            query=NamesQuery,
            summary="Names of traces",
            **trace,
        ),
        Route(
            "GET",
            "/api/v1/traces/by-name/{name}",
            by_name,
            query=PageQuery,
            summary="Traces by name",
            **trace,
        ),
        Route(
            "GET",
            "/api/v1/traces/{partition}/{transaction}",
            of_message,
            summary="A message's traces",
            **trace,
        ),
    ]


def _ids(request: Request) -> tuple[str, str]:
    return request.params["partition"], request.params["transaction"]
