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
from pathlib import Path

import httpx
import pytest
import websockets.sync.client

from penstock import Client
from penstock.client import TopicClient
from penstock.errors import PenstockError
from penstock.net.tls import client_context
from tests.support.broker import BrokerProcess
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


async def test_every_way_in_speaks_tls_and_renews_its_certificate(
    database_url: str, tmp_path: Path
) -> None:
    authority = Authority()
    ca, _ = authority.write(tmp_path, "ca", "ca.key")
    cert, key = authority.issue(tmp_path)
    settings = {"tls__certificate": cert, "tls__private_key": key, "tls__reload_interval": "1h"}
    with BrokerProcess(
        tmp_path / "data", database_url=database_url, workers=2, **settings
    ) as broker:
        assert [address.partition(":")[0] for address in broker.addresses.values()] == [
            "https",
            "tls",
            "wss",
        ]
        http, tcp, websocket = (port_of(address) for address in broker.addresses.values())
        trust = client_context(ca)

        async with Client(f"https://localhost:{http}", ca=ca) as client:
            await client.push("orders", {"id": 7})
            (taken,) = await client.pop("orders", wait=10, auto_ack=True)
            assert taken.data == {"id": 7}
        async with TopicClient(f"tls://localhost:{tcp}", ca=ca) as topics:
            await topics.produce("t", b"one", b"two")
        with httpx.stream(
            "GET", f"https://localhost:{http}/topics/t/stream?offset=1", verify=trust, timeout=20
        ) as events:
            assert "id: 1" in next(line for line in events.iter_lines() if line.startswith("id:"))
        with websockets.sync.client.connect(f"wss://localhost:{websocket}/", ssl=trust) as session:
            session.send('{"command":"list_topics_request","req_id":1}')
            assert json.loads(session.recv(timeout=10))["topics"] == ["t"]
        output = subprocess.run(
            [
                sys.executable,
                "-m",
                "penstock",
                "--ca",
                str(ca),
                "topic",
                "list",
                "-b",
                f"tls://localhost:{tcp}",
            ],
            capture_output=True,
            timeout=60,
        )
        assert (output.returncode, output.stdout) == (0, b"t\n"), output.stderr
        assert httpx.get(f"http://localhost:{http}/health").status_code == 400  # in clear

        renewal = authority.issue(tmp_path, "renewed.example", "renewal")
        shutil.copy(renewal[0], cert)
        shutil.copy(renewal[1], key)
        assert broker.process is not None
        os.kill(broker.process.pid, signal.SIGHUP)
        for port in (tcp, websocket):
            until(lambda port=port: shown_by(port, ca) == "renewed.example")
        # Both processes accept HTTP; the kernel spreads the connections.
        until(lambda: {shown_by(http, ca) for _ in range(16)} == {"renewed.example"})

        answered: list[int] = []

        async def under_load() -> None:
            context = client_context(ca)
            context.check_hostname = False
            async with TopicClient(f"tls://localhost:{tcp}", tls=context, timeout=5) as topics:
                while True:
                    answered.append(await topics.produce("t", b"x" * 100_000))
                    if len(answered) == 20:
                        broker.kill()

        with pytest.raises(PenstockError):
            await under_load()
        broker.start()

        async def after() -> int:
            context = client_context(ca)
            context.check_hostname = False
            async with TopicClient(f"tls://localhost:{tcp}", tls=context) as topics:
                return await topics.next_offset("t")

        assert await after() > answered[-1]


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
    assert "is not the one of the certificate" in done.stdout + done.stderr
    assert not (tmp_path / "data" / ".penstock" / "postgres").exists()
