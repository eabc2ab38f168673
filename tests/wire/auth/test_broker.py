"""A real broker of two processes with authentication on: every way in, with real tokens."""

import asyncio
import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from google.rpc.status_pb2 import Status
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from penstock import Client, SyncClient, errors
from penstock.cli.buffer import commands as buffer_commands
from penstock.cli.pipeline import commands as pipeline_commands
from penstock.cli.queue import commands as queue_commands
from penstock.cli.route import commands as route_commands
from penstock.cli.topic import commands as topic_commands
from penstock.net.topic_link import TopicLink
from penstock.protocol import frames
from penstock.protocol.frames import Command
from penstock.protocol.status import TcpStatus
from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess
from tests.support.cli import CliRunner
from tests.support.otlp import PROTOBUF, traces
from tests.support.remote_write import HEADERS, write_request
from tests.support.tokens import (
    AUDIENCE,
    ISSUER,
    SECRET,
    Provider,
    bearer,
    claims_of,
    jwk,
    private_key,
    provider,
    signed,
    token,
)
from tests.support.wait import Stopwatch, eventually, until

pytestmark = pytest.mark.xdist_group("auth")

ENV = {
    "JWT_ENABLED": "true",
    "JWT_SECRET": SECRET,
    "JWT_ISSUER": ISSUER,
    "JWT_AUDIENCE": AUDIENCE,
    "JWT_CLOCK_SKEW": "0",
}
READ_ONLY, READ_WRITE, ADMIN = (token(role, role) for role in ("read-only", "read-write", "admin"))
LEVELS = {"read-only": READ_ONLY, "read-write": READ_WRITE, "admin": ADMIN}
PUBLIC = {
    "/",
    "/health",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/metrics.json",
    "/metrics/prometheus",
}

NEEDED = {  # by the contract, and ours where it is silent
    "read-only": """GET /api/v1/status
        GET /api/v1/dlq
        GET /topics/topic/stream""",
    "read-write": """POST /api/v1/push
        GET /api/v1/pop/queue/queue
        POST /api/v1/ack/batch
        POST /api/v1/lease/lease/extend
        POST /api/v1/transaction
        POST /api/v1/configure
        POST /api/v1/traces
        POST /api/v1/consumer-groups/group/queues/queue/seek
        POST /api/v1/consumer-groups/group/subscription
        DELETE /api/v1/messages/partition/transaction
        POST /topics/topic/produce""",
    "admin": """DELETE /api/v1/resources/queues/queue
        DELETE /api/v1/consumer-groups/group
        GET /api/v1/system/maintenance
        POST /api/v1/system/maintenance/pop
        POST /api/v1/stats/refresh
        DELETE /api/v1/dlq
        DELETE /topics/topic
        POST /api/v1/routes""",
}


@pytest.fixture(scope="module")
def idp() -> Iterator[Provider]:
    with provider(jwk("EdDSA", "one")) as source:
        yield source


@pytest.fixture(scope="module")
def broker(postgres, tmp_path_factory, idp) -> Iterator[BrokerProcess]:
    env = {**ENV, "JWT_JWKS_URL": idp.url}
    directory = tmp_path_factory.mktemp("auth")
    with BrokerProcess(
        directory, database_url=fresh_database(postgres), env=env, workers=2
    ) as process:
        yield process
        process.stop()
        assert SECRET not in process.log


def ask(
    broker: BrokerProcess, method: str, path: str, given: str | None = None, **more: Any
) -> httpx.Response:
    return httpx.request(method, broker.url + path, headers=bearer(given) if given else {}, **more)


def on_every_process(
    broker: BrokerProcess, method: str, path: str, given: str | None, **more: Any
) -> set[int]:
    """The statuses of many requests, each on a connection of its own: the kernel spreads them over
    the processes.
    """
    with httpx.Client(
        headers={"Connection": "close", **(bearer(given) if given else {})}
    ) as client:
        return {client.request(method, broker.url + path, **more).status_code for _ in range(12)}


