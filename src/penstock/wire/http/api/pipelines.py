"""Pipelines report here, and operators see what runs, how far behind it is and what went wrong
last.
"""

from typing import Annotated, Literal

import msgspec

from penstock.contract.operation import Audited
from penstock.pipeline_registry import Pipelines
from penstock.topics.compaction import Swapped
from penstock.topics.store import TopicStore
from penstock.wire.auth import Role
from penstock.wire.http.routes import route

PIPELINE = "/api/v1/pipelines/{name}"


class PipelineNode(msgspec.Struct):
    """A source, a step or a sink of a pipeline, and the names of those it reads from."""

    kind: Literal["source", "step", "sink"]
    name: str
    title: str = ""
    inputs: list[str] = []


class PipelineBatch(msgspec.Struct):
    """One of the last batches of a pipeline."""

    batch: int
    at: str
    rows: int
    ms: int


class PipelineReport(msgspec.Struct):
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
    state_rows: int = 0
    state_bytes: int = 0
    graph: list[PipelineNode] = []
    batches: list[PipelineBatch] = []
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


class PipelineStatus(PipelineReport, kw_only=True):
    """A pipeline's last report, its last runs (the newest first) and its last minutes."""

    name: str
    reported_at: float
    stopping: bool
    runs: list[Run]
    minutes: list[PipelineMinute]


class PipelineList(msgspec.Struct):
    pipelines: list[PipelineStatus]


class Rolled(msgspec.Struct):
    topic: str
    active: int  # base offset of the segment that is written to now


class Wish(msgspec.Struct):
    stop: bool


class ArchivedOffset(msgspec.Struct):
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

    @route("GET", "/api/v1/pipelines")
    def everything(self) -> PipelineList:
        """List all pipelines that have reported to this broker."""
        return PipelineList([_pipeline(one) for one in self._pipelines.all()])

    @route("GET", PIPELINE)
    def one(self, name: str) -> PipelineStatus:
        """A pipeline's last report, its last runs and its last minutes."""
        return _pipeline(self._pipelines.get(name))

    @route("PUT", PIPELINE, tag="internal")
    def report(self, name: str, body: PipelineReport) -> Wish:
        """Report the state of a pipeline; the answer says whether it should stop."""
        return Wish(self._pipelines.put(name, msgspec.to_builtins(body)))

    @route("POST", f"{PIPELINE}/stop", role=Role.ADMIN, audit=Audited("pipeline.stop"))
    def stop(self, name: str) -> PipelineStatus:
        """Ask a pipeline to stop after its current batch."""
        return _pipeline(self._pipelines.ask_to_stop(name))

    @route("DELETE", PIPELINE, role=Role.ADMIN, audit=Audited("pipeline.forget"))
    def forget(self, name: str) -> None:
        """Delete a pipeline's reports."""
        self._pipelines.forget(name)

    @route("PUT", "/topics/{topic}/archived", tag="internal")
    async def archived(self, topic: str, body: ArchivedOffset) -> ArchivedOffset:
        """Set the archived offset: from now on, retention deletes only records before it."""
        await self._topics.local(topic).mark_archived(body.offset)
        return body

    @route(
        "PUT",
        "/topics/{topic}/policy",
        role=Role.ADMIN,
        audit=Audited("topic.policy", body=("policy",)),
    )
    async def policy(self, topic: str, body: Policy) -> Policy:
        """Set the cleanup policy: `delete` lets retention delete old segments, `compact` compacts
        them and never deletes them.
        """
        await self._topics.require(topic).set_policy(body.policy)
        return body

    @route("POST", "/topics/{topic}/roll", audit=Audited("topic.roll"))
    async def roll(self, topic: str) -> Rolled:
        """Seal the active segment; only sealed segments can be archived, deleted or compacted."""
        log = self._topics.local(topic)
        await log.seal()
        return Rolled(topic, log.segments[-1].base)

    @route(
        "POST",
        "/topics/{topic}/compact",
        tag="internal",
        role=Role.ADMIN,
        audit=Audited("topic.compact"),
    )
    async def compact(self, topic: str, body: Compact) -> Swapped:
        """Replace adjacent sealed segments with one that keeps only the given records."""
        return await self._topics.compact(topic, body.bases, body.keep, body.incarnation)


def _pipeline(report: dict[str, object]) -> PipelineStatus:
    return msgspec.convert(report, PipelineStatus)
