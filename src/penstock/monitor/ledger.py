"""Account for everything that was accepted: count what became of it, and check the sums."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from penstock.contract.routes import RouteStatus
from penstock.monitor.watched import WatchedQueue
from penstock.topics.topic import Topic


def ledger(queues: Iterable[WatchedQueue], routes: Iterable[RouteStatus]) -> list[dict[str, Any]]:
    """Return a row for the queues and one for the routes.

    Queues: accepted = completed + dead + dropped + waiting + skipped. `skipped` is computed from
    the other figures, so the sum proves something only if it is 0; otherwise `agrees` is None.
    Routes: accepted = delivered + dead + dropped + waiting.
    """
    pairs = [(queue, group) for queue in queues for group in queue.groups]
    rows = []
    if pairs:
        groups = [group for _, group in pairs]
        row: dict[str, Any] = {
            "part": "queues",
            "accepted": sum(queue.figures.pushed for queue, _ in pairs),
            "completed": sum(group.completed for group in groups),
            "dead": sum(group.dead_letters for group in groups),
            "dropped": sum(group.dropped for group in groups),
            "waiting": sum(group.waiting for group in groups),
            "skipped": sum(group.skipped for group in groups),
        }
        rows.append(row | {"agrees": None if any(group.skipped for group in groups) else True})
    books = [route.queue.accounting for route in routes if route.queue]
    if books:
        row = {
            "part": "routes",
            "accepted": sum(book.accepted for book in books),
            "delivered": sum(book.delivered for book in books),
            "dead": sum(book.dead_lettered for book in books),
            "dropped": sum(sum(book.dropped.values()) for book in books),
            "waiting": sum(book.queued for book in books),
        }
        parts = ("delivered", "dead", "dropped", "waiting")
        rows.append(row | {"agrees": row["accepted"] == sum(row[part] for part in parts)})
    return rows


def topic_books(topics: Iterable[Topic]) -> dict[str, Any] | None:
    """Return a row for all topics: accepted = kept + removed by retention + compacted away; None
    if there are no topics.

    Every offset belongs to one record. Retention has removed those below the first offset, and only
    compacted segments may lack records. Any other missing record makes the sum too small.
    """
    accepted = kept = removed = compacted = 0
    books = list(topics)
    for topic in books:
        # Offsets that an adoption left out were never given to a record.
        skipped = sum(place.get("skipped", 0) for place in topic.damage)
        accepted += topic.next_offset - skipped
        removed += topic.first_offset
        bases = [*(segment.base for segment in topic.segments), topic.next_offset]
        for segment, (base, following) in zip(topic.segments, pairwise(bases), strict=True):
            kept += segment.rows
            if segment.compacted:
                compacted += following - base - segment.rows
    if not books:
        return None
    return {
        "part": "topics",
        "accepted": accepted,
        "kept": kept,
        "removed": removed,
        "compacted": compacted,
        "agrees": accepted == kept + removed + compacted,
    }
