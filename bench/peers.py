"""Penstock beside what people would use instead, each with the same durability and an equally thin
client.

Two parts. *Topics*: single records appended to a log, 1, 16, 64 and 256 in flight, beside Redis
Streams, NATS JetStream and RabbitMQ quorum queues; once with an fsync before the answer, once
without. A bare server that only appends and answers is the floor. *Queues*: push and pop with acknowledgement, 1, 10 and 100 per request, beside pgmq,
procrastinate and pgqueuer on the same PostgreSQL.

Payloads have 300 bytes in topics, 120 in queues. Rounds alternate, medians count, servers and load
share the machine. Servers are the distribution's packages (installed when we may), the others come
from the registry into a cache directory; a peer that cannot be had is left out with a note.

    make bench B=peers                      some ten minutes
    PENSTOCK_BENCH_PEERS=topics make bench B=peers      only one part
"""

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from bench.harness import Figure, percentile
from bench.peer import logs
from bench.peer.logs import Log, Missing
from bench.peer.packages import packages
from bench.peer.queues import Pgmq, Pgqueuer, Procrastinate, Queues, SqlQueue
from bench.peer.rounds import Match
from bench.queues import Ground
from bench.topics import scratch

DEPTHS = (1, 16, 64, 256)
BATCHES = (1, 10, 100)
CONNECTIONS = {1: 16, 10: 16, 100: 8}
STOCK = {1: 20_000, 10: 40_000, 100: 120_000}  # messages there are to take in a round
TARGETS = {1: 1.0, 16: 1.0, 64: 1.5, 256: 2.5}  # topics against Redis
FLOOR = "a bare server on the same event loop (floor)"
FSYNC, NO_WAIT = "topics, fsync before the answer", "topics, no fsync before the answer"

Peer = tuple[str, Callable[[], AbstractContextManager[Log]]]
# by part: our own setting of fsync, and the peers with theirs
LOGS: dict[str, tuple[str, list[Peer]]] = {
    FSYNC: (
        "group",
        [
            ("Redis Streams, appendfsync always", partial(logs.redis, "always")),
            ("RabbitMQ quorum queue, publisher confirms", logs.rabbitmq),
            (FLOOR, partial(logs.bare, "group")),
        ],
    ),
    NO_WAIT: (
        "interval",
        [
            ("Redis Streams, appendfsync everysec", partial(logs.redis, "everysec")),
            ("NATS JetStream on disk, default sync", logs.nats),
            (FLOOR, partial(logs.bare, "interval")),
        ],
    ),
}


def figures() -> Iterator[Figure]:
    only = os.environ.get("PENSTOCK_BENCH_PEERS", "")
    yield flush_time()
    if only != "queues":
        yield from topics()
    if only != "topics":
        yield from queues()


def flush_time(count: int = 200) -> Figure:
    """What the disk itself takes: the floor of every answer that waits for it."""
    with scratch() as directory:
        target = os.open(directory / "file", os.O_CREAT | os.O_WRONLY)
        times = []
        for place in range(count):
            began = time.perf_counter()
            os.pwrite(target, bytes(300), 300 * place)
            os.fdatasync(target)
            times.append((time.perf_counter() - began) * 1e3)
        os.close(target)
    return Figure(
        "flush time of the disk: write of 300 bytes and fdatasync, p50",
        statistics.median(times),
        "ms",
        detail={"p99": percentile(times, 0.99)},
    )


def topics() -> Iterator[Figure]:
    for part, (fsync, peers) in LOGS.items():
        for name, peer in peers:
            with ExitStack() as stack:
                try:
                    theirs = stack.enter_context(peer())
                except Missing as error:
                    print(f"  left out: {name}: {error}")
                    continue
                ours = stack.enter_context(logs.penstock(fsync))
                for depth in DEPTHS:
                    yield Match(
                        f"{part}: {depth} in flight",
                        ours=partial(ours.append, depth),
                        theirs=partial(theirs.append, depth),
                        against=name,
                        at_least=TARGETS[depth] if name.startswith("Redis") else None,
                    ).run()


def queues() -> Iterator[Figure]:
    try:
        result = packages()
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"  left out: pgmq, procrastinate, pgqueuer: {error}")
        return
    peers: list[SqlQueue] = [
        Pgmq(result["pgmq"]),
        Procrastinate(result["procrastinate"]),
        Pgqueuer(result["pgqueuer"]),
    ]
    with ExitStack() as stack:
        rounds = Queues(Ground(stack))
        for peer in peers:
            name = type(peer).__name__.lower()
            against = f"{name} {result[name].version} by SQL"
            for batch in BATCHES:
                yield _push(rounds, peer, against, batch).run()
            for batch in BATCHES:
                yield _take(rounds, peer, against, batch).run()


def _push(rounds: Queues, peer: SqlQueue, against: str, batch: int) -> Match:
    connections = CONNECTIONS[batch]
    return Match(
        f"queues, push: {batch} per request, {connections} connections",
        ours=lambda: rounds.run(rounds.push(connections, batch)),
        theirs=lambda: rounds.run(rounds.sql_push(peer, connections, batch)),
        against=against,
        note="fsync and synchronous_commit on, one PostgreSQL for both",
    )


def _take(rounds: Queues, peer: SqlQueue, against: str, batch: int) -> Match:
    connections, stock = CONNECTIONS[batch], STOCK[batch]
    return Match(
        f"queues, pop + ack: {batch} per request, {connections} connections",
        ours=lambda: rounds.run(rounds.take(connections, batch, stock)),
        theirs=lambda: rounds.run(rounds.sql_take(peer, connections, batch, stock)),
        against=against,
        at_least=1.5 if batch == 1 and isinstance(peer, Pgmq) else None,
        note="it fetches job by job" if isinstance(peer, Procrastinate) and batch > 1 else "",
    )
