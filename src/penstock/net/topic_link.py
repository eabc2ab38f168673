"""A blocking connection to a broker's topics, for Spark's driver and executors.

Executors do one thing at a time, so this is a plain socket without an event loop. Every request
here is safe to repeat (reads, and appends of an idempotent producer). If the connection is lost, it
connects and sends the request again, until `patience` seconds have passed. So a broker that
restarts delays a batch and does not fail it.
"""

import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

import msgspec

from penstock.errors import InvalidRequest, PenstockError, Unavailable
from penstock.net.addresses import parse_addresses
from penstock.net.retry import Backoff
from penstock.net.tls import client_context, explain
from penstock.protocol import frames
from penstock.protocol.frames import (
    ANSWER,
    BATCH_ANSWER,
    TIMESTAMP,
    U64,
    Body,
    Bytes,
    Command,
    Fetched,
    Info,
)
from penstock.protocol.sink_claims import Claim, Claimed, Commit
from penstock.protocol.status import MAY_PASS, error_from_tcp

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0


class TopicLink(AbstractContextManager["TopicLink"]):
    """One connection to the first of the addresses that answers. Close it, or use it as a context
    manager.
    """

    def __init__(
        self,
        addresses: str,
        patience: float = 60.0,
        token: str | None = None,
        ca: str | None = None,
    ) -> None:
        self._addresses, secure = parse_addresses(addresses)
        self._tls = client_context(ca) if secure else None
        self._patience = patience
        self._token = token
        self._socket: socket.socket | None = None
        self._ahead: bytes | None = None  # a request that was sent in advance

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = self._ahead = None

    # Requests

    def info(self, topic: str) -> Info:
        return frames.read_info(self._command(Command.TOPIC_INFO, frames.name(topic)))

    def names(self) -> list[str]:
        return frames.read_names(self._command(Command.LIST_TOPICS))

    def create(self, topic: str) -> None:
        self._command(Command.CREATE_TOPIC, frames.name(topic))

    def offset_at(self, topic: str, milliseconds: int) -> int:
        at = TIMESTAMP.pack(milliseconds)
        return int(Body(self._command(Command.OFFSET_AT, frames.name(topic), at)).take(U64)[0])

    def commit(self, topic: str, group: str, offset: int) -> None:
        names = frames.name(topic), frames.name(group)
        self._command(Command.GROUP_COMMIT, *names, U64.pack(offset))

    def fetch(
        self, topic: str, start: int, max_bytes: int, *, keyed: bool = False, end: int = 0
    ) -> Fetched:
        """Return records as a raw log; with `keyed` as record batches, if the topic has them.

        If more records follow before `end`, request them in advance, so that the broker reads them
        while the caller processes these.
        """
        flags = frames.LENGTHS | frames.TIMES | (frames.FORMAT if keyed else 0)
        try:
            answer = self.ask(frames.fetch(topic, start, max_bytes, flags=flags))
        except InvalidRequest as error:
            # A broker of 0.2.0 has no record batches and rejects this flag.
            if not keyed or frames.UNKNOWN_FLAGS not in str(error):
                raise
            return self.fetch(topic, start, max_bytes, end=end)
        fetched = frames.read_fetched(answer, flags)
        if start < fetched.next_offset < end:
            self._ask_ahead(frames.fetch(topic, fetched.next_offset, max_bytes, flags=flags))
        return fetched

    def append(self, frame: Sequence[Bytes]) -> tuple[int, int]:
        """Send a PRODUCE_BATCH; return the first offset and the count. Without a producer in it, a
        retry may append twice.
        """
        first, count = Body(self.ask(*frame)).take(BATCH_ANSWER)
        return first, count

    def claim(self, claim: Claim) -> Claimed:
        body = self._command(Command.SINK_CLAIM, msgspec.json.encode(claim))
        return msgspec.json.decode(body, type=Claimed)

    def commit_sink(self, done: Commit) -> None:
        self._command(Command.SINK_COMMIT, msgspec.json.encode(done))

    # Sending

    def _command(self, command: Command, *parts: bytes) -> memoryview:
        return self.ask(frames.request(command, *parts))

    def ask(self, *pieces: Bytes) -> memoryview:
        """Send a frame and return the answer's body. Raises the error of its status."""
        deadline = time.monotonic() + self._patience
        backoff = Backoff()
        while True:
            try:
                if self._ahead is not None and self._ahead != pieces[0]:
                    self.close()  # drop the answer that was requested in advance
                connection = self._socket or self._connect()
                if self._ahead is None:
                    _send(connection, pieces)
                self._ahead = None
                return _answer(connection)
            except (OSError, EOFError, *MAY_PASS) as error:  # the broker failed, not the request
                self.close()
                delay = backoff.delay()
                if time.monotonic() + delay > deadline:
                    if isinstance(error, PenstockError):
                        raise
                    places = ", ".join(f"{host}:{port}" for host, port in self._addresses)
                    raise Unavailable(
                        f"the broker at {places} did not answer for {self._patience:g} s "
                        f"({error}); start it, or raise the option brokerTimeout"
                    ) from error
                time.sleep(delay)

    def _ask_ahead(self, request: bytes) -> None:
        """Send a request in advance. If the next request is the same, it gets the answer."""
        try:
            _send(self._socket or self._connect(), [request])
            self._ahead = request
        except OSError:
            self.close()  # the next request connects again

    def _connect(self) -> socket.socket:
        failure: OSError | None = None
        for address in self._addresses:
            try:
                connection = socket.create_connection(address, CONNECT_SECONDS)
                if self._tls is not None:
                    connection = self._tls.wrap_socket(connection, server_hostname=address[0])
            except ssl.SSLError as error:  # permanent
                raise InvalidRequest(f"{address[0]}:{address[1]}: {explain(error)}") from error
            except OSError as error:
                failure = error
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(ANSWER_SECONDS)
            if self._token:
                try:
                    _send(connection, [frames.request(Command.AUTH, self._token.encode())])
                    _answer(connection)
                except BaseException:
                    connection.close()
                    raise
            self._socket = connection
            return connection
        raise failure or ConnectionError("no address")


def _send(connection: socket.socket, pieces: Sequence[Bytes]) -> None:
    connection.sendall(pieces[0] if len(pieces) == 1 else b"".join(pieces))


def _answer(connection: socket.socket) -> memoryview:
    command, status, length = ANSWER.unpack(_receive(connection, ANSWER.size))
    if not command & frames.REPLY:
        raise InvalidRequest(frames.NOT_OURS)
    body = _receive(connection, length)
    if command == frames.ERROR:
        raise error_from_tcp(status, *frames.read_error(body))
    return body


def _receive(connection: socket.socket, size: int) -> memoryview:
    view = memoryview(bytearray(size))
    got = 0
    while got < size:
        count = connection.recv_into(view[got:])
        if not count:
            raise EOFError("the broker closed the connection")
        got += count
    return view
