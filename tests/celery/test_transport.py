"""The transport of kombu without Celery."""

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import httpx
import kombu
import pytest
from kombu.transport import TRANSPORT_ALIASES

from penstock.celery import Transport, channel, kombu_transport
from tests.support.wait import until


def pops(api: httpx.Client) -> int:
    lines = api.get("/metrics").text.splitlines()
    counts = [one for one in lines if one.startswith("penstock_http_requests_total{")]
    assert counts, "the broker counts requests by route"
    return sum(int(float(one.rpartition(" ")[2])) for one in counts if "/pop" in one)


def test_the_schemes_are_registered_and_the_class_can_be_named(url: str) -> None:
    assert TRANSPORT_ALIASES["penstock"] == "penstock.celery:Transport"
    for name in ("penstock", "penstock.celery:Transport", Transport):
        with kombu.Connection(url, transport=name) as connection:
            connection.connect()
            assert isinstance(connection.transport, Transport)


WITHOUT_IMPORT = """
import sys
from celery import Celery
app = Celery("other", broker=sys.argv[1])
app.conf.update(broker_transport="penstock.celery:Transport", task_default_queue=sys.argv[2])
app.send_task("a.task")
assert app.connection().transport.driver_name == "penstock"
"""


def test_the_setting_is_enough_without_the_import(url: str, queue: str, api: httpx.Client) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_IMPORT, url, queue], check=True, timeout=120)
    totals = api.get(f"/api/v1/resources/queues/{queue}").json()["totals"]
    assert totals["pending"] == 1


