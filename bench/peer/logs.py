"""Appending single records to a log: Penstock's topics, Redis Streams, NATS JetStream, RabbitMQ
quorum queues.

Each is driven by the same thin client: one blocking socket, requests prepared once, `depth` of them
sent together, then their answers counted. Servers are the distribution's packages, started on a
loopback port with a directory of their own and stopped by their process id.
"""

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from bench.peer.rounds import Round, cpu_of
from bench.topics import SYNC_INTERVAL, connect, free_port, install, process, receive, scratch
from penstock.protocol import frames

PAYLOAD = b"x" * 300
FRAME = frames.produce("bench", PAYLOAD)
SECONDS = 1.0
RABBITMQ = "/usr/lib/rabbitmq/bin/rabbitmq-server"
START_SECONDS = 180.0  # RabbitMQ on a busy machine

Send = Callable[[int], None]  # send so many records and wait for their answers


class Log:
    """A server that runs, and how to append to it."""

    def __init__(self, send: Send, *pids: int) -> None:
        self._send = send
        self._pids = pids

    def append(self, depth: int, seconds: float = SECONDS) -> Round:
        messages, cpu = 0, cpu_of(*self._pids)
        began = now = time.perf_counter()
        while now < began + seconds:
            self._send(depth)
            messages += depth
            now = time.perf_counter()
        return Round(messages, now - began, cpu_of(*self._pids) - cpu)


class Missing(Exception):
    """This peer cannot be had here; the text says why."""


def program(name: str, package: str) -> str:
    result = install(name, package)
    if result is None:
        raise Missing(f"{name} is not installed and cannot be installed here")
    return result


def penstock(
    fsync: str, form: str = "aiq", interval: float = SYNC_INTERVAL
) -> AbstractContextManager[Log]:
    """With fsync `interval`, an fsync follows within so many seconds."""
    return producing("bench.topics", fsync, form, str(interval))


def bare(fsync: str) -> AbstractContextManager[Log]:
    """The floor: what the event loop, the socket and three files take by themselves."""
    return producing("bench.peer.bare_server", fsync, str(len(FRAME)))


@contextmanager
def producing(module: str, *arguments: str) -> Iterator[Log]:
    """A module that serves topics over TCP, in a process of its own."""
    with scratch() as directory, ExitStack() as stack:
        command = (sys.executable, "-m", module, str(directory), *arguments)
        running = stack.enter_context(process(*command, stdout=subprocess.PIPE))
        assert running.stdout is not None
        port = int(running.stdout.readline().split('"tcp": ')[1].split(",")[0])
        connection = stack.enter_context(connect(port))

        def send(depth: int) -> None:
            connection.sendall(FRAME * depth)
            answers = receive(connection, 14 * depth)
            if answers[-14:-12] != b"\x81\x00":
                raise RuntimeError(f"unexpected answer {answers[:64]!r}")

        send(1)
        yield Log(send, running.pid)


@contextmanager
def redis_server(appendfsync: str) -> Iterator[tuple[int, int]]:
    """A Redis that runs: its port and its process."""
    server, port = program("redis-server", "redis-server"), free_port()
    options = f"--port {port} --bind 127.0.0.1 --appendonly yes --appendfsync {appendfsync}"
    with scratch() as directory:
        more = ("--save", "", "--dir", str(directory))
        with process(server, *options.split(), *more, stdout=subprocess.DEVNULL) as running:
            yield port, running.pid


@contextmanager
def redis(appendfsync: str) -> Iterator[Log]:
    parts = [b"XADD", b"bench", b"*", b"p", PAYLOAD]
    command = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)
    with redis_server(appendfsync) as (port, pid), connect(port) as connection:

        def send(depth: int) -> None:
            connection.sendall(command * depth)
            lines = 0
            while lines < 2 * depth:  # an answer is $15\r\n<id>\r\n
                data = connection.recv(1 << 16)
                if not data or data.startswith(b"-"):
                    raise RuntimeError(f"unexpected answer {data[:100]!r}")
                lines += data.count(b"\n")

        yield Log(send, pid)


@contextmanager
def nats() -> Iterator[Log]:
    server, port = program("nats-server", "nats-server"), free_port()
    with scratch() as directory, ExitStack() as stack:
        options = f"-a 127.0.0.1 -p {port} -js -sd {directory}"
        running = stack.enter_context(process(server, *options.split(), stderr=subprocess.DEVNULL))
        connection = stack.enter_context(connect(port))
        connection.recv(1 << 16)
        stream = b'{"name":"bench","subjects":["bench"],"storage":"file","num_replicas":1}'
        connection.sendall(
            b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB made 1\r\nSUB acks 2\r\n'
            b"PUB $JS.API.STREAM.CREATE.bench made %d\r\n%b\r\n" % (len(stream), stream)
        )
        answer = connection.recv(1 << 16)
        while not answer.rstrip().endswith(b"}"):
            answer += connection.recv(1 << 16)
        if b'"error"' in answer:
            raise RuntimeError(f"NATS refused the stream: {answer!r}")
        message = b"PUB bench acks %d\r\n%b\r\n" % (len(PAYLOAD), PAYLOAD)

        def send(depth: int) -> None:
            connection.sendall(message * depth)
            acks = 0
            while acks < depth:
                data = connection.recv(1 << 16)
                if not data or b"-ERR" in data:
                    raise RuntimeError(f"unexpected answer {data[:100]!r}")
                acks += data.count(b"}\r\n")

        yield Log(send, running.pid)


