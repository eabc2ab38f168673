"""The objects that all topics of a store share: disk, pool, clock, settings, instruments, open
files and free space.
"""

import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from itertools import islice
from pathlib import Path

from penstock.config.schema import TopicsSettings
from penstock.io.fs import Fs
from penstock.io.space import Space
from penstock.io.tasks import P, T, in_pool
from penstock.log.layout import RELAXED, STRICT
from penstock.log.segment import Segment
from penstock.log.tier.cache import BlockCache
from penstock.metrics import Metrics


class OpenFiles:
    """The segments with open files. Above the limit, those opened longest ago are closed."""

    def __init__(self, limit: int | None = None) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # A segment has three files. Use a quarter of the process's limit.
        self.limit = limit or max(16, min(1024, soft // 12))
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._lock = threading.Lock()  # readers in the pool open files too

    def __len__(self) -> int:
        return len(self._segments)

    def opened(self, segment: Segment) -> None:
        with self._lock:
            self._segments[id(segment)] = segment
            self._segments.move_to_end(id(segment))
            excess = max(0, len(self._segments) - self.limit)
            idle = (key for key, other in self._segments.items() if not other.pinned)
            for key in list(islice(idle, excess)):
                self._segments.pop(key).forget_files()

    def closed(self, segment: Segment) -> None:
        with self._lock:
            self._segments.pop(id(segment), None)


class Instruments:
    def __init__(self, metrics: Metrics) -> None:
        counter = metrics.counter
        self.records = counter("penstock_topic_records_total", "Records appended", "topic")
        self.bytes = counter(
            "penstock_topic_bytes_total", "Payload and header bytes appended", "topic"
        )
        self.duplicates = counter(
            "penstock_topic_duplicates_total",
            "Batches that a producer retried and that were not stored again",
        )
        self.commits = counter(
            "penstock_topic_commits_total",
            "Writes to topics; each stores all appends that arrived together",
        )
        self.failures = counter(
            "penstock_topic_append_failures_total",
            "Failed writes of appended records, by error",
            "error",
        )
        self.broken = counter(
            "penstock_topic_segments_broken_total",
            "Segments closed because a write or fsync failed",
        )
        self.damage = counter(
            "penstock_topic_damage_total",
            "Damaged places in topic files, by outcome",
            "outcome",
        )
        self.quarantined = counter(
            "penstock_topic_quarantined_bytes_total",
            "Damaged bytes removed from segments and kept in quarantine",
        )
        self.deleted = counter(
            "penstock_topic_segments_deleted_total", "Segments deleted by retention"
        )
        self.compacted = counter(
            "penstock_topic_compacted_records_total", "Records removed by compaction"
        )
        self.sync_seconds = metrics.histogram(
            "penstock_topic_sync_seconds", "Time of one write to a topic, including its fsync"
        )


class Context:
    def __init__(
        self,
        directory: Path,
        settings: TopicsSettings,
        fs: Fs,
        pool: Executor,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.directory = directory
        self.settings = settings
        # Whether every commit waits for its fsync, and whether data is ever synced.
        self.strict = settings.fsync in ("always", "group")
        self.durable = settings.fsync != "never"
        # The state in the checkpoint of a topic that is being written.
        self.open_state = STRICT if self.strict else RELAXED
        self.fs = fs
        self.pool = pool
        self.clock = clock
        self.metrics = metrics
        self.instruments = Instruments(metrics)
        self.cache: BlockCache | None = None  # of the tier, if there is one
        self.open_files = OpenFiles()
        self.space = Space(fs, directory, settings.free_space_reserve, "appends to topics")
        metrics.gauge(
            "penstock_topic_disk_full",
            "1 while appends are rejected because the disk is full",
            read=lambda: bool(self.space.full),
        )

    def now(self) -> int:
        return int(self.clock() * 1e6)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in the pool."""
        return await in_pool(self.pool, function, *args, **kwargs)
