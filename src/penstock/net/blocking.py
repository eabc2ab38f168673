"""A blocking HTTP/1.1 connection without an event loop, for frameworks that fork, use threads or
replace the socket module (gevent).

A connection carries one request at a time. `send` writes it, and `wait` reads the answer; with a
timeout of 0 it only reads what has arrived. `fileno` lets an event loop or `poll` watch many
connections, each with a request that waits at the broker. In a forked child the inherited socket
belongs to the parent: the child opens its own.
"""

import os
import select
import socket
import ssl
import time
from urllib.parse import urlsplit

import httptools

from penstock.errors import Unavailable
from penstock.net.http import CannotConnect, HttpAnswer, render_headers
from penstock.net.tls import client_context, explain

RECEIVE_BYTES = 64 << 10


class BlockingConnection:
    """One connection to the broker at `url`."""

    def __init__(
        self,
        url: str,
        *,
        tls: ssl.SSLContext | None = None,
        timeout: float = 5.0,
    ) -> None:
        parts = urlsplit(url)
        self.url = url
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or client_context()) if parts.scheme == "https" else None
        self._timeout = timeout  # seconds to connect, and to send
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._head = render_headers([("Host", f"{host}:{self._port}")])
        self._socket: socket.socket | None = None
        self._pid = 0  # the process that opened the socket
        self._served = 0  # answers on this socket
        self._answer: HttpAnswer | None = None
        self._reset_answer()

    @property
    def stale(self) -> bool:
        """Return whether the broker may have closed the connection before the request."""
        return self._served > 0 and not self._any_byte

    def fileno(self) -> int:
        """Return the file descriptor, or -1 if not connected."""
        return -1 if self._socket is None else self._socket.fileno()

    def send(self, method: str, target: str, body: bytes = b"", *headers: tuple[str, str]) -> None:
        """Send a request. Connect if there is no connection, or if the broker has closed an idle
        one.
        """
        length = b"" if method == "GET" else b"Content-Length: %d\r\n" % len(body)
        head = f"{method} {target} HTTP/1.1\r\n".encode() + self._head + render_headers(headers)
        while True:
            # Between requests, only the end of the connection can arrive.
            if self._socket is None or self._pid != os.getpid() or self._readable(0.0):
                self.close()
                self._connect()
            assert self._socket is not None
            self._reset_answer()
            try:
                self._socket.settimeout(self._timeout)
                self._socket.sendall(head + length + b"\r\n" + body)
                self._socket.setblocking(False)
                return
            except OSError as error:
                closed_while_idle = self.stale
                self.close()
                if not closed_while_idle:
                    raise Unavailable(f"{self._host}:{self._port}: {explain(error)}") from error

    def _receive(self) -> HttpAnswer | None:
        """Read what has arrived. Return the answer if it is complete, else None."""
        while self._socket is not None and self._answer is None:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError):
                return None
            except OSError as error:
                self._drop()
                raise Unavailable(f"{self._host}:{self._port}: {explain(error)}") from error
            if not data:
                self._drop()
                text = "the connection was closed without an answer"
                raise Unavailable(f"{self._host}:{self._port}: {text}")
            self._any_byte = True
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                self.close()
                raise Unavailable(
                    f"{self._host}:{self._port}: the answer is not HTTP: {error}"
                ) from error
        answer, self._answer = self._answer, None
        if answer is not None:
            self._served += 1
            if not self._keep_alive:
                self.close()
        return answer

    def wait(self, timeout: float) -> HttpAnswer | None:
        """Wait for the answer. Return None if it has not arrived after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (answer := self._receive()) is None:
            remaining = deadline - time.monotonic()
            if self._socket is None or remaining <= 0:
                return None
            self._readable(remaining)
        return answer

    def _readable(self, timeout: float) -> bool:
        """Wait until something has arrived, for at most `timeout` seconds."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def abandon(self, timeout: float) -> HttpAnswer | None:
        """Cancel a request that waits at the broker, and close the connection. Return the answer if
        the broker had sent it already.
        """
        if self._socket is None or self._pid != os.getpid():
            return None
        try:
            # The broker cancels the request and closes. (`SSLSocket.shutdown` would end the
            # decryption of an answer that is on its way.)
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            return self.wait(timeout)
        except (OSError, Unavailable):
            return None
        finally:
            self.close()

    def close(self) -> None:
        self._drop()
        self._served = 0

    def _drop(self) -> None:
        connected, self._socket = self._socket, None
        if connected is not None:
            connected.close()

    def _connect(self) -> None:
        address = f"{self._host}:{self._port}"
        plain = None
        try:
            plain = socket.create_connection((self._host, self._port), self._timeout)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected = plain
            if self._tls is not None:
                connected = self._tls.wrap_socket(plain, server_hostname=self._host)
        except OSError as error:  # includes ssl.SSLError and TimeoutError
            if plain is not None:
                plain.close()
            why = explain(error, handshaking=self._tls is not None)
            raise CannotConnect(f"cannot connect to {address}: {why}") from error
        self._socket, self._pid, self._served = connected, os.getpid(), 0

    def _reset_answer(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._answer = None
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._any_byte = False
        self._keep_alive = False

    # httptools.HttpResponseParser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            # read here: the parser drops the headers at the end of the message
            self._keep_alive = self._parser.should_keep_alive()
            self._answer = HttpAnswer(status, self._headers, b"".join(self._body))