def test_without_a_good_token_it_is_401_with_the_reason(broker):
    missing = ask(broker, "GET", "/api/v1/resources/queues")
    assert missing.status_code == 401
    assert missing.json() == {
        "error": "Authentication required: send the header Authorization: Bearer <token>",
        "code": "Unauthorized",
    }
    assert missing.headers["www-authenticate"] == "Bearer"
    for bad, text in (
        (token(lifetime=-1), "The token has expired"),
        (signed(claims_of(), "k" * 40, "HS256"), "The token's signature is wrong"),
        (signed(claims_of(), None, "none"), "The token's algorithm 'none' is not accepted"),
        (token(aud="other"), "The token is for another audience"),
        (token(iss="other"), "The token is from another issuer"),
        ("nonsense", "The token is not a JWT"),
    ):
        answer = ask(broker, "POST", "/api/v1/push", bad, json={"items": []})
        assert (answer.status_code, answer.json()["error"]) == (401, text)
    basic = httpx.get(f"{broker.url}/topics", auth=("admin", "admin"))
    assert basic.status_code == 401
    assert (
        httpx.get(f"{broker.url}/topics", headers={"Authorization": READ_ONLY}).status_code == 200
    )  # a bare token


def concrete_paths(path: str, about: dict) -> list[str]:
    """Return the path with the name of each parameter as its value, or with each value it may
    have.
    """
    paths = [path]
    for one in about.get("parameters", ()):
        values = one["schema"].get("enum", [one["name"]])
        paths = [each.replace(f"{{{one['name']}}}", value) for each in paths for value in values]
    return list(dict.fromkeys(paths))


def test_every_route_asks_for_the_role_the_document_names_in_every_process(broker):
    operations = [
        (method.upper(), concrete, about)
        for path, methods in ask(broker, "GET", "/openapi.json").json()["paths"].items()
        for method, about in methods.items()
        for concrete in concrete_paths(path, about)
    ]
    assert len(operations) > 70
    assert {path for _, path, about in operations if "security" not in about} == PUBLIC
    order = list(LEVELS)
    with httpx.Client(base_url=broker.url) as one, httpx.Client(base_url=broker.url) as two:
        for method, path, about in operations:
            if "security" not in about:
                assert one.request(method, path).status_code == 200
                continue
            for client in (one, two):
                assert client.request(method, path).status_code == 401, path
                for role in order[: order.index(about["x-role"])]:
                    answer = client.request(method, path, headers=bearer(LEVELS[role]))
                    text = f"This needs the role {about['x-role']}; the token has {role}"
                    assert answer.status_code == 403, path
                    if about["responses"]["default"]["content"].get("application/json"):
                        streams = path.startswith("/streams/")
                        kind = {"success": False} if streams else {"code": "Forbidden"}
                        assert answer.json() == {"error": text} | kind, path
                    else:  # a protocol with errors of its own
                        assert text in answer.text, path
    roles = {(method, path): about.get("x-role") for method, path, about in operations}
    for role, asked in NEEDED.items():
        for each in asked.split("\n"):
            method, path = each.split()
            assert roles[method, path] == role, each


def test_workers_and_the_owner_behind_them_agree(broker):
    for path in ("/api/v1/resources/queues", "/topics", "/api/v1/routes"):
        assert on_every_process(broker, "GET", path, None) == {401}
        assert on_every_process(broker, "GET", path, READ_ONLY) == {200}
    assert on_every_process(
        broker, "POST", "/topics/t/produce", READ_ONLY, json={"payload": "x"}
    ) == {403}
    assert on_every_process(
        broker, "POST", "/topics/t/produce", READ_WRITE, json={"payload": "x"}
    ) == {201}
    assert on_every_process(broker, "GET", "/nowhere", None) == {404}
    assert on_every_process(broker, "GET", "/internal/metrics", ADMIN) == {
        404
    }  # between the processes only
    preflight = httpx.options(f"{broker.url}/api/v1/push")
    assert preflight.status_code == 204
    assert "Authorization" in preflight.headers["access-control-allow-headers"]


