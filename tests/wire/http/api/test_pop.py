"""Pops over HTTP: their answers, their options, waiting."""

import re
import socket
import time
import uuid

import httpx
import pytest

from tests.support.broker import BrokerProcess
from tests.support.wait import until
from tests.wire.http.api.conftest import MICROS


def test_a_pop_answers_with_the_shape_of_the_contract(api, queue):
    api.push(queue, {"n": 1}, partition="p 1")
    answer = api.client.get(
        f"/api/v1/pop/queue/{queue}/partition/p%201?consumerGroup=g&batch=5"
    ).json()
    (message,) = answer.pop("messages")
    assert answer.keys() == {
        "success", "queue", "partition", "partitionId", "leaseId", "consumerGroup", "partitionsClaimed",
    }  # fmt: skip
    assert (
        answer["success"],
        answer["queue"],
        answer["partition"],
        answer["partitionsClaimed"],
    ) == (
        True,
        queue,
        "p 1",
        1,
    )
    assert message.keys() == {
        "id", "transactionId", "traceId", "data", "producerSub", "createdAt", "partition", "partitionId", "leaseId",
        "consumerGroup",
    }  # fmt: skip
    assert MICROS.match(message["createdAt"])
    assert message["leaseId"] == answer["leaseId"]
    assert (message["consumerGroup"], message["partition"]) == ("g", "p 1")


def test_a_pop_that_answers_messages_first_has_both_answers(api, queue):
    api.push(queue, 1, 2, 3, partition="p")
    path = f"pop/queue/{queue}"
    first = api.post(path, {"acknowledgments": []}, batch=1)
    keys = ("transactionId", "partitionId", "leaseId")
    acks = [{key: first["messages"][0][key] for key in keys}]
    wrong = {**acks[0], "leaseId": str(uuid.uuid4()), "status": "failed"}
    second = api.post(path, {"acknowledgments": [*acks, wrong]}, batch=5)
    assert [m["data"] for m in second["messages"]] == [2, 3]
    assert second.keys() == first.keys()
    assert second["leaseId"] == second["messages"][0]["leaseId"]
    assert [(a["index"], a["success"]) for a in second["acknowledged"]] == [(0, True), (1, False)]
    assert second["acknowledged"][0]["leaseReleased"] is True
    last = [{key: message[key] for key in keys} for message in second["messages"]]
    empty = api.post(f"{path}/partition/p", {"acknowledgments": last})
    assert (empty["messages"], empty["leaseId"]) == ([], "")
    assert [a["success"] for a in empty["acknowledged"]] == [True, True]
    api.post(path, {"acks": []}, 400)
    assert api.pop(queue) == []


def test_one_request_pops_from_several_queues(api, queue):
    sources = [
        {"queue": queue, "consumerGroup": "g", "batch": 2},
        {"queue": f"{queue}-replies", "partition": "mine", "autoAck": True},
    ]
    body = {"sources": sources}
    api.post("pop/any", body, 204)
    api.push(queue, 1, 2, 3)
    first = api.post("pop/any", body)
    assert (first["source"], first["queue"], first["consumerGroup"]) == (0, queue, "g")
    assert [message["data"] for message in first["messages"]] == [1, 2]
    api.push(f"{queue}-replies", "for another", partition="another")
    api.push(f"{queue}-replies", "for me", partition="mine")
    second = api.post("pop/any", {"sources": sources, "wait": True, "timeout": 20_000})
    assert (second["source"], second["partition"], second["leaseId"]) == (1, "mine", "")
    assert [message["data"] for message in second["messages"]] == ["for me"]
    api.ack(*first["messages"], group="g")
    api.post("pop/any", {"sources": []}, 400)
    api.post("pop/any", {"sources": [{"consumerGroup": "g"}]}, 400)
    api.post("pop/any", {"sources": [{"queue": queue, "group": "g"}]}, 400)
    api.post("pop/any", {"sources": [{"queue": queue}] * 1001}, 400)


