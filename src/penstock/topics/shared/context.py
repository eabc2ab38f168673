"""What all shared logs of a broker use: calls, caches, the database's clock, object storage."""

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
    recent: ChunkCache  # appended by this broker, or loaded for subscribers
    older: ChunkCache  # loaded for readers that lag: they evict no newer ones
    max_record: int
    grace: float  # seconds until an object that no row refers to is deleted
    instruments: Instruments
    now: Callable[[], int]  # microseconds since 1970, by the database's clock
    announce: Callable[[int, int], None]  # tell other brokers this log's end
    on_gone: Callable[[], None]  # a log does not exist any more: the catalog must be read
    configure: Callable[[str, str | None, TopicLimits | None], Awaitable[None]]  # a topic
    objects: SharedObjects
