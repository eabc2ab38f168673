"""A process that exports and pushes numbered records until it is killed. Says what it tries and
what was accepted.
"""

import asyncio
import itertools
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.config import Config
from penstock.export.manager import Exports
from penstock.metrics import Metrics

BATCH = 10


def say(line: str) -> None:
    os.write(1, line.encode())  # whole, or not at all: a kill leaves no half line


async def main(directory: Path, spec: dict[str, object], first: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        exports = Exports(
            Config(data_directory=directory, routes={"r": spec}), pool=pool, metrics=Metrics()
        )
        await exports.start()
        route = exports.get("r")
        for start in itertools.count(first, BATCH):
            say(f"try {start + BATCH - 1}\n")
            await route.push([b'{"id": %d}' % number for number in range(start, start + BATCH)])
            say(f"ack {start + BATCH - 1}\n")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])))