def test_the_producer_is_who_the_token_says_and_not_who_the_body_says(broker):
    def popped(queue: str) -> dict[Any, str | None]:
        answer = ask(
            broker,
            "GET",
            f"/api/v1/pop/queue/{queue}?batch=50&autoAck=true&wait=true&timeout=5000",
            ADMIN,
        )
        return {message["data"]: message["producerSub"] for message in answer.json()["messages"]}

    lie = {"queue": "who", "producerSub": "mallory", "producer": "mallory"}
    for number, name in enumerate(["alice", "bob"]):
        items = [{**lie, "payload": number}]
        on_every_process(
            broker, "POST", "/api/v1/push", token("read-write", name), json={"items": items}
        )
    flat = {"type": "push", **lie, "payload": 2}
    listed = {"type": "push", "items": [{**lie, "payload": 3}]}
    body = {"operations": [flat, listed], "producerSub": "mallory"}
    assert (
        ask(broker, "POST", "/api/v1/transaction", token("admin", "carol"), json=body).status_code
        == 200
    )
    nameless = [{**lie, "payload": 4}]
    assert (
        ask(
            broker, "POST", "/api/v1/push", token(subject=None), json={"items": nameless}
        ).status_code
        == 201
    )
    collected: dict[Any, str | None] = {}
    while len(collected) < 5:
        collected |= popped("who")
    assert collected == {0: "alice", 1: "bob", 2: "carol", 3: "carol", 4: None}
    later = {"items": [{**lie, "queue": "later", "payload": 1}], "bufferMs": 10}
    assert (
        ask(broker, "POST", "/api/v1/push", token(subject="dora"), json=later).json()["qos0"]
        is True
    )
    assert popped("later") == {1: "dora"}
    listing = ask(broker, "GET", "/api/v1/messages?queue=later", READ_ONLY).json()["messages"]
    assert [message["producerSub"] for message in listing] == ["dora"]


def test_a_push_in_maintenance_keeps_its_producer(broker):
    switch = "/api/v1/system/maintenance"
    assert ask(broker, "POST", switch, ADMIN, json={"enabled": True}).status_code == 200
    items = [{"queue": "kept", "payload": 1}]
    pushed = ask(broker, "POST", "/api/v1/push", token("read-write", "erin"), json={"items": items})
    ask(broker, "POST", switch, ADMIN, json={"enabled": False})
    assert pushed.json()[0]["status"] in (
        "buffered",
        "queued",
    )  # a worker hears of the switch a moment later
    answer = ask(broker, "GET", "/api/v1/pop/queue/kept?wait=true&timeout=10000", READ_WRITE)
    assert answer.json()["messages"][0]["producerSub"] == "erin"


def test_published_keys_are_believed_and_others_are_not(broker, idp):
    published = signed(claims_of("read-only"), private_key("EdDSA"), "EdDSA", kid="one")
    assert on_every_process(broker, "GET", "/topics", published) == {200}
    assert on_every_process(broker, "GET", "/api/v1/resources/queues", published) == {200}
    unknown = signed(claims_of(), private_key("EdDSA", 5), "EdDSA", kid="unpublished")
    answer = ask(broker, "GET", "/topics", unknown)
    assert (answer.status_code, answer.json()["error"]) == (
        401,
        "The token is signed with a key that is not known here",
    )


def test_a_stranger_cannot_make_the_broker_take_a_large_body(broker):
    host, _, port = broker.url.rpartition("//")[2].rpartition(":")
    head = "POST /api/v1/push HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n{}\r\n"
    for extra, status in (("", b"401"), (f"Authorization: Bearer {READ_ONLY}\r\n", b"403")):
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(head.format(extra).encode() + b"{")
            answer = connection.recv(1000)
            assert answer.split(b" ")[1] == status  # with nearly all of the body missing
            assert (b"WWW-Authenticate: Bearer" in answer) == (status == b"401")


