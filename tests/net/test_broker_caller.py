"""The blocking caller against real servers that come, go and refuse."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from penstock.errors import ConnectionLost, InvalidRequest, NotFound, StorageFull, Unavailable
from penstock.net.broker_caller import BrokerCaller
from penstock.net.http import CannotConnect
from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import HttpRoute
from tests.support.http import serving_in_thread


@contextmanager
def answering(answer: Callable[[Request], Response], **settings: Any) -> Iterator[str]:
    routes = [HttpRoute(method, "/x", answer) for method in ("GET", "POST")]
    with serving_in_thread(*routes, **settings) as server:
        yield f"http://127.0.0.1:{server.port}"


def test_bytes_and_json_go_over_one_connection_with_the_token() -> None:
    seen: list[tuple[object, str | None, bytes]] = []

    def answer(request: Request) -> Response:
        seen.append((request.peer, request.header("authorization"), request.body))
        return Response(200, request.body)

    with answering(answer) as url, BrokerCaller(url, token=lambda: "secret") as caller:
        assert caller.json("POST", "/x", {"a": [1, None]}) == {"a": [1, None]}
        assert caller.call("POST", "/x", b"raw \xff") == b"raw \xff"
        assert caller.json("GET", "/x") is None
        assert not caller.repeated
    assert {about[1] for about in seen} == {"Bearer secret"}
    assert len({id(about[0]) for about in seen}) == 1


def test_the_environments_token_is_used_without_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "from outside")
    with answering(lambda request: json_response(request.header("authorization"))) as url:
        with BrokerCaller(url) as caller:
            assert caller.json("GET", "/x") == "Bearer from outside"
        with BrokerCaller(url, token="given") as caller:
            assert caller.json("GET", "/x") == "Bearer given"


def test_what_may_pass_is_waited_out_and_the_request_counts_as_repeated() -> None:
    refusals = [
        json_response({"error": "later", "code": "Busy", "retryAfter": 2.0}, 503),
        json_response({"error": "disk full"}, 507),
        Response(502, b"Bad Gateway"),
    ]

    def answer(_: Request) -> Response:
        return refusals.pop() if refusals else json_response("done")

    with answering(answer) as url, BrokerCaller(url, patience=30.0) as caller:
        assert caller.json("POST", "/x", 1) == "done"
        assert caller.repeated
        assert caller.json("POST", "/x", 1) == "done"
        assert not caller.repeated


def test_what_may_not_pass_is_raised_at_once_and_patience_ends() -> None:
    calls: list[int] = []

    def answer(request: Request) -> Response:
        calls.append(int(request.body))
        return json_response({"error": "no"}, calls[-1])

    with answering(answer) as url, BrokerCaller(url, patience=0.3) as caller:
        with pytest.raises(NotFound, match=r"^no$"):
            caller.json("POST", "/x", 404)
        assert calls == [404]
        with pytest.raises(StorageFull):
            caller.json("POST", "/x", 507)
        assert calls.count(507) > 1


def test_an_attempt_answers_whatever_the_broker_does() -> None:
    with answering(lambda _: json_response({"results": []}, 429)) as url:
        status, body = BrokerCaller(url).attempt("POST", "/x", b"{}")
    assert (status, msgspec.json.decode(body)) == (429, {"results": []})


def test_whether_anything_was_sent_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(1 << 16)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(ConnectionLost):
            BrokerCaller(f"http://127.0.0.1:{port}").call("GET", "/x")
        thread.join()
    with pytest.raises(CannotConnect, match=f"no broker answers at http://127.0.0.1:{port}"):
        BrokerCaller(f"http://127.0.0.1:{port}").call("GET", "/x")


def test_a_port_that_does_not_speak_http_is_reported_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"\xff\x01\x00\x00\x00\x02no")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionLost, match="does not speak HTTP"):
            BrokerCaller(f"http://127.0.0.1:{listener.getsockname()[1]}").call("GET", "/x")
        thread.join()


def test_a_caller_outlives_its_broker() -> None:
    with answering(lambda _: json_response("first")) as url:
        caller = BrokerCaller(url, patience=30.0)
        assert caller.json("GET", "/x") == "first"
    with answering(lambda _: json_response("second"), port=int(url.rpartition(":")[2])):
        assert caller.json("GET", "/x") == "second"
        caller.close()


@pytest.mark.parametrize("body", [b"<html>", b"[" * 100_000 + b"]" * 100_000], ids=["no", "deep"])
def test_an_answer_that_is_no_json_is_not_a_brokers(body: bytes) -> None:
    with (
        answering(lambda _: Response(200, body)) as url,
        BrokerCaller(url) as caller,
        pytest.raises(Unavailable, match="not a broker's"),
    ):
        caller.json("GET", "/x")


@pytest.mark.parametrize("url", ["", "ftp://a", "http://", "http://a:b", "http://[::1"])
def test_a_wrong_url_says_what_a_right_one_is(url: str) -> None:
    with pytest.raises(InvalidRequest, match="http://host:6632"):
        BrokerCaller(url)
