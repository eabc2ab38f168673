"""TLS of a real broker of two processes: every way in, a renewal by SIGHUP, kill -9 under load,
errors at the start.
"""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import websockets.sync.client

from penstock import Client
from penstock.errors import PenstockError
from penstock.net.tls import client_context
from tests.support.broker import ServeProcess
from tests.support.certificates import Authority
from tests.support.wait import until


def shown_by(port: int, ca: Path) -> str:
    """The name in the certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=str(ca))
    context.check_hostname = False
    with (
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        return str(dict(part[0] for part in secure.getpeercert()["subject"])["commonName"])


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@dataclass
class Secured:
    """A broker with two processes that speaks TLS everywhere, and what its certificate is from."""

    broker: ServeProcess
    authority: Authority
    ca: Path
    certificate: Path
    key: Path

    @property
    def ports(self) -> list[int]:
        """HTTP, TCP and WebSocket."""
        addresses = self.broker.addresses
        return [port_of(addresses[name]) for name in ("HTTP", "TCP", "WebSocket")]

    def trust(self) -> ssl.SSLContext:
        """Trust the authority whatever name the certificate has."""
        context = client_context(self.ca)
        context.check_hostname = False
        return context


@pytest.fixture
def secured(database_url: str, tmp_path: Path) -> Iterator[Secured]:
    authority = Authority()
    ca, _ = authority.write(tmp_path, "ca", "ca.key")
    cert, key = authority.issue(tmp_path)
    settings = {"tls__certificate": cert, "tls__private_key": key, "tls__reload_interval": "1h"}
    with ServeProcess(
        tmp_path / "data", database_url=database_url, workers=2, **settings
    ) as broker:
        yield Secured(broker, authority, ca, cert, key)


async def test_every_way_in_speaks_tls(secured: Secured) -> None:
    addresses = secured.broker.addresses
    schemes = [addresses[name].partition(":")[0] for name in ("HTTP", "TCP", "WebSocket")]
    assert schemes == ["https", "tls", "wss"]
    http, tcp, websocket = secured.ports
    trust = client_context(secured.ca)
    kafka = port_of(addresses["Kafka"])  # an address without a scheme, as Kafka clients take it
    with (
        socket.create_connection(("127.0.0.1", kafka), 20) as plain,
        trust.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        assert wrapped.version() in ("TLSv1.2", "TLSv1.3")
    async with Client(f"https://localhost:{http}", ca=secured.ca) as client:
        await client.push("orders", {"id": 7})
        (taken,) = await client.pop("orders", wait=10, auto_ack=True)
        assert taken.data == {"id": 7}
    async with Client(topics=f"tls://localhost:{tcp}", ca=secured.ca) as topics:
        await topics.topic("t").produce(b"one", b"two")
    with httpx.stream(
        "GET", f"https://localhost:{http}/topics/t/stream?offset=1", verify=trust, timeout=20
    ) as events:
        assert "id: 1" in next(line for line in events.iter_lines() if line.startswith("id:"))
    with websockets.sync.client.connect(
        f"wss://localhost:{websocket}/", ssl=trust, open_timeout=60
    ) as session:
        session.send('{"command":"list_topics_request","req_id":1}')
        assert json.loads(session.recv(timeout=10))["topics"] == ["t"]
    command = [sys.executable, "-m", "penstock", "--ca", str(secured.ca)]
    command += ["topic", "describe", "t", "-b", f"tls://localhost:{tcp}"]
    output = subprocess.run(command, capture_output=True, timeout=60)
    assert (output.returncode, output.stdout[:8]) == (0, b"topic\tt\n"), output.stderr
    assert httpx.get(f"http://localhost:{http}/health").status_code == 400  # in clear


def test_every_process_takes_a_renewed_certificate_at_sighup(
    secured: Secured, tmp_path: Path
) -> None:
    renewal = secured.authority.issue(tmp_path, "renewed.example", "renewal")
    shutil.copy(renewal[0], secured.certificate)
    shutil.copy(renewal[1], secured.key)
    assert secured.broker.process is not None
    os.kill(secured.broker.process.pid, signal.SIGHUP)
    http, *others = secured.ports
    for port in others:
        until(lambda port=port: shown_by(port, secured.ca) == "renewed.example")
    # Both processes accept HTTP; the kernel spreads the connections.
    until(lambda: {shown_by(http, secured.ca) for _ in range(16)} == {"renewed.example"})


async def test_a_producer_over_tls_loses_nothing_that_was_answered_before_a_kill(
    secured: Secured,
) -> None:
    address = f"tls://localhost:{secured.ports[1]}"
    answered: list[int] = []
    with pytest.raises(PenstockError):
        async with Client(topics=address, tls=secured.trust(), timeout=5) as topics:
            while True:
                answered.append(await topics.topic("t").produce(b"x" * 100_000))
                if len(answered) == 20:
                    secured.broker.kill()
    secured.broker.start()
    async with Client(topics=address, tls=secured.trust()) as topics:
        assert await topics.topic("t").next_offset() > answered[-1]


def test_a_certificate_that_cannot_be_used_ends_the_start_with_a_reason(tmp_path: Path) -> None:
    authority = Authority()
    cert, _ = authority.issue(tmp_path)
    _, other = authority.issue(tmp_path, stem="other")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "penstock", "serve", "--data-dir", str(tmp_path / "data")),
            *("--set", f"tls.certificate={cert}", "--set", f"tls.private_key={other}"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "does not belong to the certificate" in done.stdout + done.stderr
    assert not (tmp_path / "data" / ".penstock" / "postgres").exists()