@contextmanager
def rabbitmq() -> Iterator[Log]:
    with rabbitmq_server() as (port, pid), connect(port) as connection:
        yield Log(_Amqp(connection).send, pid)


@contextmanager
def rabbitmq_server() -> Iterator[tuple[int, int]]:
    """A RabbitMQ that runs: its port and its process."""
    program("rabbitmq-server", "rabbitmq-server")
    if not Path(RABBITMQ).exists():
        raise Missing(f"there is no {RABBITMQ}")
    port, epmd, distribution = free_port(), free_port(), free_port()
    with scratch() as directory, ExitStack() as stack:
        (directory / "rabbitmq.conf").write_text(f"listeners.tcp.default = 127.0.0.1:{port}\n")
        settings = {
            "HOME": str(directory),
            "ERL_EPMD_PORT": str(epmd),
            "ERL_FLAGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_NODENAME": "bench@localhost",
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_MNESIA_BASE": str(directory / "data"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
            "RABBITMQ_PID_FILE": str(directory / "pid"),
        }
        # its own name server, or Erlang would leave one running
        stack.enter_context(process("epmd", "-port", str(epmd), "-address", "127.0.0.1"))
        running = stack.enter_context(
            process(
                RABBITMQ,
                env=os.environ | settings,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        try:
            connect(port, START_SECONDS).close()
        except OSError:
            logged = b"".join(path.read_bytes() for path in (directory / "log").glob("*.log"))
            ends = logged.decode(errors="replace").strip().splitlines()[-3:]
            raise Missing(
                f"no answer after {START_SECONDS:g} s; its log: {' | '.join(ends)}"
            ) from None
        yield port, running.pid


class _Amqp:
    """AMQP 0-9-1, as much of it as publishing with confirms takes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = b""
        self._sent = self._confirmed = 0
        connection.sendall(b"AMQP\x00\x00\x09\x01")
        self._expect(10, 10)
        account = _short("PLAIN") + _long("\0guest\0guest") + _short("en_US")
        self._method(0, 10, 11, _table(b"") + account)
        self._expect(10, 30)
        self._method(0, 10, 31, struct.pack(">HIH", 2047, 131072, 0))
        self._method(0, 10, 40, _short("/") + b"\0\0")
        self._expect(10, 41)
        self._method(1, 20, 10, b"\0")
        self._expect(20, 11)
        kind = _short("x-queue-type") + b"S" + _long("quorum")
        self._method(1, 50, 10, b"\0\0" + _short("bench") + b"\x02" + _table(kind))
        self._expect(50, 11)
        self._method(1, 85, 10, b"\0")
        self._expect(85, 11)
        publish = struct.pack(">HHH", 60, 40, 0) + _short("") + _short("bench") + b"\0"
        header = struct.pack(">HHQHB", 60, 0, len(PAYLOAD), 0x1000, 2)  # persistent
        self._message = _frame(1, 1, publish) + _frame(2, 1, header) + _frame(3, 1, PAYLOAD)

    def send(self, depth: int) -> None:
        self._connection.sendall(self._message * depth)
        self._sent += depth
        while self._confirmed < self._sent:
            kind, method, body = self._read()
            if (kind, method) != (60, 80):
                raise RuntimeError(f"RabbitMQ answered {kind}.{method}: {body[:100]!r}")
            tag, several = struct.unpack(">QB", body[:9])
            self._confirmed = tag if several else self._confirmed + 1

    def _method(self, channel: int, kind: int, method: int, arguments: bytes) -> None:
        self._connection.sendall(_frame(1, channel, struct.pack(">HH", kind, method) + arguments))

    def _expect(self, kind: int, method: int) -> None:
        result = self._read()
        if result[:2] != (kind, method):
            raise RuntimeError(f"RabbitMQ answered {result[0]}.{result[1]}: {result[2][:200]!r}")

    def _read(self) -> tuple[int, int, bytes]:
        """The next method; heartbeats are passed over."""
        while True:
            while len(self._data) < 7 or len(self._data) < 8 + self._size():
                more = self._connection.recv(1 << 16)
                if not more:
                    raise RuntimeError("RabbitMQ closed the connection")
                self._data += more
            kind, size = self._data[0], self._size()
            body, self._data = self._data[7 : 7 + size], self._data[8 + size :]
            if kind == 1:
                return (*struct.unpack(">HH", body[:4]), body[4:])

    def _size(self) -> int:
        return int(struct.unpack_from(">I", self._data, 3)[0])


def _frame(kind: int, channel: int, body: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(body)) + body + b"\xce"


def _short(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _long(text: str) -> bytes:
    return struct.pack(">I", len(text)) + text.encode()


def _table(fields: bytes) -> bytes:
    return struct.pack(">I", len(fields)) + fields
