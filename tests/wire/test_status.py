"""One table of statuses for every protocol."""

import asyncio
import inspect
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from websockets.sync.client import connect

from penstock import errors
from penstock.client.brokers import Brokers
from penstock.client.connection import Endpoint, Link
from penstock.contract.operation import Operation
from penstock.net.broker_caller import BrokerCaller
from penstock.net.topic_link import TopicLink
from penstock.protocol import frames
from penstock.protocol.frames import Command
from penstock.protocol.status import (
    CLASSES,
    TABLE,
    Details,
    TcpStatus,
    error_from,
    error_from_http,
    error_from_tcp,
    is_expected,
    status_of,
)
from tests.support.served import Served, Wire, serving_in_thread

NESTED = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def test_every_error_class_has_a_row() -> None:
    classes = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.PenstockError)
        and kind not in (errors.QueueFull, errors.AckRefused)  # raised by the client only
    ]
    assert len(classes) > 10
    assert [kind.__name__ for kind in classes if kind not in TABLE] == []


def test_the_status_bytes_are_those_of_the_protocol() -> None:
    assert {status.name: status.value for status in TcpStatus} == {
        "SUCCESS": 0,
        "TOPIC_NOT_FOUND": 1,
        "INVALID_OFFSET": 2,
        "SERIALIZATION": 3,
        "PRODUCE_FAILED": 4,
        "INTERNAL": 5,
        "INVALID_REQUEST": 6,
        "PAYLOAD_TOO_LARGE": 7,
        "UNKNOWN_COMMAND": 8,
        "UNAUTHORIZED": 9,
        "FORBIDDEN": 10,
    }


@pytest.mark.parametrize(
    ("error", "http", "tcp"),
    [
        (errors.NotFound("x"), 404, TcpStatus.TOPIC_NOT_FOUND),
        (errors.InvalidOffset("x"), 400, TcpStatus.INVALID_OFFSET),
        (errors.TooLarge("x"), 413, TcpStatus.PAYLOAD_TOO_LARGE),
        (errors.StorageFull("x"), 507, TcpStatus.PRODUCE_FAILED),
        (errors.Unavailable("x"), 503, TcpStatus.INTERNAL),
        (msgspec.ValidationError("x"), 400, TcpStatus.SERIALIZATION),
        (RuntimeError("x"), 500, TcpStatus.INTERNAL),
    ],
)
def test_an_error_has_one_meaning_in_every_protocol(
    error: Exception, http: int, tcp: TcpStatus
) -> None:
    assert status_of(error) == (http, tcp)


def test_a_subclass_counts_as_its_base_and_a_stranger_is_unexpected() -> None:
    class Narrow(errors.Conflict):
        pass

    assert status_of(Narrow("x")).http == 409
    assert is_expected(Narrow("x"))
    assert not is_expected(KeyError("x"))