def test_a_strangers_body_is_not_unpacked(broker):
    nonsense, packed = b"not gzip", {"Content-Encoding": "gzip"}
    for path in ("/api/v1/push", "/topics/t/produce"):
        for value, status in ((None, 401), (READ_ONLY, 403), (READ_WRITE, 400)):
            headers = {**packed, **(bearer(value) if value else {})}
            for _ in range(4):  # to every process
                assert (
                    httpx.post(f"{broker.url}{path}", content=nonsense, headers=headers).status_code
                    == status
                )


def test_events_take_the_token_in_the_query_and_end_with_it(broker):
    ask(broker, "POST", "/topics/events/produce", READ_WRITE, json={"payload": "x"})
    assert ask(broker, "GET", "/topics/events/stream").status_code == 401
    assert (
        ask(broker, "GET", f"/topics?access_token={READ_ONLY}").status_code == 401
    )  # only where there is no other way
    watch, short = Stopwatch(), token("read-only", lifetime=1.5)
    with httpx.stream(
        "GET", f"{broker.url}/topics/events/stream?offset=0&access_token={short}", timeout=20
    ) as stream:
        assert stream.status_code == 200
        lines = list(stream.iter_lines())  # to its end
    assert any(line.startswith("data:") for line in lines)
    assert watch.seconds < 10
    assert ask(broker, "GET", f"/topics/events/stream?access_token={short}").status_code == 401


async def test_a_websocket_needs_a_token_and_its_role(broker):
    for address, headers in (
        (broker.websocket, {}),
        (broker.websocket, bearer(token(lifetime=-1))),
    ):
        with pytest.raises(InvalidStatus) as caught:
            await connect(address, additional_headers=headers)
        assert caught.value.response.status_code == 401
    with pytest.raises(InvalidStatus) as caught:
        await connect(broker.websocket, additional_headers=bearer(token("nobody")))
    assert caught.value.response.status_code == 403
    produce = json.dumps({"command": "produce_request", "topic": "ws", "message_payload": "x"})
    listing = json.dumps({"command": "list_topics_request"})
    async with connect(f"{broker.websocket}/?access_token={READ_ONLY}") as reader:
        await reader.send(produce)
        answer = json.loads(await reader.recv())
        assert answer["command"] == "error_response"
        assert answer["error_message"] == "This needs the role read-write; the token has read-only"
        await reader.send(listing)
        assert json.loads(await reader.recv())["success"] is True
    brief = token("read-write", lifetime=1.5)
    async with connect(broker.websocket, additional_headers=bearer(brief)) as writer:
        await writer.send(produce)
        assert json.loads(await writer.recv())["success"] is True

        async def ask() -> None:
            await writer.send(listing)
            await writer.recv()

        with pytest.raises(ConnectionClosed) as closed:
            await eventually(ask)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (
            1008,
            "the token has expired",
        )


def exchange(connection: socket.socket, frame: bytes) -> tuple[int, int, bytes]:
    connection.sendall(frame)
    with connection.makefile("rb") as stream:
        command, status, length = frames.ANSWER.unpack(stream.read(frames.ANSWER.size))
        return command, status, stream.read(length)


