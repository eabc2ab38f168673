"""A process that exports and pushes numbered records until it is killed. Says what it tries and what was accepted."""

import asyncio
import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.config import Config
from penstock.export.manager import Exports
from penstock.metrics import Metrics

BATCH = 10


async def main(directory: Path, spec: dict[str, object], first: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        exports = Exports(Config(data_directory=directory, routes={"r": spec}), pool=pool, metrics=Metrics())
        await exports.start()
        route = exports.get("r")
        for start in itertools.count(first, BATCH):
            print("try", start + BATCH - 1, flush=True)
            await route.push([b'{"id": %d}' % number for number in range(start, start + BATCH)])
            print("ack", start + BATCH - 1, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])))
