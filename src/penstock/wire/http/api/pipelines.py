"""Pipelines over HTTP: reports of running pipelines, their status, and topic maintenance."""

from penstock.contract import operations
from penstock.contract.operation import Audited
from penstock.contract.pipelines import (
    ArchivedOffset,
    CleanupPolicy,
    CompactBody,
    PipelineList,
    PipelineReport,
    PipelineStatus,
    PipelineWish,
    TopicRolled,
)
from penstock.pipeline_registry import Pipelines
from penstock.topics.compaction import Swapped
from penstock.topics.store import TopicStore
from penstock.wire.auth import Role
from penstock.wire.http.routes import route, serves


class PipelinesApi:
    tag = "pipelines"

    def __init__(self, pipelines: Pipelines, topics: TopicStore) -> None:
        self._pipelines = pipelines
        self._topics = topics

    @serves(operations.LIST_PIPELINES)
    def everything(self) -> PipelineList:
        return PipelineList(self._pipelines.all())

    @serves(operations.GET_PIPELINE)
    def one(self, name: str) -> PipelineStatus:
        return self._pipelines.get(name)

    @serves(operations.REPORT_PIPELINE)
    def report(self, name: str, body: PipelineReport) -> PipelineWish:
        return self._pipelines.put(name, body)

    @serves(operations.STOP_PIPELINE)
    def stop(self, name: str) -> PipelineStatus:
        return self._pipelines.ask_to_stop(name)

    @serves(operations.FORGET_PIPELINE)
    def forget(self, name: str) -> None:
        self._pipelines.forget(name)

    @serves(operations.SET_ARCHIVED_OFFSET)
    async def archived(self, topic: str, body: ArchivedOffset) -> ArchivedOffset:
        await self._topics.local(topic).mark_archived(body.offset)
        return body

    @serves(operations.SET_TOPIC_POLICY)
    async def policy(self, topic: str, body: CleanupPolicy) -> CleanupPolicy:
        await self._topics.require(topic).set_policy(body.policy)
        return body

    @serves(operations.ROLL_TOPIC)
    async def roll(self, topic: str) -> TopicRolled:
        log = self._topics.local(topic)
        await log.seal()
        return TopicRolled(topic, log.segments[-1].base)

    @route(
        "POST",
        "/topics/{topic}/compact",
        tag="internal",
        role=Role.ADMIN,
        audit=Audited("topic.compact"),
    )
    async def compact(self, topic: str, body: CompactBody) -> Swapped:
        """Replace adjacent sealed segments with one that keeps only the given records."""
        return await self._topics.compact(topic, body.bases, body.keep, body.incarnation)
