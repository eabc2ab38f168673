"""The transport of kombu without Celery."""

import os
import threading
import time

import httpx
import kombu
import pytest
from kombu.transport import TRANSPORT_ALIASES

from penstock.celery import Transport, channel
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

    until(next_one_removes_it, 60, "the group is removed")


def test_options_that_an_operator_changed_are_kept(url: str, queue: str, api: httpx.Client) -> None:
    def declare() -> None:
        with kombu.Connection(url) as connection:
            kombu.Queue(queue)(connection.default_channel).declare()

    declare()
    api.patch(f"/api/v1/queues/{queue}/options", json={"leaseTime": 77}).raise_for_status()
    declare()
    options = api.get(f"/api/v1/queues/{queue}/options").json()
    assert "77" in str(options)
