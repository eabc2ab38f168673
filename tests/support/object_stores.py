"""An S3 server for tests (moto's), and a proxy before it that fails in the ways stores fail."""

import base64
import contextlib
import hmac
import http.client
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import httpx

from tests.support import guard
from tests.support.ports import free_port
from tests.support.wait import until

BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server with an empty bucket."""
    from moto.server import ThreadedMotoServer  # half a second
    from werkzeug.serving import WSGIRequestHandler

    WSGIRequestHandler.disable_nagle_algorithm = True
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line per request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        httpx.put(f"{url}/{BUCKET}").raise_for_status()
        yield url
    finally:
        server.stop()


# In a process of its own: deltalake keeps the GIL while it waits for some of its answers.
SERVER = """
import sys
from tests.support.object_stores import s3_server
with s3_server() as url:
    print(url, flush=True)
    sys.stdin.read()
"""


@contextmanager
def s3_process() -> Iterator[str]:
    """The same in another process."""
    command = [sys.executable, "-c", SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.stdin.close()


class Faults:
    """What the proxy does to requests: `choose(method, path)` names a fault or none.

    "throttle" and "error" answer 503 and 500, "slow" waits, "cut" closes the connection in the
    middle of the body, "lost" hands the request on and loses the answer, "wrong" changes a byte of
    an answer.
    """

    def __init__(self) -> None:
        self.choose: Callable[[str, str], str | None] = lambda method, path: None
        self.seen: list[tuple[str, str, str | None]] = []
        self.slow_seconds = 0.2
        self.drop_headers: tuple[str, ...] = ()  # of requests, on their way

    def times(self, count: int, fault: str, method: str, within: str = "") -> None:
        """The next `count` requests of this kind fail."""
        remaining = count

        def choose(given: str, path: str) -> str | None:
            nonlocal remaining
            if remaining and given == method and within in path:
                remaining -= 1
                return fault
            return None

        self.choose = choose

    def always(self, fault: str) -> None:
        self.choose = lambda method, path: fault

    def never(self) -> None:
        self.choose = lambda method, path: None

    def count(self, fault: str) -> int:
        return sum(1 for _, _, chosen in self.seen if chosen == fault)


AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # known to everybody: Azurite has no other


@contextmanager
def azure_server(azurite: str) -> Iterator[dict[str, str]]:
    """Microsoft's emulator of Azure Blob Storage with an empty container; what finds it."""
    port = free_port()
    words = [azurite, "--inMemoryPersistence", "--silent", "--skipApiVersionCheck"]
    server = subprocess.Popen([*words, "--disableTelemetry", "--blobPort", str(port)])
    guard.watch(server.pid)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: _answers(port), 60, "Azurite listens")
        account, version = "devstoreaccount1", "2021-08-06"
        date = formatdate(usegmt=True)
        signed = (
            f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:{version}\n"
            f"/{account}/{account}/{BUCKET}\nrestype:container"
        )
        digest = hmac.digest(base64.b64decode(AZURITE_KEY), signed.encode(), "sha256")
        signature = base64.b64encode(digest).decode()
        headers = {
            "x-ms-date": date,
            "x-ms-version": version,
            "Authorization": f"SharedKey {account}:{signature}",
        }
        made = httpx.put(f"{url}/{account}/{BUCKET}?restype=container", headers=headers)
        made.raise_for_status()
        yield {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": url}
    finally:
        server.terminate()
        server.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextmanager
def faulty_proxy(target: str) -> Iterator[tuple[str, Faults]]:
    """The address of a proxy before `target`, and what it does."""
    faults = Faults()
    upstream = urlsplit(target)
    assert upstream.hostname is not None

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or the body waits 40 ms for the header to be confirmed

        def log_message(self, *words: object) -> None:
            pass

        def _forward(self) -> None:
            fault = faults.choose(self.command, self.path)
            faults.seen.append((self.command, self.path, fault))
            length = int(self.headers.get("content-length", 0))
            if fault == "cut":
                self.rfile.read(length // 2)
                self.close_connection = True
                self.connection.close()
                return
            body = self.rfile.read(length)
            if fault in ("throttle", "error"):
                status = 503 if fault == "throttle" else 500
                code = "SlowDown" if fault == "throttle" else "InternalError"
                self._answer(status, [], f"<Error><Code>{code}</Code></Error>".encode())
                return
            if fault == "slow":
                time.sleep(faults.slow_seconds)
            dropped = ("transfer-encoding", *faults.drop_headers)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
            connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port)
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            if fault == "lost":
                self.close_connection = True
                self.connection.close()
                return
            if fault == "wrong" and content:
                middle = len(content) // 2
                content = content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]
            size = answer.getheader("content-length") if self.command == "HEAD" else None
            with contextlib.suppress(ConnectionError):  # the client was killed
                self._answer(answer.status, answer.getheaders(), content, size)

        def _answer(
            self,
            status: int,
            headers: list[tuple[str, str]],
            content: bytes,
            size: str | None = None,
        ) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.send_header("content-length", size or str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
        setattr(Handler, f"do_{method}", Handler._forward)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", faults
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