def test_over_tcp_a_connection_says_who_it_is_before_anything_else(broker):
    listing = frames.request(Command.LIST_TOPICS)
    produce = frames.request(Command.PRODUCE, frames.name("tcp"), frames.U32.pack(1), b"x")
    with socket.create_connection(broker.tcp, 10) as connection:
        for frame in (listing, produce):
            command, status, text = exchange(connection, frame)
            assert (command, status) == (frames.ERROR, TcpStatus.UNAUTHORIZED)
            assert text[4:] == b"Authentication required: begin with AUTH and a token"
        bad = exchange(connection, frames.request(Command.AUTH, token(lifetime=-1).encode()))
        assert bad[:2] == (frames.ERROR, TcpStatus.UNAUTHORIZED)
        assert exchange(connection, frames.request(Command.AUTH, READ_ONLY.encode())) == (
            0x90,
            0,
            b"",
        )
        assert exchange(connection, listing)[:2] == (0x85, 0)
        assert exchange(connection, produce)[:2] == (frames.ERROR, TcpStatus.FORBIDDEN)
        assert exchange(connection, frames.request(Command.AUTH, READ_WRITE.encode()))[1] == 0
        assert exchange(connection, produce)[:2] == (0x81, 0)
        delete = frames.request(Command.DELETE_TOPIC, frames.name("tcp"))
        assert exchange(connection, delete)[:2] == (frames.ERROR, TcpStatus.FORBIDDEN)
        assert (
            exchange(connection, frames.request(Command.AUTH, b"nonsense"))[1]
            == TcpStatus.UNAUTHORIZED
        )
        assert exchange(connection, listing)[1] == TcpStatus.UNAUTHORIZED  # not who it was before
        assert (
            exchange(connection, frames.request(Command.AUTH, token(lifetime=1.5).encode()))[1] == 0
        )
        until(lambda: exchange(connection, listing)[1] == TcpStatus.UNAUTHORIZED)
    with socket.create_connection(
        broker.tcp, 10
    ) as connection:  # a stranger's large frame is not even received
        answer = exchange(connection, frames.REQUEST.pack(Command.PRODUCE, 1 << 20))
        assert answer[:2] == (frames.ERROR, TcpStatus.PAYLOAD_TOO_LARGE)
        assert connection.recv(1) == b""


async def test_the_clients_send_their_token(broker, monkeypatch):
    address = "{}:{}".format(*broker.tcp)

    async with Client(broker.url, token=READ_WRITE) as client:
        await client.push("by-client", {"n": 1})
        [message] = await client.pop("by-client", wait=5.0)
        assert message.data == {"n": 1}
        with pytest.raises(errors.Forbidden, match="needs the role admin"):
            await client.admin.delete_queue("by-client")
    given = iter([READ_WRITE, ADMIN])
    async with Client(broker.url, token=lambda: next(given)) as client:  # asked before each request
        await client.push("by-client", {"n": 2})
        assert await client.admin.delete_queue("by-client")
    async with Client(broker.url) as client:
        with pytest.raises(errors.Unauthorized, match="Authentication required"):
            await client.admin.queues()
    async with Client(topics=address, token=READ_WRITE) as topics:
        async with topics.topic("by-client").producer() as producer:
            assert await (await producer.send(b"one")) == 0
        async for record in topics.topic("by-client").reader("earliest", follow=False):
            assert bytes(record.payload) == b"one"
        with pytest.raises(errors.Forbidden):
            await topics.topic("by-client").delete()
    async with asyncio.timeout(60):
        given_out: list[str] = []

        def renewed() -> str:
            given_out.append(READ_WRITE if given_out else token("read-write", lifetime=1.5))
            return given_out[-1]

        async with Client(topics=address, token=renewed) as topics:
            producer = topics.topic("by-client").producer()
            while (
                len(given_out) < 2
            ):  # the first token expires, the connection is made anew with the next
                await (await producer.send(b"more"))
            await producer.close()
        for wrong in ("nonsense", None):
            async with Client(topics=address, token=wrong) as topics:
                with pytest.raises(errors.Unauthorized):
                    await topics.topics()
                producer = topics.topic("by-client").producer()
                with pytest.raises(errors.Unauthorized):
                    await (await producer.send(b"two"))
    with TopicLink(address, patience=5.0, token=READ_ONLY) as link:
        assert "by-client" in link.names()
    with (
        TopicLink(address, patience=5.0, token="nonsense") as link,
        pytest.raises(errors.Unauthorized),
    ):
        link.names()
    monkeypatch.setenv("PENSTOCK_TOKEN", ADMIN)
    with SyncClient(broker.url) as client:
        assert client.push("by-client", 1).status == "queued"


