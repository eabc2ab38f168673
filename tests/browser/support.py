"""What the tests of the Console do to a broker beside it."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.support.broker import BrokerProcess

PATIENCE_MS = 30_000  # the machine may be busy


def push(broker: BrokerProcess, queue: str, *payloads: object) -> None:
    items = [{"queue": queue, "payload": payload} for payload in payloads]
    httpx.post(f"{broker.url}/api/v1/push", json={"items": items}).raise_for_status()


def pop(broker: BrokerProcess, queue: str, group: str, batch: int) -> list[dict]:
    answer = httpx.get(
        f"{broker.url}/api/v1/pop/queue/{queue}", params={"consumerGroup": group, "batch": batch}
    )
    return answer.json()["messages"] if answer.status_code == 200 else []


def ack(
    broker: BrokerProcess, group: str, messages: list[dict], status: str, error: str = ""
) -> None:
    answers = [
        {k: m[k] for k in ("transactionId", "partitionId", "leaseId")}
        | {"status": status, "error": error}
        for m in messages
    ]
    body = {"acknowledgments": answers, "consumerGroup": group}
    httpx.post(f"{broker.url}/api/v1/ack/batch", json=body).raise_for_status()


def visit(page, broker: BrokerProcess, address: str) -> None:
    page.goto(f"{broker.url}/console/#/{address}")


@contextmanager
def destination() -> Iterator[tuple[str, list[int]]]:
    """An HTTP server that answers with the last of these statuses; its address, and they."""
    statuses = [400]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(statuses[-1])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", statuses
    server.shutdown()
