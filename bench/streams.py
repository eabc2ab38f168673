"""What state costs: a cycle of a stream against the plain transaction, on the same broker.

Both pop a batch, push one message and acknowledge the batch in one request. A cycle also reads the
state of the partition and changes one key of it.

    make bench B=streams
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec

from bench.harness import Contest
from bench.queues import Caller, Ground, _close, _get, _popped, _post

SECONDS = 3.0
CALLERS = 8
PARTITIONS = 64  # more than callers: a partition serves one at a time
FILL = 40_000
GROUP = "streams.bench"


def contests() -> Iterator[Contest]:
    with ExitStack() as stack:
        bench = Commits(Ground(stack))
        for batch in (1, 20):
            note = f"{CALLERS} connections; both pop a batch and push one message per commit"
            yield Contest(
                name=f"streams: commits with state, batches of {batch}",
                unit="commits/s",
                ours=partial(bench.round, batch, state=True),
                theirs=partial(bench.round, batch, state=False),
                against="POST /api/v1/transaction",
                note=note,
            )


class Commits:
    def __init__(self, ground: Ground) -> None:
        self._ground = ground

    def round(self, batch: int, *, state: bool) -> float:
        return self._ground.runner.run(self._round(batch, state))

    async def _round(self, batch: int, state: bool) -> float:
        queue = self._ground.fresh()
        await self._ground.fill(queue, FILL, PARTITIONS, step=FILL // PARTITIONS)
        callers = await self._ground.callers(CALLERS)
        body = {"name": queue, "source_queue": queue, "config_hash": "1"}
        query = (await _ask(callers[0], "/streams/v1/queries", body))["query_id"]
        done = 0
        ends = time.perf_counter() + SECONDS

        async def work(caller: Caller) -> None:
            nonlocal done
            target = f"/api/v1/pop/queue/{queue}?batch={batch}&consumerGroup={GROUP}"
            while time.perf_counter() < ends:
                status, text = await caller.ask(_get(target))
                if status == 204:
                    raise RuntimeError("all messages are consumed: the round is too long")
                messages = _popped.decode(text).messages
                last = messages[-1]
                out = {"queue": f"{queue}-out", "partition": last.partitionId, "payload": 1}
                if state:
                    place = {"query_id": query, "partition_id": last.partitionId}
                    rows = (await _ask(caller, "/streams/v1/state/get", place))["rows"]
                    count = rows[0]["value"] if rows else 0
                    change = {"type": "upsert", "key": "n", "value": count + len(messages)}
                    ack = {"transactionId": last.transactionId, "leaseId": last.leaseId}
                    await _ask(
                        caller,
                        "/streams/v1/cycle",
                        {
                            **place,
                            "consumer_group": GROUP,
                            "state_ops": [change],
                            "push_items": [out],
                            "ack": ack,
                        },
                    )
                else:
                    acks = [
                        {
                            "type": "ack",
                            "transactionId": one.transactionId,
                            "partitionId": one.partitionId,
                            "leaseId": one.leaseId,
                            "consumerGroup": GROUP,
                        }
                        for one in messages
                    ]
                    push = {"type": "push", "items": [out]}
                    await _ask(caller, "/api/v1/transaction", {"operations": [push, *acks]})
                done += 1

        began = time.perf_counter()
        await asyncio.gather(*map(work, callers))
        took = time.perf_counter() - began
        _close(callers)
        return done / took


async def _ask(caller: Caller, path: str, body: dict[str, Any]) -> Any:
    status, text = await caller.ask(_post(path, msgspec.json.encode(body)))
    if status != 200:
        raise RuntimeError(f"{path} answered {status}: {text[:200]!r}")
    return msgspec.json.decode(text)
