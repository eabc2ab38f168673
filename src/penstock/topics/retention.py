"""Retention: delete whole sealed segments by age and size, oldest first, but never the active one.

A topic may have its own age and size (`penstock.log.limits`). Records that an operator deletes are
hidden at once: the topic's first offset changes. A segment is deleted when all its records are
hidden.

An archived topic (with an `archived` mark) keeps records that are not archived yet. A topic with
the policy `compact` keeps its segments, since the only record of a key may be in the oldest one.
Segments in the tier are first removed from the manifest; while it cannot be written, retention
waits. The data file is removed last, so a missing data file whose index exists is always damage,
never an interrupted removal.
"""

import logging
from itertools import takewhile

import msgspec

from penstock.errors import InvalidOffset
from penstock.log.context import Context
from penstock.log.layout import COMPACT
from penstock.log.segment import Segment
from penstock.topics.compaction import finish_or_undo_swap
from penstock.topics.tier.tier import Tier
from penstock.topics.topic import Topic, condemned

log = logging.getLogger("penstock.topics")


async def retain(topic: Topic, context: Context, tier: Tier | None = None) -> int:
    """Roll the active segment if it is old enough, and delete expired ones. Return their number."""
    settings = context.settings
    if topic.ending:
        return 0
    age, size = topic.limits.retention(context.settings)
    active = topic.segments[-1]
    if (
        settings.segment_age
        and active.rows
        and context.now() - active.oldest() >= settings.segment_age * 1e6
    ):
        await topic.seal()
    if topic.maintenance.locked():
        return 0  # segments are being compacted; do not let the other topics wait for that
    if topic.ending or not (age or size or topic.unfinished_swap or topic.limits.start):
        return 0
    async with topic.maintenance:
        await finish_or_undo_swap(topic, context)
        expired = surplus(topic, context)
        if not expired:
            return 0
        await _drop(topic, expired, tier)
    context.instruments.deleted.add(len(expired))
    log.info(
        "topic %s: retention deleted %d segments, up to offset %d",
        topic.name,
        len(expired),
        expired[-1].end,
    )
    return len(expired)


async def _drop(topic: Topic, segments: list[Segment], tier: Tier | None) -> None:
    if tier is not None:
        await tier.let_go(topic, segments[-1].end)
    await topic.drop(segments)


async def delete_before(topic: Topic, offset: int, tier: Tier | None) -> None:
    """Delete the records before this offset, regardless of retention and policy."""
    if not 0 <= offset <= topic.next_offset:
        raise InvalidOffset(f"offset {offset} is outside 0 to {topic.next_offset}")
    if offset == topic.next_offset:
        await topic.seal()
    async with topic.maintenance:
        start = max(offset, topic.limits.start)
        await topic.set_limits(msgspec.structs.replace(topic.limits, start=start))
        if gone := _before_start(topic):
            await _drop(topic, gone, tier)


def _before_start(topic: Topic) -> list[Segment]:
    return list(takewhile(lambda one: one.end <= topic.limits.start, topic.segments[:-1]))


def surplus(topic: Topic, context: Context) -> list[Segment]:
    """Return the oldest segments that exceed age or size, or whose records were all deleted."""
    deleted = _before_start(topic)
    if topic.policy == COMPACT:
        return deleted
    age, size = topic.limits.retention(context.settings)
    sealed, archived = topic.segments[:-1], topic.archived_offset
    expired = condemned(sealed, topic.size_bytes, age=age, size=size, now=context.now())
    kept = list(takewhile(lambda one: archived is None or one.end <= archived, expired))
    return max(deleted, kept, key=len)
