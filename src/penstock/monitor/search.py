"""Find queues, groups, topics, routes, schedules and pipelines by a part of their name, and
messages by their whole transaction id.
"""

from collections.abc import Iterator
from urllib.parse import quote

import msgspec

from penstock.broker import Broker
from penstock.monitor.inspection import Inspection
from penstock.monitor.sampler import Sampler
from penstock.protocol.names import split_label

MAX_PER_KIND = 5
MIN_ID = 4  # characters; a shorter text is not looked up as a transaction id


def view_path(*parts: str) -> str:
    return "".join(f"/{quote(part, safe='')}" for part in parts)


class FoundThing(msgspec.Struct):
    kind: str  # queue, group, topic, route, schedule, pipeline or message
    name: str
    path: str  # of its view in the Console


class Search:
    def __init__(self, broker: Broker, sampler: Sampler) -> None:
        self._broker = broker
        self._sampler = sampler
        self._inspection = Inspection(broker.queues)

    async def find(self, words: str) -> list[FoundThing]:
        """Return at most `MAX_PER_KIND` of each kind. Names that begin with `words` come first."""
        wanted = words.strip().lower()
        if not wanted:
            return []
        things = [*self._things(), *await self._schedules()]
        by_kind: dict[str, list[FoundThing]] = {}
        for thing in things:
            if wanted in thing.name.lower():
                by_kind.setdefault(thing.kind, []).append(thing)
        results = [
            thing
            for some in by_kind.values()
            for thing in sorted(
                some, key=lambda one: (not one.name.lower().startswith(wanted), one.name)
            )[:MAX_PER_KIND]
        ]
        return results + await self._messages(words.strip())

    def _things(self) -> Iterator[FoundThing]:
        broker = self._broker
        for name, queue in self._sampler.queues.items():
            yield FoundThing("queue", name, view_path("queues", name))
            for group in queue.groups:
                if group.name:  # queue mode is listed with its queue
                    yield FoundThing("group", f"{name}@{group.name}", view_path("queues", name))
        if broker.logs:
            for name in broker.logs.topics.names():
                yield FoundThing("topic", name, view_path("topics", name))
            for name, topic in {
                (cursor.group, split_label(cursor.topic)[0])
                for cursor in broker.logs.groups.positions()
            }:
                yield FoundThing("group", f"{topic}@{name}", view_path("topics", topic))
            for pipeline in broker.logs.pipelines.all():
                path = view_path("pipelines", pipeline.name)
                yield FoundThing("pipeline", pipeline.name, path)
        for route in broker.exports.status() if broker.exports else ():
            yield FoundThing("route", route.name, view_path("routes", route.name))

    async def _schedules(self) -> list[FoundThing]:
        names = [schedule.name for schedule in await self._broker.queues.schedules.listing()]
        return [FoundThing("schedule", name, f"/schedules?filter={name}") for name in names]

    async def _messages(self, words: str) -> list[FoundThing]:
        if len(words) < MIN_ID:
            return []
        hits = (await self._inspection.by_transaction(None, words)).messages[:MAX_PER_KIND]
        return [
            FoundThing(
                "message",
                f"{hit.queue} / {hit.partition} / {hit.transaction_id}",
                view_path("messages", hit.partition_id, hit.transaction_id),
            )
            for hit in hits
        ]