@pytest.mark.parametrize("transport", [None, "penstock.celery:Transport"])
def test_a_url_for_tls_sends_nothing_in_clear(transport: str | None) -> None:
    """Also if the setting names the class: kombu does not keep the scheme of the URL then."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard: list[bytes] = []

        def hear() -> None:
            connection, _ = listener.accept()
            with connection:
                heard.append(connection.recv(65536))

        thread = threading.Thread(target=hear)
        thread.start()
        url = f"penstocks://:secret@127.0.0.1:{listener.getsockname()[1]}"
        connection = kombu.Connection(url, transport=transport)
        with pytest.raises(connection.connection_errors):
            connection.connect()
        thread.join(30)
    assert heard[0].startswith(b"\x16")  # the handshake of TLS


@pytest.mark.parametrize("transport", [None, "penstock.celery:Transport"])
def test_a_copy_of_a_connection_has_scheme_and_token_and_shows_no_token(
    transport: str | None,
) -> None:
    connection = kombu.Connection("penstocks://:secret@127.0.0.1:7", transport=transport)
    for one in (connection.clone(), pickle.loads(pickle.dumps(connection)), connection):
        assert one.transport.brokers.urls == ["https://127.0.0.1:7"]
        assert one.transport.brokers.headers() == (("Authorization", "Bearer secret"),)
        assert one.as_uri() == "penstocks://127.0.0.1:7/"
        about = one.info()  # `celery inspect stats` shows it without this field
        assert about.pop("password") == "secret"
        assert "secret" not in str(about)


def test_after_a_switch_to_an_alternate_every_broker_keeps_its_port() -> None:
    connection = kombu.Connection("penstock://one;penstock://two:7000")
    assert connection.transport.brokers.urls == ["http://one:6632", "http://two:7000"]
    connection.switch("penstock://two:7000")
    assert connection.transport.brokers.urls == ["http://two:7000", "http://one:6632"]
    assert connection.as_uri() == "penstock://two:7000/"


def test_waiting_is_one_long_request(url: str, queue: str, api: httpx.Client) -> None:
    with kombu.Connection(url) as connection, connection.SimpleQueue(queue) as simple:
        with pytest.raises(simple.Empty):
            simple.get(timeout=0.1)
        before = pops(api)
        with pytest.raises(simple.Empty):
            simple.get(timeout=2.0)
        assert pops(api) - before <= 1
        threading.Timer(0.5, put_later, (url, queue)).start()
        assert simple.get(timeout=60).payload == {"late": True}
        assert pops(api) > before


def test_all_queues_of_a_connection_share_one_pop(url: str, queue: str, api: httpx.Client) -> None:
    """Tasks with and without priorities, broadcasts and replies."""

    def waiting() -> int:
        lines, metric = api.get("/metrics").text.splitlines(), "penstock_queue_waiting_pops "
        return int(float(next(one for one in lines if one.startswith(metric)).split()[1]))

    news = kombu.Exchange(f"{queue}-news", type="fanout")
    answers = kombu.Exchange(f"{queue}-answers", type="direct", durable=False)
    sources = {
        "task": kombu.Queue(queue, routing_key=queue),
        "urgent": kombu.Queue(f"{queue}-p", routing_key=f"{queue}-p", max_priority=10),
        "news": kombu.Queue(f"{queue}-listener", news, auto_delete=True),
        "answer": kombu.Queue(f"{queue}-mine", answers, routing_key="mine", auto_delete=True),
    }
    with kombu.Connection(url) as connection, kombu.Connection(url) as sender:
        heard: list[str] = []
        with kombu.Consumer(
            connection, list(sources.values()), callbacks=[lambda body, _: heard.append(body)]
        ):
            with pytest.raises(TimeoutError):
                connection.drain_events(timeout=0.5)
            assert waiting() == 1
            for body, target in sources.items():
                before = pops(api)
                kombu.Producer(sender).publish(
                    body,
                    exchange=target.exchange,
                    routing_key=target.routing_key,
                    declare=[target.exchange] if target.exchange else [],
                    priority=9,
                )
                connection.drain_events(timeout=60)
                assert pops(api) - before <= 2
    assert heard == list(sources)


def test_queues_take_turns_and_a_busy_consumer_hears_broadcasts_only(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_AHEAD", 0)
    news = kombu.Exchange(f"{queue}-news", type="fanout")
    queues = [kombu.Queue(f"{queue}-{name}", routing_key=f"{queue}-{name}") for name in "abc"]
    listener = kombu.Queue(f"{queue}-listener", news, auto_delete=True)
    with kombu.Connection(url) as connection, kombu.Connection(url) as sender:
        producer = kombu.Producer(sender)
        for number in range(3):
            for one in queues:
                producer.publish(number, routing_key=one.name, declare=[one])
        received: list[kombu.Message] = []
        consumer = kombu.Consumer(
            connection, [*queues, listener], on_message=received.append, prefetch_count=1
        )
        with consumer:
            for number in range(9):
                connection.drain_events(timeout=60)
                if number == 4:
                    producer.publish("news", exchange=news, declare=[news])
                    connection.drain_events(timeout=60)
                    heard = received.pop()
                    heard.ack()
                    assert heard.payload == "news"
                    with pytest.raises(TimeoutError):  # the window is full
                        connection.drain_events(timeout=0.5)
                received[-1].ack()
    order = [message.delivery_info["routing_key"] for message in received]
    for turn in (order[:3], order[3:6], order[6:]):
        assert sorted(turn) == [one.name for one in queues]


def put_later(url: str, queue: str) -> None:
    with kombu.Connection(url) as connection, connection.SimpleQueue(queue) as simple:
        simple.put({"late": True})


def test_messages_that_were_not_delivered_go_back(url: str, queue: str, api: httpx.Client) -> None:
    with kombu.Connection(url) as connection, connection.SimpleQueue(queue) as simple:
        for number in range(10):
            simple.put(number)
        assert simple.get(timeout=60).payload == 0  # the others were taken with it
    totals = api.get(f"/api/v1/resources/queues/{queue}").json()["totals"]
    assert (totals["pending"], totals["processing"], totals["failed"]) == (10, 0, 0)


def test_requeued_messages_come_again_in_the_order_of_their_priorities(
    url: str, queue: str
) -> None:
    """kombu's integration tests, in the form that they have for Redis and MongoDB: one call of
    `drain_events` delivers one message.
    """
    declared = kombu.Queue(queue, routing_key=queue, max_priority=10)
    with kombu.Connection(url) as connection:
        producer = kombu.Producer(connection)

        def publish(body: str, priority: int) -> None:
            producer.publish(body, routing_key=queue, declare=[declared], priority=priority)

        def drain(count: int) -> list[kombu.Message]:
            received: list[kombu.Message] = []
            with kombu.Consumer(connection, [declared], on_message=received.append):
                for number in range(count):
                    connection.drain_events(timeout=30)
                    assert len(received) == number + 1
            return received

        for body, priority in (("first", 3), ("second", 6), ("third", 3)):
            publish(body, priority)
        messages = drain(3)
        assert messages[0].payload == "second"
        for message in messages:
            message.requeue()
        publish("fourth", 9)
        messages = drain(4)
        assert [message.payload for message in messages[:2]] == ["fourth", "second"]
        assert {message.payload for message in messages[2:]} == {"first", "third"}
        for message in messages:
            message.ack()


def test_a_requeued_message_is_redelivered_to_another_connection_without_a_limit(
    url: str, queue: str
) -> None:
    def take() -> kombu.Message:
        with kombu.Connection(url) as connection, connection.SimpleQueue(queue) as simple:
            message = simple.get(timeout=60)
            message.requeue()
            return message

    with kombu.Connection(url) as connection, connection.SimpleQueue(queue) as simple:
        simple.put("again")
    redelivered = [take().delivery_info["redelivered"] for _ in range(14)]
    assert redelivered == [False, *[True] * 13]


def test_a_forked_child_has_a_connection_of_its_own(url: str, queue: str) -> None:
    with kombu.Connection(url) as connection, connection.SimpleQueue(queue) as simple:
        simple.put("parent")
        child = os.fork()
        if child == 0:
            try:
                simple.put("child")
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        simple.put("parent again")
        payloads = []
        for _ in range(3):
            message = simple.get(timeout=60)
            message.ack()
            payloads.append(message.payload)
        assert sorted(payloads) == ["child", "parent", "parent again"]


def test_every_bound_queue_gets_a_broadcast(url: str, queue: str, api: httpx.Client) -> None:
    exchange = kombu.Exchange(f"{queue}-all", type="fanout")
    bound = [kombu.Queue(f"{queue}-{n}", exchange, auto_delete=True) for n in range(2)]
    with kombu.Connection(url) as listener, kombu.Connection(url) as sender:
        heard: list[str] = []
        with kombu.Consumer(
            listener, bound, callbacks=[lambda body, _: heard.append(body)], no_ack=True
        ):
            kombu.Producer(sender).publish("news", exchange=exchange, declare=[exchange])
            deadline = time.monotonic() + 60
            while len(heard) < 2:
                assert time.monotonic() < deadline, heard
                listener.drain_events(timeout=30)
    assert heard == ["news", "news"]
    names = {one["name"] for one in api.get("/api/v1/consumer-groups").json()}
    assert not names & {one.name for one in bound}


def test_a_listener_that_was_killed_is_removed_by_the_next(
    url: str, queue: str, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = kombu.Exchange(f"{queue}-all", type="fanout")

    def bind(connection: kombu.Connection, name: str) -> None:
        kombu.Queue(name, exchange, auto_delete=True)(connection.default_channel).declare()

    killed = os.fork()
    if killed == 0:
        bind(kombu.Connection(url), f"{queue}-killed")
        os.kill(os.getpid(), 9)
    os.waitpid(killed, 0)

    def groups() -> set[str]:
        return {one["name"] for one in api.get("/api/v1/consumer-groups").json()}

    assert f"{queue}-killed" in groups()
    monkeypatch.setattr(channel, "IDLE_GROUP_SECONDS", 0.0)

    def next_one_removes_it() -> bool:
        with kombu.Connection(url) as connection:
            bind(connection, f"{queue}-next")
        return f"{queue}-killed" not in groups()

    with kombu.Connection(url) as living:
        bind(living, f"{queue}-living")
        until(next_one_removes_it, 60, "the group is removed")
        assert f"{queue}-living" in groups()


def test_a_reply_queue_whose_client_was_killed_expires_and_is_removed_by_the_next(
    url: str, queue: str, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue of Celery's `rpc://` results: it goes with its connection, and nothing is bound."""

    def reply_queue(name: str) -> kombu.Queue:
        return kombu.Queue(name, routing_key=name, durable=False, auto_delete=True)

    def names() -> set[str]:
        """The reply queues of this test: those of others expire when they will."""
        answer = api.get("/api/v1/resources/queues", params={"namespace": channel.REPLIES})
        return {one["name"] for one in answer.json()["queues"] if one["name"].startswith(queue)}

    def ask(connection: kombu.Connection, name: str) -> None:
        """What a client of Celery does: it sends a task after it has declared its queue."""
        reply_queue(name)(connection.default_channel).declare()
        producer = kombu.Producer(connection.default_channel)
        producer.publish("a task", routing_key=queue)

    killed = os.fork()
    if killed == 0:
        ask(kombu.Connection(url), f"{queue}-killed")
        os.kill(os.getpid(), 9)
    os.waitpid(killed, 0)
    with kombu.Connection(url) as worker:
        kombu.Producer(worker).publish("its result", routing_key=f"{queue}-killed")
    options = api.get(f"/api/v1/queues/{queue}-killed/options").json()["options"]
    assert options["ttl"] == channel.TRANSIENT_OPTIONS["ttl"]
    assert options["retentionSeconds"] == channel.TRANSIENT_OPTIONS["retentionSeconds"]
    monkeypatch.setattr(channel, "UNUSED_REPLIES_SECONDS", 0.0)
    with kombu.Connection(url) as connection:
        ask(connection, f"{queue}-first")
        assert names() == {f"{queue}-killed", f"{queue}-first"}  # the result has not expired
        api.delete(f"/api/v1/queues/{queue}-killed/clear").raise_for_status()
        with kombu.Connection(url) as another:
            ask(another, f"{queue}-second")
            assert f"{queue}-killed" not in names()
    assert not {f"{queue}-first", f"{queue}-second"} & names()


