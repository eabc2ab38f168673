"""Retention: whole sealed segments go, oldest first, by age and by size; the active one never does.

A topic that is archived (it has an `archived` mark) keeps what was not archived yet; one whose
policy is `compact` keeps its segments, since the only record of a key may lie in the oldest. What
lies in the tier goes from its manifest first: while that cannot be written, retention waits. The
data file is removed last, so a data file that is missing while its index is there is always damage
and never an interrupted removal.
"""

import logging
from itertools import takewhile

from penstock.log.context import Context
from penstock.log.layout import COMPACT
from penstock.log.segment import Segment
from penstock.topics.compaction import finish_or_undo_swap
from penstock.topics.tier.tier import Tier
from penstock.topics.topic import Topic, condemned

log = logging.getLogger("penstock.topics")


async def retain(topic: Topic, context: Context, tier: Tier | None = None) -> int:
    """Roll the active segment if it is old enough, delete segments that may go; how many went."""
    settings = context.settings
    if topic.ending:
        return 0
    active = topic.segments[-1]
    if (
        settings.segment_age
        and active.rows
        and context.now() - active.oldest() >= settings.segment_age * 1e6
    ):
        await topic.seal()
    if topic.maintenance.locked():
        return 0  # segments are being compacted: the other topics need not wait for that
    if topic.ending or not (
        settings.retention_age or settings.retention_bytes or topic.unfinished_swap
    ):
        return 0
    async with topic.maintenance:
        await finish_or_undo_swap(topic, context)
        expired = surplus(topic, context)
        if not expired:
            return 0
        if tier is not None:
            await tier.let_go(topic, expired[-1].end)
        await topic.drop(expired)
    context.instruments.deleted.add(len(expired))
    log.info(
        "topic %s: retention deleted %d segments, up to offset %d",
        topic.name,
        len(expired),
        expired[-1].end,
    )
    return len(expired)


def surplus(topic: Topic, context: Context) -> list[Segment]:
    """The oldest segments that age or size condemn."""
    if topic.policy == COMPACT:
        return []
    age, size = context.settings.retention_age, context.settings.retention_bytes
    sealed, archived = topic.segments[:-1], topic.archived_offset
    expired = condemned(sealed, topic.size_bytes, age=age, size=size, now=context.now())
    return list(takewhile(lambda one: archived is None or one.end <= archived, expired))