ERRORS: list[errors.PenstockError] = [
    *(
        kind("it did not work: ünd why")
        for kind in CLASSES.values()
        if not issubclass(kind, errors.Unavailable | errors.Damaged)
    ),
    *(errors.Unavailable("later", seconds) for seconds in (0.0, 0.25, 30.0)),
    errors.ConnectionLost("later"),
    errors.Busy("the database's disk is full", 5.0),
    errors.MissingKey("no key k1", 7.5),
    errors.Damaged("0.log at byte 7"),
    *(errors.Damaged("0.log at byte 7", resume) for resume in (0, 2**63)),
]
each_error = pytest.mark.parametrize(
    "error", ERRORS, ids=[f"{type(error).__name__}-{i}" for i, error in enumerate(ERRORS)]
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_in_thread(tmp_path_factory.mktemp("topics")) as served:
        yield served


@pytest.fixture
def failing(served: Served, error: errors.PenstockError, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A broker on which no topic can be created because of `error`."""

    async def create(_: str, **_options: object) -> None:
        raise error

    monkeypatch.setattr(served.topics, "create", create)
    return served


def same(raised: errors.PenstockError, error: errors.PenstockError) -> bool:
    return (type(raised), str(raised), vars(raised)) == (type(error), str(error), vars(error))


def test_every_error_class_is_among_those_sent() -> None:
    assert {type(error) for error in ERRORS} == set(CLASSES.values())


@each_error
async def test_an_error_over_http_is_the_same_in_our_clients(
    failing: Served, error: errors.PenstockError
) -> None:
    url = f"http://127.0.0.1:{failing.http.port}"
    with BrokerCaller(url) as caller, pytest.raises(errors.PenstockError) as caught:
        caller.json("POST", "/topics/t")
    assert same(caught.value, error)

    with pytest.raises(errors.PenstockError) as caught:
        brokers = Brokers([url], retry_for=0.0)
        try:
            await brokers.call(Operation("POST", "/topics/t", dict[str, Any], ""))
        finally:
            await brokers.close()
    assert same(caught.value, error)


@each_error
async def test_an_error_over_tcp_is_the_same_in_our_clients(
    failing: Served, error: errors.PenstockError
) -> None:
    with (
        TopicLink(failing.address, patience=0.0) as link,
        pytest.raises(errors.PenstockError) as caught,
    ):
        link.create("t")
    assert same(caught.value, error)

    async def ask(frame: bytes) -> None:
        link = Link(Endpoint([("127.0.0.1", failing.tcp.port)]))
        try:
            await (await link.connection(asyncio.get_running_loop().time() + 30)).request(frame)
        finally:
            link.close()

    for frame in (
        frames.request(Command.CREATE_TOPIC, frames.name("t")),
        frames.produce("t", b"x"),
        b"".join(frames.produce_batch("t", [b"x"])),
    ):
        with pytest.raises(errors.PenstockError) as caught:
            await ask(frame)
        assert same(caught.value, error)


@each_error
def test_an_error_over_websocket_is_the_same_when_it_is_read(
    failing: Served, error: errors.PenstockError
) -> None:
    with connect(f"ws://127.0.0.1:{failing.websocket.port}/") as socket:
        socket.send('{"command": "create_topic_request", "topic": "t"}')
        answer = socket.recv(30)
    text = msgspec.json.decode(answer)["error_message"]
    assert same(error_from(text, msgspec.json.decode(answer, type=Details)), error)


@each_error
async def test_a_client_of_the_original_reads_status_and_message_where_they_were(
    failing: Served, error: errors.PenstockError
) -> None:
    wire = await Wire.connect(failing.tcp.port)
    command, status, body = await wire.ask(Command.CREATE_TOPIC, frames.name("t"))
    (length,) = struct.unpack_from(">I", body)
    assert (command, status) == (frames.ERROR, status_of(error).tcp)
    assert body[4 : 4 + length].decode() == str(error)
    wire.close()


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, b"", errors.InvalidRequest),
        (404, b"<html>", errors.NotFound),
        (405, b'{"error": "no"}', errors.InvalidRequest),
        (408, b"", errors.Unavailable),
        (429, b'{"error": "full", "results": []}', errors.Full),
        (500, b'{"error": "internal error", "id": "7"}', errors.Unavailable),
        (502, b"Bad Gateway", errors.Unavailable),
        (503, b'{"error": 5}', errors.Unavailable),
        (507, b'["error"]', errors.StorageFull),
        (409, b'{"error": "x", "code": "NoSuchClass"}', errors.Conflict),
        (409, b'{"error": "x", "code": {}}', errors.Conflict),
        pytest.param(502, NESTED, errors.Unavailable, id="nested too deeply"),
    ],
)
def test_an_answer_without_a_class_of_ours_is_what_its_http_status_says(
    status: int, body: bytes, kind: type[errors.PenstockError]
) -> None:
    assert type(error_from_http(status, body)) is kind


@pytest.mark.parametrize(
    ("status", "details", "kind"),
    [
        (TcpStatus.TOPIC_NOT_FOUND, b"", errors.NotFound),
        (TcpStatus.SERIALIZATION, b"", errors.InvalidRequest),
        (TcpStatus.UNKNOWN_COMMAND, b"", errors.InvalidRequest),
        (TcpStatus.PRODUCE_FAILED, b"", errors.Unavailable),
        (TcpStatus.INTERNAL, b"no json", errors.Unavailable),
        (TcpStatus.INVALID_REQUEST, b'{"code": "NoSuchClass"}', errors.InvalidRequest),
        (77, b"", errors.Unavailable),
        pytest.param(TcpStatus.INTERNAL, NESTED, errors.Unavailable, id="nested too deeply"),
    ],
)
def test_an_answer_without_a_class_of_ours_is_what_its_tcp_status_says(
    status: int, details: bytes, kind: type[errors.PenstockError]
) -> None:
    assert type(error_from_tcp(status, "x", details)) is kind
