"""Topics and their TCP server in a process of their own, without a database: what the kill tests
kill.

python -m tests.support.topic_process DIRECTORY FSYNC PORT
"""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop

from penstock.config.schema import TcpServer as TcpSettings
from penstock.config.schema import Topics as TopicSettings
from penstock.io.lock import DirectoryLock
from penstock.metrics import Metrics
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from penstock.wire.tcp import TcpServer


async def serve(directory: Path, fsync: Any, port: int) -> None:
    metrics, pool = Metrics(), ThreadPoolExecutor(2)
    with DirectoryLock(directory / ".penstock", "data directory"):
        settings = TopicSettings(fsync=fsync, segment_bytes=1 << 20, free_space_reserve=0)
        topics = TopicStore(directory, settings, pool=pool, metrics=metrics)
        await topics.start()
        groups = Groups(directory / ".penstock" / "groups", topics, pool=pool, metrics=metrics)
        await groups.start()
        tcp = TcpServer(TcpSettings(port=port), topics, groups, metrics)
        await tcp.start()
        print(tcp.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