def test_an_empty_pop_is_204_without_a_body(api, queue):
    api.get(f"pop/queue/{queue}", 204)
    api.get(f"pop/queue/{queue}/partition/nowhere", 204)
    api.push(queue, 1)
    api.get(f"pop/queue/{queue}", 200)
    api.get(f"pop/queue/{queue}", 204)  # its partition is leased
    api.get(f"pop/queue/{queue}/partition/Default", 204)
    began = time.monotonic()
    api.get(f"pop/queue/{queue}", 204, wait="true", timeout=300)
    assert 0.25 < time.monotonic() - began < 20
    api.get("pop", 204, namespace=f"none-{queue}")


def test_an_empty_pop_says_when_there_is_no_such_queue(api, queue):
    """In a header: 204 is what the dialect's clients expect, and a queue is made by the first push
    to it.
    """
    path = f"/api/v1/pop/queue/{queue}"
    assert api.client.get(path).headers["Empty-Reason"] == "no such queue"
    api.push(queue, 1)
    assert len(api.pop(queue)) == 1
    assert "Empty-Reason" not in api.client.get(path).headers
    assert api.client.get(f"{path}/partition/other").headers["Empty-Reason"] == "no such partition"
    assert (
        api.client.get(f"/api/v1/pop?namespace={queue}x").headers["Empty-Reason"] == "no such queue"
    )


def test_queue_partition_and_group_names_are_percent_decoded(api):
    name = f"ä/ö?%{uuid.uuid4().hex}"
    api.push(name, 1, partition="a/b c")
    quoted = (
        name.replace("%", "%25")
        .replace("/", "%2F")
        .replace("?", "%3F")
        .replace("ä", "%C3%A4")
        .replace("ö", "%C3%B6")
    )
    (message,) = api.pop(f"{quoted}/partition/a%2Fb%20c", consumerGroup="g/1 +")
    assert message["partition"] == "a/b c"
    assert api.ack(message, group="g/1 +")[0]["success"]
    assert api.delete(f"consumer-groups/g%2F1%20%2B/queues/{quoted}")["queueName"] == name
    assert api.delete(f"resources/queues/{quoted}")["existed"] is True


def test_auto_ack_settles_at_once_and_leases_nothing(api, queue):
    api.push(queue, 1, 2)
    messages = api.pop(queue, autoAck="true", batch=2)
    assert [message["leaseId"] for message in messages] == ["", ""]
    assert api.pop(queue) == []


def test_batch_is_a_cap_over_all_claimed_partitions(api, queue):
    for partition in range(4):
        api.push(queue, 1, 2, 3, 4, 5, partition=str(partition))
    assert len(api.pop(queue, batch=100)) == 5
    answer = api.get(f"pop/queue/{queue}", batch=8, partitions=10)
    assert answer["partitionsClaimed"] == 2
    assert len(answer["messages"]) == 8
    assert len({message["leaseId"] for message in answer["messages"]}) == 1


@pytest.mark.parametrize(
    ("name", "value"), [("batch", "many"), ("wait", "maybe"), ("timeout", "soon")]
)
def test_a_query_parameter_of_the_wrong_type_is_a_400_that_names_it(api, queue, name, value):
    assert name in api.get(f"pop/queue/{queue}", 400, **{name: value})["error"]


def test_a_subscription_start_that_cannot_be_parsed_is_a_400(api, queue):
    api.push(queue, 1)
    assert (
        "subscriptionFrom"
        in api.get(f"pop/queue/{queue}", 400, consumerGroup="g", subscriptionFrom="soon")["error"]
    )
    assert (
        "subscriptionMode"
        in api.get(f"pop/queue/{queue}", 400, consumerGroup="g", subscriptionMode="x")["error"]
    )
    assert (
        "subscriptionFrom" in api.get(f"pop/queue/{queue}", 400, subscriptionFrom="soon")["error"]
    )  # queue mode too