def test_commands_speak_of_the_option_for_the_token_and_not_of_a_header(broker, monkeypatch):
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    at, tcp = ("--url", broker.url), ("--broker", "{}:{}".format(*broker.tcp))
    commands = [
        (queue_commands, ["list", *at]),
        (topic_commands, ["describe", "t", *tcp]),
        (topic_commands, ["scrub", *at]),
        (buffer_commands, ["status", *at]),
        (route_commands, ["list", *at]),
        (pipeline_commands, ["list", *at]),
    ]

    def said(group: Any, arguments: list[str], *token: str) -> str:
        done = CliRunner().invoke(group, [*arguments, *token])
        assert done.exit_code == 1, done.output
        return " ".join(done.output.split())  # a terminal is narrow

    for group, arguments in commands:
        text = said(group, arguments)
        assert "this broker requires a token: pass --token TOKEN, or set PENSTOCK_TOKEN" in text
        assert "{" not in text
        text = said(group, arguments, "--token", "nonsense")
        assert (
            "the broker does not accept the token (--token or PENSTOCK_TOKEN):"
            " The token is not a JWT" in text
        )
    forbidden = said(queue_commands, ["delete", "by-client", "--yes", *at], "--token", READ_ONLY)
    assert "needs the role admin; the token has read-only (--token or PENSTOCK_TOKEN)" in forbidden


def test_a_route_to_another_broker_sends_its_token(broker):
    def route(name: str, given: str) -> None:
        destination = {"type": "broker", "url": broker.url, "topic": name, "token": given}
        made = ask(
            broker, "POST", "/api/v1/routes", ADMIN, json={"name": name, "destination": destination}
        )
        assert made.status_code == 201, made.text
        assert given not in made.text
        ask(broker, "POST", f"/api/v1/routes/{name}/push", READ_WRITE, json={"records": [{"n": 1}]})

    def status(path: str) -> Any:
        return ask(broker, "GET", path, READ_ONLY).json()

    route("mirrored", READ_WRITE)
    until(lambda: status("/topics/mirrored/next_offset").get("next_offset") == 1)
    route("refused", READ_ONLY)
    until(lambda: "403" in str(status("/api/v1/routes/refused")))


def test_commands_take_a_token_as_an_option_or_from_the_environment(broker):
    def run(commands: Any, *words: str, code: int = 0, **env: str) -> str:
        done = CliRunner(env=env).invoke(commands, list(words))
        assert done.exit_code == code, done.output
        return done.output

    where = {"PENSTOCK_URL": broker.url, "PENSTOCK_BROKER": "{}:{}".format(*broker.tcp)}
    asked = "this broker requires a token: pass --token"
    assert asked in run(queue_commands, "push", "cli", "1", code=1, **where)
    assert "queued" in run(queue_commands, "push", "cli", "1", "--token", READ_WRITE, **where)
    assert "cli" in run(queue_commands, "list", "--json", PENSTOCK_TOKEN=READ_ONLY, **where)
    assert asked in run(topic_commands, "list", code=1, **where)
    run(topic_commands, "create", "cli", "--token", READ_WRITE, **where)
    assert "cli" in run(topic_commands, "list", PENSTOCK_TOKEN=READ_ONLY, **where)


def test_changes_are_recorded_with_the_subject_by_every_process(broker):
    for number in range(6):  # each on a connection of its own
        body = {"queue": f"audited-{number}", "options": {"leaseTime": 60}}
        assert ask(broker, "POST", "/api/v1/configure", READ_WRITE, json=body).is_success
    assert ask(broker, "POST", "/topics/audited", READ_WRITE).status_code == 201
    gone = ask(broker, "DELETE", "/api/v1/resources/queues/audited-0", ADMIN)
    refused = ask(broker, "DELETE", "/api/v1/resources/queues/audited-1", READ_WRITE)
    assert (gone.status_code, refused.status_code) == (200, 403)
    page = ask(broker, "GET", "/api/v1/audit?filter=audited", ADMIN).json()
    seen = [(one["who"], one["action"], one["object"]) for one in reversed(page["entries"])]
    assert seen == [
        *(("read-write", "queue.configure", f"audited-{number}") for number in range(6)),
        ("read-write", "topic.create", "audited"),
        ("admin", "queue.delete", "audited-0"),
    ]
    assert page["entries"][-1]["detail"] == {"options": '{"leaseTime":60}'}
    assert "admin: queue.delete audited-0" in broker.log


