"""Pipelines over HTTP: their reports and status, and what their jobs do to the files of topics."""

from penstock.contract import operations
from penstock.contract.operation import Audited
from penstock.contract.pipelines import (
    ArchivedOffset,
    CleanupPolicy,
    CompactBody,
    PipelineList,
    TopicRolled,
)
from penstock.pipeline_registry import Pipelines
from penstock.topics.compaction import Swapped
from penstock.topics.store import TopicStore
from penstock.wire.auth import Role
from penstock.wire.http.routes import HttpRoute, calling, route, serves


def pipeline_routes(pipelines: Pipelines) -> list[HttpRoute]:
    return [
        calling(operations.LIST_PIPELINES, lambda: PipelineList(pipelines.all())),
        calling(operations.GET_PIPELINE, pipelines.get),
        calling(operations.REPORT_PIPELINE, pipelines.put),
        calling(operations.STOP_PIPELINE, pipelines.ask_to_stop),
        calling(operations.FORGET_PIPELINE, pipelines.forget),
    ]


class TopicFilesApi:
    tag = "topics"

    def __init__(self, topics: TopicStore) -> None:
        self._topics = topics

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
