"""A load generator that costs less than the server it measures: prepared requests over raw
connections.

    result = run(Load(port=6632, requests=[post("/api/v1/push", body)], connections=32, seconds=3))
    result.rate, result.p50, result.p99, result.statuses

It runs in a process of its own (a generator inside the server's process would measure itself),
keeps `depth` requests in flight on each connection, cycles through `requests`, and counts an answer
once its last byte has arrived.
"""

import base64
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field

from bench.harness import percentile


@dataclass(slots=True)
class Load:
    port: int
    requests: list[bytes]  # whole HTTP/1.1 requests
    connections: int = 32
    seconds: float = 1.5
    depth: int = 1  # pipelined requests per connection
    host: str = "127.0.0.1"
    warm_up: float = 0.3


@dataclass(slots=True)
class Result:
    rate: float  # answers per second
    answers: int
    p50: float  # seconds from sending a request to the last byte of its answer
    p99: float
    longest: float
    statuses: dict[str, int] = field(default_factory=dict)
    bytes_received: int = 0

    def all_are(self, status: int) -> bool:
        return set(self.statuses) == {str(status)}


def post(path: str, body: bytes = b"", *headers: str) -> bytes:
    """A request as a usual client sends it."""
    lines = [
        f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "User-Agent: bench", "Accept: */*",
        "Content-Type: application/json", f"Content-Length: {len(body)}", *headers, "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + body


def get(path: str, *headers: str) -> bytes:
    lines = [
        f"GET {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "User-Agent: bench",
        "Accept: */*",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode()


def run(load: Load) -> Result:
    """Run the load from a process of its own and wait for the outcome."""
    order = asdict(load) | {
        "requests": [base64.b64encode(request).decode() for request in load.requests]
    }
    done = subprocess.run(
        [sys.executable, "-m", "bench.load"],
        input=json.dumps(order).encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    return Result(**json.loads(done.stdout))


class _Caller:
    """One connection. Answers must carry Content-Length (or have no body by their status)."""

    def __init__(self, tally: "_Tally", poll: select.epoll, load: Load, number: int) -> None:
        self.tally, self.poll = tally, poll
        self.requests = load.requests
        self.next = number * len(load.requests) // load.connections
        self.sent: deque[float] = deque()
        self.rest = b""
        self.unsent = b""
        self.socket = socket.create_connection((load.host, load.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.file = self.socket.fileno()
        poll.register(self.file, select.EPOLLIN)
        self.prepare(load.depth, time.perf_counter())
        self.flush()

    def prepare(self, count: int, now: float) -> None:
        for _ in range(count):
            self.unsent += self.requests[self.next]
            self.next = (self.next + 1) % len(self.requests)
            self.sent.append(now)

    def flush(self) -> None:
        try:
            taken = os.write(self.file, self.unsent)
        except BlockingIOError:
            taken = 0
        if taken == len(self.unsent):
            self.unsent = b""
            return
        self.unsent = self.unsent[taken:]
        self.poll.modify(self.file, select.EPOLLIN | select.EPOLLOUT)

    def ready(self, events: int, now: float) -> bool:
        """Take what has arrived; whether there is something to send."""
        if events & select.EPOLLOUT:
            self.poll.modify(self.file, select.EPOLLIN)
        if events & ~select.EPOLLOUT:
            data = os.read(self.file, 1 << 15)
            if not data:
                raise SystemExit("the server closed a connection")
            self.prepare(self.take(self.rest + data if self.rest else data, now), now)
        return bool(self.unsent)

    def take(self, data: bytes, now: float) -> int:
        """Count the whole answers in `data`, keep the rest."""
        tally, place, size = self.tally, 0, len(data)
        answered = 0
        while place < size:
            end = data.find(b"\r\n\r\n", place) + 4
            if end == 3:
                break
            head = data[place:end]
            answer = tally.heads.get(head) or tally.learn(head)
            if size < end + answer.length:
                break
            place = end + answer.length
            answer.count += 1
            answered += 1
            tally.latencies.append(now - self.sent.popleft())
        self.rest = data[place:]
        return answered


@dataclass(slots=True)
class _Kind:
    """Answers with the same head."""

    status: str
    length: int  # of the body
    size: int  # of head and body
    count: int = 0


class _Tally:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.heads: dict[bytes, _Kind] = {}
        self.latencies: list[float] = []

    def learn(self, head: bytes) -> _Kind:
        lines = head.decode("latin-1").split("\r\n")
        status = lines[0].split(" ")[1]
        lengths = [
            int(line.split(":")[1])
            for line in lines[1:]
            if line.lower().startswith("content-length:")
        ]
        if not lengths and status not in ("204", "304"):
            raise SystemExit(f"an answer without Content-Length: {lines}")
        length = lengths[0] if lengths else 0
        self.heads[head] = _Kind(status, length, len(head) + length)
        return self.heads[head]

    def statuses(self) -> dict[str, int]:
        collected: dict[str, int] = {}
        for kind in self.heads.values():
            collected[kind.status] = collected.get(kind.status, 0) + kind.count
        return collected


def _fire(load: Load) -> Result:
    tally = _Tally()
    poll = select.epoll()
    callers = {}
    for number in range(load.connections):
        caller = _Caller(tally, poll, load, number)
        callers[caller.file] = caller

    def go(seconds: float) -> float:
        """Reads from all, then writes to all: a write to a sleeping server costs a wake-up, to a
        busy one nothing.
        """
        tally.reset()
        began = now = time.perf_counter()
        while now < began + seconds:
            events = poll.poll(began + seconds - now)
            now = time.perf_counter()
            for caller in [
                callers[file] for file, what in events if callers[file].ready(what, now)
            ]:
                caller.flush()
        return now - began

    go(load.warm_up)
    spent = go(load.seconds)
    latencies = tally.latencies or [0.0]
    statuses = tally.statuses()
    return Result(
        rate=sum(statuses.values()) / spent,
        answers=sum(statuses.values()),
        p50=percentile(latencies, 0.5),
        p99=percentile(latencies, 0.99),
        longest=max(latencies),
        statuses=statuses,
        bytes_received=sum(kind.count * kind.size for kind in tally.heads.values()),
    )


def main() -> None:
    order = json.load(sys.stdin)
    load = Load(
        **order | {"requests": [base64.b64decode(request) for request in order["requests"]]}
    )
    print(json.dumps(asdict(_fire(load))))


if __name__ == "__main__":
    main()
