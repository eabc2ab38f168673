"""A consumer with state, which `test_stream_kills` starts and kills: `python stream_worker.py URL`.

Its state is a count and a digest of all messages in their order; each message is passed on, too.
"""

import asyncio
import hashlib
import sys

from penstock import Client, Message, State

QUEUE, OUT, GROUP = "ledger", "ledger-out", "fold"


def fold(digest: str, value: int) -> str:
    """The digest after one more message: it depends on all of them, and on their order."""
    return hashlib.sha256(f"{digest} {value}".encode()).hexdigest()


async def main(url: str) -> None:
    async with Client(url, retry_for=60) as client:

        @client.consumer(f"{QUEUE}@{GROUP}", batch=3, partitions=2, concurrency=2, state="v1")
        async def add(message: Message, state: State) -> None:
            state["n"] = state.get("n", 0) + 1
            state["digest"] = fold(state.get("digest", ""), message.data)
            state.push(OUT, message.data, partition=message.partition)

        await client.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
