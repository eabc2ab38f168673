"""Topics on object storage in a test."""

from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from penstock.config.schema import LocalRetention
from penstock.errors import Damaged
from penstock.topics.store import TopicStore
from penstock.topics.topic import Topic
from tests.support.topics import running


def tiered(directory: Path, address: str, **settings: Any) -> Any:
    settings.setdefault("tier_delay", 0.0)
    settings.setdefault("segment_bytes", 2300)
    settings.setdefault("local_retention", LocalRetention(bytes=1))
    return running(directory, tier=address, **settings)


async def fill(topic: Topic, batches: int = 8, records: int = 10, start: int = 0) -> None:
    for number in range(start, start + batches):
        await topic.append([b"%06d-%03d " % (number, i) + b"x" * 90 for i in range(records)])


async def read_all(topic: Topic) -> list[tuple[int, bytes]]:
    """Also over what was lost."""
    records: list[tuple[int, bytes]] = []
    at = topic.first_offset
    while at < topic.next_offset:
        try:
            batch = await topic.read_through(partial(topic.read, at))
        except Damaged as error:
            at = error.resume or topic.next_offset
            continue
        if not batch.count:
            break
        records += [(offset, bytes(payload)) for offset, payload in batch]
        at = batch.next_offset
    return records


async def pass_through(store: TopicStore) -> None:
    assert store.tier is not None
    assert await store.tier.synchronize(), store.tier.problem
    assert not store.tier.topic_problems


def unique(path: Path) -> str:
    """A prefix of its own: the names of temporary directories are used again."""
    return f"{path.name}-{uuid4().hex}"
