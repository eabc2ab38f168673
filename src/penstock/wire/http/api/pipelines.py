"""Pipelines report here, and operators see what runs, how far behind it is and what went wrong
last.
"""

from typing import Annotated, Literal

import msgspec

from penstock.pipeline_registry import Pipelines
from penstock.topics.compaction import Swapped
from penstock.topics.store import TopicStore
from penstock.wire.auth import Role
from penstock.wire.http.messages import EMPTY, Request, Response, json_response
from penstock.wire.http.routes import Audited, route

PIPELINE = "/api/v1/pipelines/{name}"


class Report(msgspec.Struct):
    """The state that a pipeline reports."""

    state: str
    at: float = 0.0
    batch: int = -1
    rows: int = 0
    rows_per_second: float = 0.0
    batch_ms: int = 0
    lag: int | None = None
    position: str = ""
    lag_seconds: float | None = None
    target_seconds: float | None = None
    error: str | None = None
    host: str = ""
    pid: int = 0
    started_at: float = 0.0
    master: str = ""


class Run(msgspec.Struct):
    """One of a pipeline's last runs."""

    state: str
    started_at: float | None
    rows: int | None
    batch: int | None
    error: str | None
    host: str | None
    reported_at: float


class PipelineMinute(msgspec.Struct):
    at: float
    rows: int
    lag: int | None


class Pipeline(Report, kw_only=True):
    """A pipeline's last report, its last runs (the newest first) and its last minutes."""

    name: str
    reported_at: float
    stopping: bool
    runs: list[Run]
    minutes: list[PipelineMinute]


class PipelineList(msgspec.Struct):
    pipelines: list[Pipeline]


class Rolled(msgspec.Struct):
    topic: str
    active: int  # base offset of the segment that is written to now


class Wish(msgspec.Struct):
    stop: bool


class Archived(msgspec.Struct):
    offset: int


class Policy(msgspec.Struct):
    policy: Literal["delete", "compact"]


class Compact(msgspec.Struct):
    """Sealed segments to compact. `keep` has one bit per offset, from the first base on, lowest bit
    first: 1 keeps the record.
    """

    incarnation: str
    bases: list[Annotated[int, msgspec.Meta(ge=0)]]
    keep: bytes


class PipelinesApi:
    tag = "pipelines"

    def __init__(self, pipelines: Pipelines, topics: TopicStore) -> None:
        self._pipelines = pipelines
        self._topics = topics

    @route(
        "GET",
        "/api/v1/pipelines",
        answer=PipelineList,
        summary="List all pipelines that have reported to this broker",
    )
    def everything(self, _: Request) -> Response:
        return json_response(PipelineList([_pipeline(one) for one in self._pipelines.all()]))

    @route(
        "GET",
        PIPELINE,
        answer=Pipeline,
        summary="A pipeline's last report, its last runs and its last minutes",
    )
    def one(self, request: Request) -> Response:
        return json_response(_pipeline(self._pipelines.get(request.params["name"])))

    @route(
        "PUT",
        PIPELINE,
        body=Report,
        answer=Wish,
        summary="Report the state of a pipeline; the answer says whether it should stop",
    )
    def report(self, request: Request) -> Response:
        stop = self._pipelines.put(request.params["name"], msgspec.to_builtins(request.data))
        return json_response(Wish(stop))

    @route(
        "POST",
        f"{PIPELINE}/stop",
        answer=Pipeline,
        summary="Ask a pipeline to stop after its current batch",
        role=Role.ADMIN,
        audit=Audited("pipeline.stop"),
    )
    def stop(self, request: Request) -> Response:
        return json_response(_pipeline(self._pipelines.ask_to_stop(request.params["name"])))

    @route(
        "DELETE",
        PIPELINE,
        status=204,
        summary="Delete a pipeline's reports",
        role=Role.ADMIN,
        audit=Audited("pipeline.forget"),
    )
    def forget(self, request: Request) -> Response:
        self._pipelines.forget(request.params["name"])
        return EMPTY

    @route(
        "PUT",
        "/topics/{topic}/archived",
        body=Archived,
        answer=Archived,
        summary="Set the archived offset: from now on, retention deletes only records before it",
    )
    async def archived(self, request: Request) -> Response:
        topic = self._topics.require(request.params["topic"])
        await topic.mark_archived(request.data.offset)
        return json_response(request.data)

    @route(
        "PUT",
        "/topics/{topic}/policy",
        body=Policy,
        answer=Policy,
        summary="Set the cleanup policy: `delete` lets retention delete old segments, `compact` "
        "compacts them and never deletes them",
        role=Role.ADMIN,
        audit=Audited("topic.policy", body=("policy",)),
    )
    async def policy(self, request: Request) -> Response:
        topic = self._topics.require(request.params["topic"])
        await topic.set_policy(request.data.policy)
        return json_response(request.data)

    @route(
        "POST",
        "/topics/{topic}/roll",
        answer=Rolled,
        summary="Seal the active segment; only sealed segments can be archived, deleted or "
        "compacted",
        audit=Audited("topic.roll"),
    )
    async def roll(self, request: Request) -> Response:
        topic = self._topics.require(request.params["topic"])
        await topic.seal()
        return json_response(Rolled(topic.name, topic.segments[-1].base))

    @route(
        "POST",
        "/topics/{topic}/compact",
        body=Compact,
        answer=Swapped,
        summary="Replace adjacent sealed segments with one that keeps only the given records",
        role=Role.ADMIN,
        audit=Audited("topic.compact"),
    )
    async def compact(self, request: Request) -> Response:
        body: Compact = request.data
        name = request.params["topic"]
        return json_response(
            await self._topics.compact(name, body.bases, body.keep, body.incarnation)
        )


def _pipeline(report: dict[str, object]) -> Pipeline:
    return msgspec.convert(report, Pipeline)
