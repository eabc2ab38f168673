"""Blocking requests to several brokers, against servers that misbehave."""

import re
import select
import socket
import ssl
import textwrap
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

import penstock.blocking
from penstock.blocking import BlockingBrokers, Line, Settler
from penstock.errors import Unavailable
from penstock.net.http import HttpAnswer
from tests.support.broker import BrokerProcess
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.wait import Stopwatch, until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"


@contextmanager
def server(*answers: bytes | None) -> Iterator[tuple[str, list[bytes]]]:
    """One connection per answer: it is sent for the first request, and the connection closed. For
    None the connection stays open without an answer.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    requests: list[bytes] = []
    open_ones: list[socket.socket] = []

    def serve() -> None:
        for answer in answers:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            open_ones.append(connection)
            requests.append(connection.recv(65536))
            if answer is not None:
                connection.sendall(answer)
                connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for one in open_ones:
            one.close()
        thread.join(10)


def test_a_connection_that_was_closed_while_idle_is_opened_again() -> None:
    with server(OK, OK, OK) as (url, requests):
        line = Line(BlockingBrokers([url], token="secret"))
        for _ in range(3):
            assert line.json("GET", "/api/v1/me") == []
        assert len(requests) == 3
        assert b"Authorization: Bearer secret" in requests[0]
        line.close()


def test_requests_share_a_connection(broker: BrokerProcess) -> None:
    line = Line(BlockingBrokers([broker.url]))
    for _ in range(3):
        line.json("GET", "/api/v1/me")
        assert line.fileno() >= 0
    about = Path(f"/proc/self/fd/{line.fileno()}").readlink()
    line.json("GET", "/api/v1/queues", limit=1)
    assert Path(f"/proc/self/fd/{line.fileno()}").readlink() == about
    line.close()


def test_a_request_that_may_not_be_repeated_meets_no_connection_that_was_closed_while_idle() -> (
    None
):
    with server(OK, OK) as (url, requests):
        line = Line(BlockingBrokers([url]))
        line.json("GET", "/first")
        select.select([line.fileno()], [], [], 30)  # the server has closed it
        line.send("GET", "/second")
        answer = line.wait(30)
        assert answer is not None
        assert answer.body == b"[]"
        assert len(requests) == 2
        line.close()


def test_the_next_broker_is_used_and_kept() -> None:
    with server(OK, OK) as (url, requests):
        brokers = BlockingBrokers([f"http://127.0.0.1:{free_port()}", url])
        line = Line(brokers)
        assert line.json("GET", "/x") == []
        assert brokers.url == url
        assert Line(brokers).json("POST", "/y", body={"a": 1}) == []
        assert requests[1].endswith(b'{"a":1}')
        line.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<p/>",
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_what_is_not_an_answer_of_a_broker_is_unavailable(answer: bytes) -> None:
    with server(answer) as (url, _):
        line = Line(BlockingBrokers([url]))
        with pytest.raises(Unavailable):
            line.json("GET", "/x")
        line.close()


def test_waiting_ends_in_time_and_a_waiting_request_can_be_abandoned() -> None:
    with server(None) as (url, _):
        line = Line(BlockingBrokers([url]))
        line.send("GET", "/x")
        assert line.wait(0.05) is None
        assert line.abandon(0.05) is None
        assert line.fileno() == -1


def test_a_token_function_that_fails_is_tried_again() -> None:
    results = iter([OSError("the file is being written"), "secret"])

    def token() -> str:
        if isinstance(result := next(results), OSError):
            raise result
        return result

    with server(OK) as (url, requests):
        line = Line(BlockingBrokers([url], token=token))
        assert line.json("GET", "/x", retry_for=30) == []
        assert b"Bearer secret" in requests[0]
    line = Line(BlockingBrokers([url], token=lambda: {}["missing"]))
    with pytest.raises(Unavailable, match="token failed: KeyError"):
        line.json("GET", "/x")


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_the_answer_that_was_on_its_way_when_a_request_is_abandoned_is_kept(
    secure: bool, tmp_path: Path
) -> None:
    authority = Authority()
    certificate, key = authority.issue(tmp_path)
    ca, _ = authority.write(tmp_path)
    listener = socket.create_server(("127.0.0.1", 0))
    answered = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        if secure:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            connection = context.wrap_socket(connection, server_side=True)
        connection.recv(65536)
        connection.sendall(OK)
        answered.set()
        connection.recv(65536)  # until the client cancels the request
        connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    scheme = "https" if secure else "http"
    url = f"{scheme}://localhost:{listener.getsockname()[1]}"
    line = Line(BlockingBrokers([url], ca=str(ca) if secure else None))
    line.send("GET", "/x")
    assert answered.wait(30)
    answer = line.abandon(30)
    assert answer is not None
    assert answer.body == b"[]"
    thread.join(30)
    listener.close()


def test_no_broker_is_unavailable_after_the_patience() -> None:
    line = Line(BlockingBrokers([f"http://127.0.0.1:{free_port()}"]))
    with pytest.raises(Unavailable, match="cannot connect"):
        line.json("GET", "/x", retry_for=0.2)


def test_the_example_of_the_module_takes_and_settles_from_several_queues(
    broker: BrokerProcess, queue: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = re.findall(r"\n\n((?:    .*\n)+)", penstock.blocking.__doc__ or "")
    code = textwrap.dedent(code).replace("http://127.0.0.1:6632", broker.url)
    code = code.replace('"orders"', f'"{queue}"').replace('"mail"', f'"{queue}-mail"')
    line = Line(BlockingBrokers([broker.url]))
    for name in (f"{queue}-mail", queue):
        line.json("POST", "/api/v1/push", body={"items": [{"queue": name, "payload": name}]})
        exec(code, vars(penstock.blocking).copy())
        assert capsys.readouterr().out == f"{name} {name}\n"
        about = line.json("GET", "/api/v1/resources/queues", name)
        assert (about["totals"]["pending"], about["totals"]["processing"]) == (0, 0)
    line.close()


def test_a_renewal_that_no_broker_took_is_repeated_as_soon_as_one_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lease = str(uuid.uuid4())
    message = {"id": "m", "transactionId": "t", "partition": "p", "partitionId": "p"}
    message |= {"leaseId": lease, "createdAt": "2026-01-31T12:00:00Z"}
    body = msgspec.json.encode({"success": True, "messages": [message]})
    port = free_port()
    settler = Settler(BlockingBrokers([f"http://127.0.0.1:{port}"]))
    settler.take(HttpAnswer(200, {"lease-time": "15"}, body))  # it is renewed after 5 and 10 s
    until(lambda: "wait for a broker" in caplog.text, 60, "the renewal fails")
    watch = Stopwatch()
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(60)
        connection, _ = listener.accept()
        assert f"/api/v1/lease/{lease}/extend".encode() in connection.recv(65536)
        assert watch.seconds < 3.0
        connection.close()
    settler.close(1.0)


def test_the_text_of_an_error_that_cannot_be_stored_is_corrected(
    broker: BrokerProcess, queue: str
) -> None:
    brokers = BlockingBrokers([broker.url])
    line, settler = Line(brokers), Settler(brokers)
    for number in range(2):
        line.json("POST", "/api/v1/push", body={"items": [{"queue": queue, "payload": number}]})
        [message] = settler.take(line.pop([{"queue": queue}], wait=30)).messages
        settler.settle(message, "dlq", "NUL \0 and a lone surrogate \ud800")
        settler.flush(30)
    letters = line.json("GET", "/api/v1/dlq", queue=queue)["messages"]
    assert [one["errorMessage"] for one in letters] == ["NUL \ufffd and a lone surrogate ?"] * 2
    settler.close(5)
    line.close()


def test_an_answer_that_is_not_a_brokers_does_not_end_the_acknowledgements(
    broker: BrokerProcess, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = Line(BlockingBrokers([broker.url]))
    items = [{"queue": queue, "payload": number} for number in range(2)]
    line.json("POST", "/api/v1/push", body={"items": items})
    with server(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n[{}]") as (proxy, _):
        settler = Settler(BlockingBrokers([proxy, broker.url]))
        first, second = settler.take(line.pop([{"queue": queue, "batch": 2}], wait=30)).messages
        settler.settle(first, "completed")
        until(lambda: "have failed" in caplog.text, 60, "the answer is reported")
    settler.settle(first, "completed")
    settler.settle(second, "completed")
    settler.close(30)
    about = line.json("GET", "/api/v1/resources/queues", queue)
    assert (about["totals"]["pending"], about["totals"]["processing"]) == (0, 0)
    line.close()