def test_what_killed_clients_left_is_removed_by_a_consumer_that_runs(
    url: str, queue: str, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = kombu.Exchange(f"{queue}-all", type="fanout")

    def listener(name: str) -> kombu.Queue:
        return kombu.Queue(name, exchange, auto_delete=True)

    def groups() -> set[str]:
        return {one["name"] for one in api.get("/api/v1/consumer-groups").json()}

    killed = os.fork()
    if killed == 0:
        connection = kombu.Connection(url)
        listener(f"{queue}-killed")(connection.default_channel).declare()
        reply = kombu.Queue(f"{queue}-replies", durable=False, auto_delete=True)
        reply(connection.default_channel).declare()
        kombu.Producer(connection).publish("a task", routing_key=queue)
        os.kill(os.getpid(), 9)
    os.waitpid(killed, 0)
    with kombu.Connection(url) as running:
        running.Consumer([listener(f"{queue}-running")], callbacks=[print]).consume()
        assert f"{queue}-killed" in groups()
        assert api.get(f"/api/v1/queues/{queue}-replies/options").is_success
        monkeypatch.setattr(channel, "IDLE_GROUP_SECONDS", 0.0)
        monkeypatch.setattr(channel, "UNUSED_REPLIES_SECONDS", 0.0)
        monkeypatch.setattr(kombu_transport, "TIDY_SECONDS", 0.0)

        def removed() -> bool:
            with suppress(TimeoutError):
                running.drain_events(timeout=0.1)
            replies = api.get(f"/api/v1/queues/{queue}-replies/options").status_code
            return f"{queue}-killed" not in groups() and replies == 404

        until(removed, 60, "the group and the queue are removed")
        assert f"{queue}-running" in groups()


def test_options_that_an_operator_changed_are_kept(url: str, queue: str, api: httpx.Client) -> None:
    def declare() -> None:
        with kombu.Connection(url) as connection:
            kombu.Queue(queue)(connection.default_channel).declare()

    declare()
    api.patch(f"/api/v1/queues/{queue}/options", json={"leaseTime": 77}).raise_for_status()
    declare()
    options = api.get(f"/api/v1/queues/{queue}/options").json()
    assert "77" in str(options)
