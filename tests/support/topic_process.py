"""Topics and their TCP server in a process of their own, without a database: what the kill tests
kill.

python -m tests.support.topic_process DIRECTORY FSYNC PORT [TIER]

With a tier, small segments leave the disk as soon as they can, and the pool has other work, so that
whatever is done there waits for a while.
"""

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop

from penstock.config.schema import LocalRetention
from penstock.config.schema import TcpServerSettings as TcpSettings
from penstock.config.schema import TopicsSettings as TopicSettings
from penstock.io.lock import DirectoryLock
from penstock.io.tasks import in_pool
from penstock.metrics import Metrics
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from penstock.wire.tcp import TcpServer

THREADS = 2
BUSY_SECONDS = 0.005  # of one piece of other work


async def keep_busy(pool: ThreadPoolExecutor) -> None:
    while True:
        await in_pool(pool, time.sleep, BUSY_SECONDS)


def settings_for(fsync: Any, tier: str) -> TopicSettings:
    if not tier:
        return TopicSettings(fsync=fsync, segment_bytes=1 << 20, free_space_reserve=0)
    return TopicSettings(
        fsync=fsync,
        segment_bytes=2000,
        free_space_reserve=0,
        tier=tier,
        tier_delay=0.0,
        tier_interval=0.05,
        local_retention=LocalRetention(bytes=1),
    )


async def serve(directory: Path, fsync: Any, port: int, tier: str = "") -> None:
    metrics, pool = Metrics(), ThreadPoolExecutor(THREADS)
    with DirectoryLock(directory / ".penstock", "data directory"):
        settings = settings_for(fsync, tier)
        topics = TopicStore(directory, settings, pool=pool, metrics=metrics)
        await topics.start()
        groups = Groups(directory / ".penstock" / "groups", topics, pool=pool, metrics=metrics)
        await groups.start()
        if topics.tier is not None:
            await topics.tier.start()
        tcp = TcpServer(TcpSettings(port=port), topics, groups, metrics)
        await tcp.start()
        print(tcp.port, flush=True)
        other_work = [keep_busy(pool) for _ in range(THREADS if tier else 0)]
        await asyncio.gather(asyncio.Event().wait(), *other_work)


if __name__ == "__main__":
    directory, fsync, port, *tier = sys.argv[1:]
    uvloop.run(serve(Path(directory), fsync, int(port), *tier))