def test_new_only_means_new(api, queue):
    api.push(queue, "old")
    assert api.pop(queue, consumerGroup="g", subscriptionMode="new-only") == []
    api.push(queue, "new")
    assert [m["data"] for m in api.pop(queue, consumerGroup="g", wait="true", timeout=5000)] == [
        "new"
    ]


def test_clients_of_a_later_version_get_a_batch_the_broker_picks(api, queue):
    api.push(queue, *range(30))
    messages = api.pop(
        queue, autopilot="true", wait="true", timeout=1000, consumerGroup="g", someFutureThing="7"
    )
    assert [message["data"] for message in messages] == list(range(30))


def test_priority_decides_between_queues_of_a_namespace(api, queue):
    for name, priority in (("low", 1), ("high", 5)):
        body = {
            "queue": f"{queue}-{name}",
            "namespace": queue,
            "task": "t",
            "options": {"priority": priority},
        }
        api.post("configure", body)
        api.push(f"{queue}-{name}", name)
    assert api.get("pop", namespace=queue, task="t")["queue"] == f"{queue}-high"
    assert api.get("pop", task="t", namespace=queue)["queue"] == f"{queue}-low"
    assert "namespace" in api.get("pop", 400)["error"]


def test_a_waiting_pop_that_is_given_up_leases_nothing(broker, api, queue):
    api.push(queue, 0)
    api.ack(*api.pop(queue))
    host, port = broker.url.removeprefix("http://").split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port))) as waiter:
            waiter.sendall(
                f"GET /api/v1/pop/queue/{queue}?wait=true&timeout=20000 HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
            )
            until(lambda: waiting_pops(broker) == 1, what="the pop waits")
        until(lambda: waiting_pops(broker) == 0, what="the pop is given up")
    api.push(queue, "for someone else")
    assert [message["data"] for message in api.pop(queue)] == ["for someone else"]


def waiting_pops(broker: BrokerProcess) -> float:
    text = httpx.get(f"{broker.url}/metrics/prometheus").text
    return float(re.search(r"^penstock_queue_waiting_pops (\S+)$", text, re.M)[1])


def test_an_absurdly_long_time_to_wait_is_just_long(api, queue):
    api.push(queue, 1)
    assert len(api.pop(queue, wait="true", timeout="9" * 400, autoAck="true")) == 1
    error = api.get(f"pop/queue/{queue}", 400, batch="9" * 5000)["error"]
    assert ("`batch`" in error, len(error) < 300) == (True, True)


def test_consumer_group_in_snake_case_is_the_group_of_a_pop(api, queue):
    api.push(queue, 1)
    for group in ("a", "b"):
        answer = api.get(f"pop/queue/{queue}", consumer_group=group, auto_ack="true")
        assert (answer["consumerGroup"], answer["messages"][0]["data"]) == (group, 1)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("consumergroup", "consumerGroup"),
        ("consumer-group", "consumerGroup"),
        ("consumerGrop", "consumerGroup"),
        ("group", "consumerGroup"),
        ("batchSize", "batch"),
        ("partition", "partitions"),
        ("autoack", "autoAck"),
        ("timeoutMs", "timeout"),
    ],
)
def test_a_misspelled_parameter_of_a_pop_is_refused_with_the_nearest_name(api, queue, given, meant):
    api.push(queue, 1)
    for method in ("GET", "POST"):
        body = {"acknowledgments": []} if method == "POST" else None
        path = f"/api/v1/pop/queue/{queue}"
        answer = api.client.request(method, path, params={given: "1"}, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"] == (
            f"Unknown query parameter `{given}`: did you mean `{meant}`?"
        )
    assert api.get(f"pop/queue/{queue}", traceparent="x", _="1")["messages"][0]["data"] == 1


def test_many_unknown_parameters_cost_little(api, queue):
    params = {f"{number:x}{'z' * 40}": "1" for number in range(1000)}
    assert api.client.get(f"/api/v1/pop/queue/{queue}", params=params).status_code == 204
