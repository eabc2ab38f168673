"""What all shared logs of a broker use: calls, caches, the database's clock and the tier."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.log.context import Instruments
from penstock.log.limits import TopicLimits
from penstock.topics.shared.appends import Flusher
from penstock.topics.shared.calls import SharedCalls
from penstock.topics.shared.chunks import ChunkCache
from penstock.topics.shared.objects import SharedObjects


@dataclass(slots=True, kw_only=True)
class SharedContext:
    calls: SharedCalls
    flusher: Flusher
    recent: ChunkCache  # what this broker appended, and what it got for those who watch
    older: ChunkCache  # what readers behind got last: they do not push the newest out
    max_record: int
    grace: float  # seconds that an object is kept for readers after nothing refers to it
    instruments: Instruments
    now: Callable[[], int]  # microseconds since 1970, by the database's clock
    announce: Callable[[int, int], None]  # other brokers learn that this log has this end
    on_gone: Callable[[], None]  # a log is not there any more: look at the catalog
    configure: Callable[[str, str | None, TopicLimits | None], Awaitable[None]]  # a topic
    objects: SharedObjects