def test_schedules_are_read_changed_and_deleted_by_role_and_the_changes_recorded(broker):
    one = "/api/v1/schedules/by-role"
    definition = {"cron": "0 3 * * *", "queue": "scheduled", "payload": {"card": "4111-1111"}}
    calls: list[tuple[str, str, str, dict[str, Any]]] = [
        ("read-write", "PUT", one, {"json": definition}),
        ("read-only", "GET", one, {}),
        ("read-only", "GET", "/api/v1/schedules", {}),
        ("read-write", "POST", f"{one}/pause", {}),
        ("read-write", "POST", f"{one}/resume", {}),
        ("read-write", "POST", f"{one}/run", {}),
        ("admin", "DELETE", one, {}),
    ]
    roles = list(LEVELS)
    for needed, method, path, more in calls:
        below = roles[: roles.index(needed)]
        refused = [ask(broker, method, path, LEVELS[role], **more).status_code for role in below]
        assert refused == [403] * len(below), path
        assert ask(broker, method, path, **more).status_code == 401
        allowed = ask(broker, method, path, LEVELS[needed], **more)
        assert allowed.is_success, (path, allowed.text)
    assert ask(broker, "GET", one, ADMIN).status_code == 404
    page = ask(broker, "GET", "/api/v1/audit?filter=by-role", ADMIN)
    seen = [(one["who"], one["action"], one["object"]) for one in page.json()["entries"]]
    assert list(reversed(seen)) == [
        ("read-write", "schedule.put", "by-role"),
        ("read-write", "schedule.pause", "by-role"),
        ("read-write", "schedule.resume", "by-role"),
        ("read-write", "schedule.run", "by-role"),
        ("admin", "schedule.delete", "by-role"),
    ]
    put = page.json()["entries"][-1]["detail"]
    assert (put["cron"], put["queue"]) == ("0 3 * * *", "scheduled")
    assert "4111-1111" not in page.text  # payloads are not for the audit


def test_the_configuration_is_shown_with_origins_and_without_secrets(broker):
    answer = ask(broker, "GET", "/api/v1/config", ADMIN)
    keys = {key["key"]: key for key in answer.json()["keys"]}
    assert SECRET not in answer.text
    assert keys["auth.secret"]["value"] == "***"
    assert "JWT_SECRET" in keys["auth.secret"]["origin"]
    assert (keys["auth.secret"]["default"], keys["log_format"]["default"]) == (False, True)


def test_exporters_without_a_token_hear_so_in_their_protocol_from_every_process(broker):
    def post(path: str, body: bytes, given: str | None, **headers: str) -> httpx.Response:
        headers |= {"Connection": "close", **(bearer(given) if given else {})}
        return httpx.post(broker.url + path, content=body, headers=headers)

    route = {
        "name": "spans",
        "destination": {"type": "otlp", "url": "http://127.0.0.1:1"},
        "queue": {"type": "memory"},
    }
    assert ask(broker, "POST", "/api/v1/routes", ADMIN, json=route).status_code == 201
    path, body = "/api/v1/routes/spans/v1/traces", traces("a").SerializeToString()
    for _ in range(6):  # the kernel spreads connections over the processes
        missing = post(path, body, None, **{"Content-Type": PROTOBUF})
        assert missing.status_code == 401
        assert missing.headers["content-type"] == PROTOBUF
        assert "Authentication required" in Status.FromString(missing.content).message
        too_little = post(path, body, READ_ONLY, **{"Content-Type": PROTOBUF})
        assert too_little.status_code == 403
        assert "read-write" in Status.FromString(too_little.content).message
        packed = {"Content-Type": PROTOBUF, "Content-Encoding": "gzip"}
        assert post(path, gzip.compress(body), READ_WRITE, **packed).status_code == 200
        samples = post("/api/v1/write", write_request(), None, **HEADERS)
        assert (samples.status_code, samples.headers["content-type"][:10]) == (401, "text/plain")
    deleted = ask(broker, "DELETE", "/api/v1/routes/spans?force=true", ADMIN)
    assert deleted.status_code == 204
