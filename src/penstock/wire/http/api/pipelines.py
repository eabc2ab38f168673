"""Pipelines report here, and operators see what runs, how far behind it is and what went wrong
last.
"""

from typing import Annotated, Any, Literal

import msgspec

from penstock.pipeline_registry import Pipelines
from penstock.topics.compaction import Swapped
from penstock.topics.store import TopicStore
from penstock.wire.auth import Role
from penstock.wire.http.messages import EMPTY, Request, Response, json_response
from penstock.wire.http.routes import Route

TAG = "pipelines"


class Report(msgspec.Struct):
    """What a pipeline says of itself."""

    state: str
    at: float = 0.0
    batch: int = -1
    rows: int = 0
    rows_per_second: float = 0.0
    batch_ms: int = 0
    lag: int | None = None
    error: str | None = None
    host: str = ""
    pid: int = 0
    started_at: float = 0.0
    master: str = ""


class Wish(msgspec.Struct):
    stop: bool


class Archived(msgspec.Struct):
    offset: int


class Policy(msgspec.Struct):
    policy: Literal["delete", "compact"]


class Compact(msgspec.Struct):
    """Sealed segments, and which records of them to keep: a bit per offset from the first base on,
    lowest bit first.
    """

    incarnation: str
    bases: list[Annotated[int, msgspec.Meta(ge=0)]]
    keep: bytes


def routes(pipelines: Pipelines, topics: TopicStore) -> list[Route]:
    def put(request: Request) -> Response:
        stop = pipelines.put(request.params["name"], msgspec.to_builtins(request.data))
        return json_response(Wish(stop))

    def listing(_: Request) -> Response:
        return json_response({"pipelines": pipelines.all()})

    def get(request: Request) -> Response:
        return json_response(pipelines.get(request.params["name"]))

    def stop(request: Request) -> Response:
        return json_response(pipelines.ask_to_stop(request.params["name"]))

    def forget(request: Request) -> Response:
        pipelines.forget(request.params["name"])
        return EMPTY

    async def archived(request: Request) -> Response:
        topic = topics.require(request.params["topic"])
        await topic.mark_archived(request.data.offset)
        return json_response(request.data)

    async def policy(request: Request) -> Response:
        topic = topics.require(request.params["topic"])
        await topic.set_policy(request.data.policy)
        return json_response(request.data)

    async def roll(request: Request) -> Response:
        topic = topics.require(request.params["topic"])
        await topic.seal()
        return json_response({"topic": topic.name, "active": topic.segments[-1].base})

    async def compact(request: Request) -> Response:
        body: Compact = request.data
        done = await topics.compact(
            request.params["topic"], body.bases, body.keep, body.incarnation
        )
        return json_response(done)

    one = "/api/v1/pipelines/{name}"
    known = dict[str, Any]
    return [
        Route(
            "GET",
            "/api/v1/pipelines",
            listing,
            answer=known,
            summary="Every pipeline that has reported",
            tag=TAG,
        ),
        Route("GET", one, get, answer=known, summary="One pipeline's last report", tag=TAG),
        Route(
            "PUT",
            one,
            put,
            body=Report,
            answer=Wish,
            summary="A pipeline reports; the answer says whether to stop",
            tag=TAG,
        ),
        Route(
            "POST",
            f"{one}/stop",
            stop,
            answer=known,
            summary="Ask a pipeline to stop after its batch",
            tag=TAG,
            role=Role.ADMIN,
        ),
        Route(
            "PUT",
            "/topics/{topic}/archived",
            archived,
            body=Archived,
            answer=Archived,
            summary="Records before this offset are archived: retention may delete them, and only them",
            tag=TAG,
        ),
        Route(
            "PUT",
            "/topics/{topic}/policy",
            policy,
            body=Policy,
            answer=Policy,
            summary="Old segments are deleted by retention (`delete`), or compacted and never deleted (`compact`)",
            tag=TAG,
            role=Role.ADMIN,
        ),
        Route(
            "POST",
            "/topics/{topic}/roll",
            roll,
            answer=known,
            summary="Seal the active segment; what is sealed can be archived, deleted and compacted",
            tag=TAG,
        ),
        Route(
            "POST",
            "/topics/{topic}/compact",
            compact,
            body=Compact,
            answer=Swapped,
            summary="Swap neighbouring sealed segments for one that holds only some of their records",
            tag=TAG,
            role=Role.ADMIN,
        ),
        Route(
            "DELETE",
            one,
            forget,
            status=204,
            summary="Forget a pipeline's report",
            tag=TAG,
            role=Role.ADMIN,
        ),
    ]
