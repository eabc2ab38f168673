"""TLS on every listener and in every client: trust, mutual TLS, renewal, large transfers, and
errors that help.
"""

import asyncio
import os
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import topic as _commands  # noqa: F401  # they join `app`
from penstock.cli.topic import commands
from penstock.client import Client
from penstock.client.connection import Endpoint, Link
from penstock.config.schema import (
    Config,
    HttpServerSettings,
    TcpServerSettings,
    Tls,
    WebsocketServerSettings,
)
from penstock.errors import ConfigError, InvalidRequest, Unavailable
from penstock.export.destinations import OutgoingBatch, RetryLater
from penstock.export.destinations.broker import BrokerDestination, BrokerTarget
from penstock.export.payload import FRAMES, NONE, join
from penstock.net.http import CannotConnect, HttpClient
from penstock.net.tls import client_context
from penstock.net.topic_link import TopicLink
from penstock.pipeline.sinks.queue import PushLink
from penstock.wire.tls import Certificate, Certificates
from tests.support.certificates import Authority
from tests.support.cli import CliRunner
from tests.support.served import Served, Wire, produce_body, serving, serving_in_thread
from tests.support.wait import eventually

MEGABYTE = 1 << 20


class Made:
    """A CA, a server's certificate from it and a client's, in files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority()
        self.ca, _ = self.authority.write(directory, "ca", "ca.key")
        self.cert, self.key = self.authority.issue(directory)
        self.client = self.authority.issue(directory, "billing", "client")

    def certificate(self, **options: object) -> Certificate:
        return Certificate(self.cert, self.key, **options)  # type: ignore[arg-type]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def tls_of(served: Served) -> str:
    return f"tls://localhost:{served.tcp.port}"


async def test_topics_over_tls_and_large_transfers(made: Made, tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "data", tls=made.certificate()) as served,
        Client(topics=tls_of(served), ca=made.ca) as client,
    ):
        assert served.http.url.startswith("https://")
        payloads = [os.urandom(MEGABYTE) for _ in range(24)]
        await asyncio.gather(*(client.topic("t").produce(payload) for payload in payloads))
        async with client.topic("t").reader(
            "earliest", follow=False, max_bytes=8 * MEGABYTE
        ) as reader:
            result = [bytes(record.payload) async for record in reader]
        assert sorted(result) == sorted(payloads)
        http = HttpClient(f"https://localhost:{served.http.port}", tls=client_context(made.ca))
        sent = await http.request(
            "POST",
            "/topics/h/produce",
            payloads[0],
            [("Content-Type", "application/octet-stream")],
        )
        assert sent.status == 201
        got = await http.request("GET", "/topics/h/consume?offset=0&max_messages=1")
        assert (got.status, len(got.body) > MEGABYTE) == (200, True)
        await http.close()


async def test_a_client_that_is_killed_in_the_middle_of_a_transfer_harms_nobody(
    made: Made, tmp_path: Path
) -> None:
    async with (
        serving(tmp_path / "data", tls=made.certificate()) as served,
        Client(topics=tls_of(served), ca=made.ca) as client,
    ):
        await client.topic("t").produce(*[b"x" * MEGABYTE for _ in range(16)])
        for _ in range(3):
            plain = socket.create_connection(("127.0.0.1", served.tcp.port))
            plain.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
            )  # closing resets
            loop = asyncio.get_running_loop()
            secure = await loop.run_in_executor(
                None,
                lambda at=plain: client_context(made.ca).wrap_socket(
                    at, server_hostname="localhost"
                ),
            )
            secure.sendall(
                frame(0x07, b"\0\1t" + bytes(8) + (16 * MEGABYTE).to_bytes(4, "big") + bytes(5))
            )
            assert await loop.run_in_executor(None, secure.recv, 1000)
            secure.close()
        assert (await client.topic("t").info()).records == 16
        await eventually(lambda: served.metrics.values_of("penstock_tcp_connections")[()] == 1)


def frame(command: int, body: bytes) -> bytes:
    return bytes([command]) + len(body).to_bytes(4, "big") + body


async def test_clients_must_show_a_certificate_when_they_are_asked_for_one(
    made: Made, tmp_path: Path
) -> None:
    stranger = Authority("Another CA")

    async with serving(tmp_path / "data", tls=made.certificate(client_ca=made.ca)) as served:
        shown = client_context(made.ca, *made.client)
        async with Client(topics=tls_of(served), tls=shown) as client:
            await client.topic("t").create()
            assert await client.topics() == ["t"]
        http = HttpClient(f"https://localhost:{served.http.port}", tls=shown)
        assert (await http.request("GET", "/topics")).body == b'["t"]'
        await http.close()
        others = [
            client_context(made.ca),
            client_context(made.ca, *stranger.issue(made.directory, "x", "x")),
        ]
        for other in others:
            link = Link(Endpoint([("localhost", served.tcp.port)], other))
            with pytest.raises(Unavailable, match="client certificate"):
                connection = await link.connection(0.0)  # one attempt
                await connection.request(frame(0x06, b""))
            link.close()
            http = HttpClient(f"https://localhost:{served.http.port}", tls=other)
            with pytest.raises(Unavailable, match="client certificate"):
                await http.request("GET", "/topics")
            await http.close()


async def test_a_renewed_certificate_is_used_without_a_restart_and_a_bad_one_is_not(
    made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = made.certificate()
    async with (
        serving(tmp_path / "data", tls=certificate) as served,
        Client(topics=tls_of(served), ca=made.ca) as open_before,
    ):
        await open_before.topic("t").create()
        assert not certificate.reload_if_changed()
        renewal = made.authority.issue(made.directory, "renewed.example", "renewal")
        shutil.copy(renewal[0], made.cert)  # the key has not come yet
        assert not certificate.reload_if_changed()
        assert "does not belong to the certificate" in caplog.text
        assert (await shown_to(served, made)) == "localhost"
        made.cert.unlink()
        assert not certificate.reload_if_changed()
        shutil.copy(renewal[0], made.cert)
        shutil.copy(renewal[1], made.key)
        assert certificate.reload_if_changed()
        assert (await shown_to(served, made)) == "renewed.example"
        assert await open_before.topics() == ["t"]


async def shown_to(served: Served, made: Made) -> str:
    """The name in the certificate that the server shows."""
    context = client_context(made.ca)
    context.check_hostname = False
    _, writer = await asyncio.open_connection("127.0.0.1", served.tcp.port, ssl=context)
    result = dict(part[0] for part in writer.get_extra_info("ssl_object").getpeercert()["subject"])[
        "commonName"
    ]
    writer.close()
    return str(result)


async def test_those_who_speak_in_clear_are_told(made: Made, tmp_path: Path) -> None:
    async with serving(tmp_path / "data", tls=made.certificate()) as served:
        http = HttpClient(f"http://localhost:{served.http.port}")
        answer = await http.request("POST", "/topics/t", b"x" * 100_000)
        assert (answer.status, b"This port uses TLS: use https://" in answer.body) == (
            400,
            True,
        )
        await http.close()
        wire = await Wire.connect(served.tcp.port)
        command, _, text = await wire.ask(0x01, produce_body("t", b"x"))
        assert (command, b"use tls://" in text) == (0xFF, True)
        wire.close()
        async with Client(topics=f"localhost:{served.tcp.port}") as client:
            with pytest.raises(InvalidRequest, match="this port uses TLS"):
                await client.topics()
        # Someone who connects and says nothing, or goes away, is no burden.
        silent = [socket.create_connection(("127.0.0.1", served.tcp.port)) for _ in range(3)]
        for one in silent:
            one.close()
        async with Client(topics=tls_of(served), ca=made.ca) as client:
            assert await client.topics() == []


async def test_clients_say_what_is_wrong_with_a_certificate(made: Made, tmp_path: Path) -> None:
    expired = made.authority.issue(made.directory, stem="expired", days=-1)

    for certificate, name, ca, said in (
        (Certificate(*expired), "localhost", made.ca, "has expired"),
        (made.certificate(), "localhost", None, "not from a trusted CA"),
        (made.certificate(), "127.0.0.1", made.ca, "not accepted: IP address mismatch"),
    ):
        async with serving(tmp_path / "data", tls=certificate) as served:
            http = HttpClient(f"https://{name}:{served.http.port}", tls=client_context(ca))
            with pytest.raises(CannotConnect, match=said):
                await http.request("GET", "/topics")
            await http.close()
            async with Client(
                topics=f"tls://{name}:{served.tcp.port}", ca=ca, timeout=0.2
            ) as client:
                with pytest.raises(Unavailable, match=said):
                    await client.topics()
    async with (
        serving(tmp_path / "data") as served,
        Client(topics=tls_of(served), ca=made.ca, timeout=0.2) as client,
    ):
        with pytest.raises(Unavailable, match="this port does not use TLS"):
            await client.topics()
    with pytest.raises(
        InvalidRequest, match="cannot read the CA's certificates from /none\\.pem: No such file"
    ):
        client_context("/none.pem")
    with pytest.raises(InvalidRequest, match="either all addresses begin with tls"):
        Client(topics="tls://a:1,b:2")


async def test_old_versions_are_refused(made: Made, tmp_path: Path) -> None:
    async with serving(tmp_path / "data", tls=made.certificate(minimum="1.3")) as served:
        old = client_context(made.ca)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        async with Client(topics=tls_of(served), tls=old, timeout=0.2) as client:
            with pytest.raises(Unavailable, match="another version"):
                await client.topics()
        async with Client(topics=tls_of(served), ca=made.ca) as client:
            assert await client.topics() == []


def test_what_cannot_be_used_is_told_at_the_start(made: Made) -> None:
    other = made.authority.issue(made.directory, "other", "other")
    (made.directory / "text.pem").write_text("hello")
    for tls, said in (
        (Tls(certificate=made.cert, private_key=other[1]), "does not belong to the certificate"),
        (Tls(certificate=made.directory / "none.pem"), "none.pem: No such file"),
        (Tls(certificate=made.directory / "text.pem"), "cannot use the certificate"),
        (Tls(certificate=made.cert), "cannot use the certificate"),
        (Tls(private_key=made.key), "no certificate"),
        (Tls(client_ca=made.ca), "no tls.certificate"),
        (
            Tls(certificate=made.cert, private_key=made.key, client_ca=made.key),
            "cannot use the client CA",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            Certificates(Config(tls=tls))


def test_which_listener_has_which_certificate(made: Made) -> None:
    tls = Tls(certificate=made.cert, private_key=made.key)
    result = Certificates(Config(tls=tls))
    assert result.http is result.websocket is result.tcp is not None
    assert time.time() < result.expires < time.time() + 2 * 86400
    result = Certificates(
        Config(
            tls=tls,
            tcp_server=TcpServerSettings(tls=False),
            websocket_server=WebsocketServerSettings(tls=False),
        )
    )
    assert (result.tcp, result.websocket, result.http is not None) == (None, None, True)
    own = HttpServerSettings(ssl_cert_path=made.cert, ssl_key_path=made.key)
    result = Certificates(Config(http_server=own))
    assert result.tcp is None
    assert result.websocket is result.http is not None
    assert Certificates(Config()).all == []


@pytest.fixture
def in_thread(made: Made, tmp_path: Path) -> Iterator[Served]:
    with serving_in_thread(tmp_path / "data", tls=made.certificate()) as served:
        yield served


def test_commands_and_the_links_of_spark_believe_the_ca_they_are_given(
    in_thread: Served, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = made.ca.read_text()  # what executors are given
    with TopicLink(tls_of(in_thread), patience=5.0, ca=text) as link:
        link.create("t")
        assert link.names() == ["t"]
    began = time.monotonic()
    with (
        TopicLink(tls_of(in_thread), patience=60.0) as link,
        pytest.raises(InvalidRequest, match="not from a trusted CA"),
    ):
        link.names()
    assert time.monotonic() - began < 30  # not tried again for a minute
    push = PushLink(f"https://localhost:{in_thread.http.port}", None, 0.1, text)
    with pytest.raises(InvalidRequest, match="404"):  # it is not served here, but it was asked
        push.push([b"{}"], repeatable=True)
    push.close()
    push = PushLink(f"https://localhost:{in_thread.http.port}", None, 0.1)
    with pytest.raises(InvalidRequest, match="not from a trusted CA"):
        push.push([b"{}"], repeatable=True)
    push.close()
    monkeypatch.setenv("PENSTOCK_CA_FILE", str(made.ca))
    done = CliRunner().invoke(commands, ["describe", "t", "--broker", tls_of(in_thread)])
    assert (done.exit_code, done.stdout.startswith("topic\tt\n")) == (0, True), done.output
    done = CliRunner().invoke(
        commands, ["scrub", "--url", f"https://localhost:{in_thread.http.port}"]
    )
    assert (done.exit_code, "next pass" in done.stdout) == (0, True), done.output


async def test_a_route_mirrors_to_a_broker_with_tls(made: Made, tmp_path: Path) -> None:
    async with serving(tmp_path / "data", tls=made.certificate()) as served:
        url = f"https://localhost:{served.http.port}"
        records = [b"one", b"two"]
        batch = OutgoingBatch("key", join(records, FRAMES), len(records), FRAMES, NONE)
        mirror = BrokerDestination(BrokerTarget(url=url, topic="mirror", ca=str(made.ca)))
        await mirror.send(batch, mirror.prepare(batch))
        await mirror.stop()
        assert served.topics.require("mirror").read(0).payloads() == records
        stranger = BrokerDestination(BrokerTarget(url=url, topic="mirror"))
        with pytest.raises(RetryLater, match="not from a trusted CA"):
            await stranger.send(batch, stranger.prepare(batch))
        await stranger.stop()
