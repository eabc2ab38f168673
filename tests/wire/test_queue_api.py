"""The HTTP contract of queues, on the wire of a real broker process with a real PostgreSQL."""

import html
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import jsonschema
import pytest
from msgspec import Raw
from msgspec.structs import replace

from penstock.protocol.buffer_lines import Event, encode
from penstock.wire.http.examples import recorded
from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess
from tests.support.wait import until

pytestmark = pytest.mark.xdist_group("queue-api")

MICROS = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$")
MILLIS = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")


@pytest.fixture(scope="module")
def broker(postgres, tmp_path_factory) -> Iterator[BrokerProcess]:
    with BrokerProcess(
        tmp_path_factory.mktemp("api"), database_url=fresh_database(postgres)
    ) as process:
        yield process
        process.stop()
        assert [line for line in process.log.splitlines() if '"level":"error"' in line] == []


@pytest.fixture
def api(broker) -> Iterator["Api"]:
    with httpx.Client(base_url=broker.url, timeout=30) as client:
        yield Api(client)


@pytest.fixture
def queue() -> str:
    return f"q-{uuid.uuid4().hex[:12]}"


class Api:
    """Short words for the requests, with the status each test expects."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def ask(self, method: str, path: str, body: Any = None, status: int = 200, **query: Any) -> Any:
        content = (
            body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        )
        answer = self.client.request(
            method, f"/api/v1/{path}", content=content, params=query or None
        )
        assert answer.status_code == status, answer.text
        if status >= 400:
            assert isinstance(answer.json()["error"], str)
            assert "SELECT" not in answer.text
        assert status != 204 or answer.content == b""
        return answer.json() if answer.content else None

    def get(self, path: str, status: int = 200, **query: Any) -> Any:
        return self.ask("GET", path, None, status, **query)

    def post(self, path: str, body: Any = None, status: int = 200, **query: Any) -> Any:
        return self.ask("POST", path, body, status, **query)

    def delete(self, path: str, status: int = 200, **query: Any) -> Any:
        return self.ask("DELETE", path, None, status, **query)

    def push(self, queue: str, *payloads: Any, **fields: Any) -> list[dict[str, Any]]:
        items = [{"queue": queue, "payload": payload, **fields} for payload in payloads]
        return self.post("push", {"items": items}, 201)

    def pop(self, queue: str, **query: Any) -> list[dict[str, Any]]:
        answer = self.client.get(f"/api/v1/pop/queue/{queue}", params=query)
        assert answer.status_code in (200, 204), answer.text
        return answer.json()["messages"] if answer.content else []

    def ack(
        self, *messages: dict[str, Any], group: str | None = None, **fields: Any
    ) -> list[dict[str, Any]]:
        keys = ("transactionId", "partitionId", "leaseId")
        items = [{key: message[key] for key in keys} | fields for message in messages]
        return self.post("ack/batch", {"acknowledgments": items, "consumerGroup": group})

    def configure(self, queue: str, **options: Any) -> dict[str, Any]:
        return self.post("configure", {"queue": queue, "options": options})


# -- push
# -------------------------------------------------------------------------------------------------------------


def test_a_push_answers_201_with_one_result_per_item_in_order(api, queue):
    trace = str(uuid.uuid4())
    items = [
        {"queue": queue, "payload": {"n": 1}, "transactionId": "a", "traceId": trace},
        {"queue": f"{queue}.other", "partition": "p", "transactionId": "a"},
        {"queue": queue, "payload": 2, "transactionId": "a"},
        {"queue": queue, "payload": 3, "transactionId": None, "unknown": "field"},
    ]
    first, other, twin, last = api.post("push", {"items": items}, 201)
    assert first.keys() == {
        "index", "status", "message_id", "transaction_id", "partition_id", "trace_id", "queueName",
    }  # fmt: skip
    assert (first["index"], first["status"], first["transaction_id"], first["trace_id"]) == (
        0,
        "queued",
        "a",
        trace,
    )
    assert (other["status"], other["queueName"], other["trace_id"]) == (
        "queued",
        f"{queue}.other",
        None,
    )
    assert twin == {
        "index": 2, "status": "duplicate", "message_id": first["message_id"], "transaction_id": "a", "queueName": queue,
    }  # fmt: skip
    assert last["status"] == "queued"
    assert uuid.UUID(last["transaction_id"])
    assert api.post("push", {"items": []}, 201) == []
    described = api.get(f"resources/queues/{queue}.other")
    assert (described["namespace"], described["task"]) == (queue, "other")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "Empty request body"),
        (b"{", "Invalid JSON"),
        (b'{"items":[{"queue":"q","payload":"\xff"}]}', "Invalid JSON"),
        (b'{"items":[{"queue":"q","payload":' + b"[" * 100_000, "nested too deeply"),
        ({}, "items array is required"),
        ({"items": 7}, "items array is required"),
        ({"items": [{}]}, "Queue must be a string"),
        ({"items": [{"queue": "q"}, {"queue": 7}]}, "Queue must be a string"),
        ({"items": [{"queue": ""}]}, "queue must not be empty"),
        ({"items": [{"queue": "q", "partition": 7}]}, "Partition must be a string"),
        ({"items": [{"queue": "q", "transactionId": 7}]}, "TransactionId must be a string"),
        ({"items": [{"queue": "q", "traceId": 7}]}, "TraceId must be a string"),
        ({"items": [{"queue": "q", "traceId": "no uuid"}]}, "traceId"),
        ({"items": [{"queue": "q"}], "bufferMs": 10**12}, "bufferMs"),
        ({"items": [{"queue": "q"}], "bufferMs": -1}, "bufferMs"),
        ({"items": [{"queue": "q"}], "bufferMax": 0}, "bufferMax"),
        ({"items": [{"queue": "q\u0000"}]}, "NUL"),
        ({"items": [{"queue": "q", "transactionId": "\u0000"}]}, "NUL"),
        ({"items": [{"queue": "q" * 600}]}, "longer than"),
    ],
)
def test_a_push_that_can_never_succeed_is_a_400_that_says_why(api, body, text):
    assert text in api.post("push", body, 400)["error"]


@pytest.mark.parametrize(
    "payload",
    [
        '"\\u0000"',
        '{"a" :  [1,\n2]}',
        "1e999",
        "123456789012345678901234567890",
        '"\u00e4\U0001f600"',
        "null",
    ],
)
def test_a_payload_passes_through_byte_for_byte(broker, queue, payload):
    body = b'{"items":[{"queue":"%s","payload":%s}]}' % (queue.encode(), payload.encode())
    assert httpx.post(f"{broker.url}/api/v1/push", content=body).status_code == 201
    answer = httpx.get(f"{broker.url}/api/v1/pop/queue/{queue}")
    assert b'"data":' + payload.encode() + b',"producerSub":null' in answer.content


def test_a_full_queue_answers_429_and_says_which_items_did_not_fit(api, queue):
    api.configure(queue, maxSize=2)
    items = [{"queue": queue, "payload": n, "transactionId": str(n)} for n in range(3)]
    refused = api.post("push", {"items": items}, 429)
    assert [result["status"] for result in refused["results"]] == ["queued", "queued", "failed"]
    assert refused["full"] == [2]
    assert queue in refused["error"]
    again = api.post("push", {"items": items}, 429)  # what is stored is known by its id
    assert [result["status"] for result in again["results"]] == ["duplicate", "duplicate", "failed"]
    api.ack(*api.pop(queue, batch=10))
    assert api.push(queue, 4)[0]["status"] == "queued"


# -- pop
# --------------------------------------------------------------------------------------------------------------


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


def test_an_empty_pop_is_204_without_a_body(api, queue):
    api.get(f"pop/queue/{queue}", 204)
    api.get(f"pop/queue/{queue}/partition/nowhere", 204)
    api.push(queue, 1)
    api.get(f"pop/queue/{queue}", 200)
    api.get(f"pop/queue/{queue}", 204)  # its partition is leased
    api.get(f"pop/queue/{queue}/partition/Default", 204)
    began = time.monotonic()
    api.get(f"pop/queue/{queue}", 204, wait="true", timeout=300)
    assert 0.25 < time.monotonic() - began < 3
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


# -- ack, lease, transaction
# ------------------------------------------------------------------------------------------


def test_acks_are_answered_in_the_order_of_the_request(api, queue):
    api.push(queue, 1, 2, 3)
    messages = api.pop(queue, batch=3)
    stranger = {**messages[0], "transactionId": "nobody"}
    results = api.ack(messages[2], stranger, messages[0])
    assert results[0].keys() == {
        "index", "transactionId", "success", "error", "queueName", "partitionName", "leaseReleased", "dlq",
    }  # fmt: skip
    assert [result["index"] for result in results] == [0, 1, 2]
    assert [result["success"] for result in results] == [True, False, True]
    assert results[1]["error"] == "Message not found"
    assert (results[0]["queueName"], results[0]["partitionName"], results[0]["dlq"]) == (
        queue,
        "Default",
        False,
    )
    (result,) = api.post(
        "ack", {key: messages[1][key] for key in ("transactionId", "partitionId", "leaseId")}
    )
    assert (result["success"], result["leaseReleased"]) == (True, True)
    assert api.post("ack/batch", {"acknowledgments": []}) == []


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("ack", {"partitionId": "x"}, "transactionId is required"),
        ("ack", {"transactionId": "x"}, "partitionId is required to ensure message uniqueness"),
        ("ack/batch", {}, "acknowledgments array is required"),
        (
            "ack/batch",
            {"acknowledgments": [{}]},
            "Each acknowledgment must have a valid transactionId string",
        ),
        (
            "ack/batch",
            {"acknowledgments": [{"transactionId": "x", "partitionId": 7}]},
            "Each acknowledgment must have a valid partitionId string to ensure message uniqueness",
        ),
        ("transaction", {}, "operations array required"),
        ("transaction", {"operations": []}, "operations array cannot be empty"),
        ("transaction", {"operations": [{"type": "dance"}]}, "Unknown operation type: dance"),
        ("configure", {"options": {}}, "queue is required"),
        ("configure", {"queue": "q", "options": {"leaseTimes": 3}}, "unknown option: leaseTimes"),
        (
            "configure",
            {"queue": "q", "options": {"leaseTime": "3"}},
            "leaseTime must be a whole number",
        ),
        ("traces", {"data": 1}, "transactionId and partitionId are required"),
        ("traces", {"transactionId": "t", "partitionId": "p"}, "data is required"),
        ("consumer-groups/g/subscription", {}, "Missing subscriptionTimestamp in request body"),
        ("consumer-groups/g/queues/q/seek", {}, "toEnd"),
        ("consumer-groups/g/queues/q/seek", {"timestamp": "noon"}, "ISO 8601"),
    ],
)
def test_other_requests_that_can_never_succeed_say_why(api, path, body, text):
    assert text in api.post(path, body, 400)["error"]


def test_a_lease_is_extended_with_and_without_a_body(api, queue):
    api.push(queue, 1)
    (message,) = api.pop(queue)
    lease = message["leaseId"]
    (result,) = api.post(f"lease/{lease}/extend", {"seconds": 1000})
    assert result.keys() == {"index", "leaseId", "success", "error", "expiresAt"}
    assert (result["leaseId"], result["success"], result["error"]) == (lease, True, None)
    assert MILLIS.match(result["expiresAt"])
    assert datetime.fromisoformat(result["expiresAt"]) > datetime.now(UTC) + timedelta(seconds=900)
    (shorter,) = api.post(f"lease/{lease}/extend", {})
    assert shorter["expiresAt"] == result["expiresAt"]  # never shortened
    assert api.post(f"lease/{lease}/extend")["newExpiresAt"] == result["expiresAt"]
    (missing,) = api.post(f"lease/{uuid.uuid4()}/extend", {"seconds": 5})
    assert (missing["success"], missing["error"]) == (False, "Lease not found")
    assert "seconds" in api.post(f"lease/{lease}/extend", {"seconds": "soon"}, 400)["error"]


def test_a_transaction_is_all_or_nothing(api, queue):
    api.push(queue, 1)
    (message,) = api.pop(queue)
    ack = {
        "type": "ack",
        "transactionId": message["transactionId"],
        "partitionId": message["partitionId"],
    }
    flat = {"type": "push", "queue": f"{queue}-b", "data": "flat"}
    items = {
        "type": "push",
        "items": [{"queue": f"{queue}-b", "payload": "item", "partition": "p"}],
    }
    stale = api.post(
        "transaction", {"operations": [flat, ack], "requiredLeases": [str(uuid.uuid4())]}, 409
    )
    assert stale["success"] is False
    broken = api.post(
        "transaction", {"operations": [flat, {**ack, "transactionId": "nobody"}]}, 409
    )
    assert broken["error"] == "ACK operation failed: Message not found"
    assert api.pop(f"{queue}-b") == []
    operations = [flat, items, {**ack, "leaseId": message["leaseId"]}]
    done = api.post(
        "transaction", {"operations": operations, "requiredLeases": [message["leaseId"]]}
    )
    assert done["success"] is True
    assert [result["type"] for result in done["results"]] == ["push", "push", "ack"]
    assert done["results"][0].keys() == {
        "index", "type", "success", "transactionId", "messageId", "partitionId", "queueName",
    }  # fmt: skip
    assert done["results"][2].keys() == {
        "index",
        "type",
        "success",
        "transactionId",
        "error",
        "dlq",
    }
    outcome = api.get(f"pop/queue/{queue}-b", batch=10, partitions=10)["messages"]
    assert sorted(message["data"] for message in outcome) == ["flat", "item"]


# -- operators
# --------------------------------------------------------------------------------------------------------


def test_configure_replaces_all_options_and_names_their_defaults(api, queue):
    made = api.configure(queue, leaseTime=9, ordering="none")
    assert made.keys() == {
        "configured",
        "queueId",
        "partitionId",
        "queue",
        "namespace",
        "task",
        "options",
    }
    assert (made["options"]["leaseTime"], made["options"]["ordering"]) == (9, "none")
    again = api.post("configure", {"queue": queue})["options"]
    assert again == {
        "leaseTime": 300, "retryLimit": 3, "retryDelay": 1000, "delayedProcessing": 0, "windowBuffer": 0, "maxSize": 0,
        "ttl": 0, "priority": 0, "deadLetterQueue": True, "dlqAfterMaxRetries": True, "retentionEnabled": False,
        "retentionSeconds": 0, "completedRetentionSeconds": 0, "maxWaitTimeSeconds": 0, "encryptionEnabled": False,
        "recordDeliveries": False, "ordering": "partition",
    }  # fmt: skip


def test_dead_letters_are_listed_requeued_and_purged(api, queue):
    api.configure(queue, retryLimit=0)
    api.push(queue, *range(5))
    messages = api.pop(queue, batch=5)
    api.ack(*messages, status="failed", error="broken")
    page = api.get("dlq", queue=queue, limit=2, offset=1)
    assert page["total"] == 5
    assert page["pagination"]["limit"] == 2
    assert [dead["data"] for dead in page["messages"]] == [3, 2]
    dead = page["messages"][0]
    assert {
        "id", "transactionId", "partitionId", "queue", "partition", "consumerGroup", "errorMessage", "retryCount",
        "data", "producerSub", "createdAt", "failedAt",
    } <= dead.keys()  # fmt: skip
    assert MILLIS.match(dead["failedAt"])
    assert api.post("dlq/requeue", queue=queue, id=dead["dlqId"])["requeued"] == 1
    assert [message["data"] for message in api.pop(queue, batch=9)] == [3]
    api.post("dlq/requeue", status=404, queue=queue, id=dead["dlqId"])
    assert api.post("dlq/requeue", queue=queue, consumerGroup="other")["requeued"] == 0
    assert api.delete("dlq", queue=queue)["deleted"] == 4
    assert api.get("dlq", queue=queue)["total"] == 0


def test_a_seek_can_be_tried_without_doing_it(api, queue):
    api.push(queue, *range(10))
    api.ack(*api.pop(queue, batch=6, consumerGroup="g"), group="g")
    path = f"consumer-groups/g/queues/{queue}/seek"
    preview = api.post(path, {"toBeginning": True, "dryRun": True})
    assert (preview["redelivered"], preview["skipped"]) == (6, 0)
    preview = api.post(path, {"toEnd": True, "dryRun": True})
    assert (preview["redelivered"], preview["skipped"]) == (0, 4)
    assert [m["data"] for m in api.pop(queue, batch=2, consumerGroup="g", autoAck="true")] == [6, 7]
    moved = api.post(path, {"toBeginning": True})
    assert (moved["success"], moved["partitionsUpdated"], moved["seekToEnd"]) == (True, 1, False)
    assert [m["data"] for m in api.pop(queue, batch=2, consumerGroup="g", autoAck="true")] == [0, 1]
    moved = api.post(f"consumer-groups/g/queues/{queue}/partitions/Default/seek")
    assert (moved["updated"], moved["partitionName"]) == (True, "Default")
    assert api.pop(queue, consumerGroup="g") == []
    api.post(path.replace("/g/", "/nobody/"), {"toEnd": True}, 404)


def test_what_does_not_exist_is_a_404(api, queue):
    nowhere = f"{uuid.uuid4()}/t"
    assert api.get(f"resources/queues/{queue}", 404)["error"] == f"Queue not found: {queue}"
    assert api.get(f"status/queues/{queue}", 404)["error"] == f"Queue not found: {queue}"
    assert api.get(f"messages/{nowhere}", 404)["error"] == "Message not found"
    assert api.delete(f"messages/{nowhere}", 404)["success"] is False
    assert api.get("consumer-groups/nobody", 404)["error"] == "Consumer group not found: nobody"
    api.post("traces", {"transactionId": "t", "partitionId": str(uuid.uuid4()), "data": 1}, 404)
    api.delete(f"queues/{queue}/clear", 404)
    assert api.get(f"traces/{nowhere}") == {"traces": []}
    assert api.delete(f"resources/queues/{queue}") == {
        "deleted": True,
        "queue": queue,
        "existed": False,
    }
    assert api.delete("consumer-groups/nobody")["success"] is True


def test_pages_go_on_from_where_the_last_one_ended_and_far_offsets_are_refused(api, queue):
    """What comes before an offset is read and thrown away: a million of it would take half a
    minute.
    """
    for batch in range(5):
        items = [
            {"queue": queue, "partition": f"p{n % 3}", "payload": n}
            for n in range(batch * 4, batch * 4 + 4)
        ]
        api.post("push", {"items": items}, 201)
    whole = api.get("messages", queue=queue)
    assert whole["next"] is None
    for filters in (
        {},
        {"partition": "p1"},
        {"status": "pending"},
        {"partition": "p2", "status": "pending"},
    ):
        wanted = [
            m["id"]
            for m in whole["messages"]
            if m["partition"] == filters.get("partition", m["partition"])
        ]
        seen, cursor = [], None
        while True:
            query = {"queue": queue, "limit": 3, **filters} | ({"cursor": cursor} if cursor else {})
            page = api.client.get("/api/v1/messages", params=query).json()
            seen += [message["id"] for message in page["messages"]]
            cursor = page["next"]
            if cursor is None:
                break
            assert len(page["messages"]) == 3
        assert sorted(seen) == sorted(wanted)
        assert len(set(seen)) == len(seen)
    assert [m["id"] for m in api.get("messages", queue=queue, limit=4, offset=3)["messages"]] == [
        m["id"] for m in whole["messages"][3:7]
    ]
    assert "cursor must be" in api.get("messages", 400, queue=queue, cursor="x")["error"]

    partitions = [row["id"] for row in api.get("resources/partitions", queue=queue)["partitions"]]
    after = api.get("resources/partitions", queue=queue, after=partitions[0], limit=1)["partitions"]
    assert [row["id"] for row in after] == partitions[1:2]
    assert "after must be" in api.get("resources/partitions", 400, queue=queue, after="x")["error"]

    api.ack(*api.pop(queue, batch=20, partitions=3), status="dlq")
    dead = [letter["dlqId"] for letter in api.get("dlq", queue=queue)["messages"]]
    assert len(dead) == 20
    page = api.get("dlq", queue=queue, limit=5, before=dead[4])["messages"]
    assert [letter["dlqId"] for letter in page] == dead[5:10]

    for path in (
        "messages", "dlq", "resources/partitions", "resources/queues", f"resources/queues/{queue}", "status/queues",
        f"status/queues/{queue}", f"status/queues/{queue}/messages", "traces/names", "traces/by-name/n",
        "consumer-groups/g",
    ):  # fmt: skip
        text = api.get(path, 400, offset=1_000_000)["error"]
        assert text.startswith("offset must be at most 10000, not 1000000: "), path


def test_counts_follow_the_messages(api, queue):
    api.configure(queue, retryLimit=0)
    api.push(queue, *range(6))
    messages = api.pop(queue, batch=3)
    api.ack(messages[0])
    api.ack(messages[1], status="failed")
    totals = api.get(f"resources/queues/{queue}")["totals"]
    assert (totals["total"], totals["processing"], totals["deadLetter"]) == (6, 1, 1)
    assert totals["pending"] == 3
    detail = api.get(f"status/queues/{queue}")
    assert detail["totals"]["total"] == detail["totals"]["messages"]["total"] == 6
    assert detail["queue"]["config"]["retryLimit"] == 0
    (row,) = [row for row in api.get("resources/queues")["queues"] if row["name"] == queue]
    assert row["messages"]["total"] == 6
    assert len(api.get(f"status/queues/{queue}/messages", limit=4)) == 4
    (group,) = [row for row in api.get("consumer-groups") if row["queueName"] == queue]
    assert group["totalLag"] == 4
    assert api.delete(f"queues/{queue}/clear")["deleted"] == 6
    assert api.get(f"resources/queues/{queue}")["totals"]["total"] == 0


PROBE = """
import http.client, psutil, select, sys, time
connection, broker, longest = http.client.HTTPConnection(sys.argv[1]), psutil.Process(int(sys.argv[2])), 0.0
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    began, used = time.monotonic(), sum(broker.cpu_times()[:2])
    connection.request("GET", "/health/live")
    assert connection.getresponse().read() is not None
    waited = time.monotonic() - began
    if waited > longest:
        longest = max(longest, min(waited, sum(broker.cpu_times()[:2]) - used))
print(longest)
"""


@contextmanager
def longest_wait(broker: BrokerProcess) -> Iterator[list[float]]:
    """How long /health/live waited at most while the block ran; asked by a process that does
    nothing else. Only the time that the broker worked counts: the machine may be busy with others.
    """
    assert broker.process is not None
    address = broker.url.removeprefix("http://")
    with subprocess.Popen(
        [sys.executable, "-c", PROBE, address, str(broker.process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as probe:
        assert probe.stdout is not None
        assert probe.stdin is not None
        waits: list[float] = []
        try:
            assert probe.stdout.readline() == "ready\n"
            yield waits
        finally:
            probe.stdin.close()
        waits.append(float(probe.stdout.readline()))


def test_a_request_with_many_items_keeps_nobody_waiting_and_one_with_too_many_is_refused(
    broker, api, queue
):
    """A million items took eight seconds, during which nothing else was answered."""
    item = b'{"queue":"%b","payload":{"n":1}}' % queue.encode()
    operation = b'{"type":"push","items":[%b]}' % item
    ack = b'{"transactionId":"t","partitionId":"p"}'
    million = {
        "push": b'{"items":[%b]}' % b",".join([item] * 1_000_000),
        "ack/batch": b'{"acknowledgments":[%b]}' % b",".join([ack] * 1_000_000),
        "transaction": b'{"operations":[%b]}' % b",".join([operation] * 500_000),
    }
    with longest_wait(broker) as waits:
        for path, body in million.items():
            assert "at most 10000 (queues.max_items)" in api.post(path, body, 413)["error"]
        items = [{"queue": queue, "payload": {"queue": n}} for n in range(10_001)]
        api.post("push", {"items": items}, 413)
        stored = api.post("push", {"items": items[:10_000]}, 201)
        assert [result["index"] for result in stored] == list(range(10_000))
        assert {result["status"] for result in stored} == {"queued"}
        messages = api.pop(queue, batch=10_000)
        assert [message["data"]["queue"] for message in messages] == list(range(10_000))
        acked = api.ack(*messages)
        assert [result["index"] for result in acked] == list(range(10_000))
        assert all(result["success"] for result in acked)
        pushes = [{"type": "push", "queue": queue, "payload": n} for n in range(5_000)]
        assert len(api.post("transaction", {"operations": pushes})["results"]) == 5_000
        assert api.post("push", {"items": items[:5000], "bufferMs": 10}, 201)["pushed"]
    assert waits[0] < 2.0, waits


def test_concurrent_requests_get_their_own_results(broker, queue):
    """They are merged into shared calls behind the scenes; a malformed one among them fails alone."""
    failures: list[str] = []

    def work(number: int) -> None:
        with httpx.Client(base_url=broker.url, timeout=30) as client:
            for turn in range(10):
                names = [f"{number}-{turn}-{item}" for item in range(3)]
                items = [{"queue": queue, "payload": name, "transactionId": name} for name in names]
                answer = client.post("/api/v1/push", json={"items": items})
                if [
                    row["transaction_id"] for row in answer.json()
                ] != names or answer.status_code != 201:
                    failures.append(answer.text)
                if [row["index"] for row in answer.json()] != [0, 1, 2]:
                    failures.append(answer.text)
                bad = client.post(
                    "/api/v1/push", json={"items": [{"queue": queue, "traceId": "bad"}]}
                )
                if bad.status_code != 400:
                    failures.append(bad.text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_status_says_what_messages_died_of_and_who_works(api, queue):
    for partition, error in (("a", "no such account"), ("b", "no such account"), ("b", "timeout")):
        api.ask(
            "POST", "push", {"items": [{"queue": queue, "partition": partition, "payload": 1}]}, 201
        )
        [message] = api.ask("GET", f"pop/queue/{queue}/partition/{partition}")["messages"]
        ids = {name: message[name] for name in ("transactionId", "partitionId", "leaseId")}
        api.ask("POST", "ack", {**ids, "status": "dlq", "error": error})
    result = api.ask("GET", "status", queue=queue)
    dead = result["deadLetterQueue"]
    assert (dead["totalMessages"], dead["affectedPartitions"]) == (3, 2)
    assert [(row["error"], row["count"]) for row in dead["topErrors"]] == [
        ("no such account", 2),
        ("timeout", 1),
    ]
    assert all(MILLIS.match(row["lastSeen"]) for row in dead["topErrors"])
    [worker] = result["workers"]
    assert worker["workerId"] == 0
    assert worker["pool"]["size"] >= 1
    assert result["errors"] == {
        "dbErrors": 0,
        "ackFailed": result["errors"]["ackFailed"],
        "dlqMessages": 3,
    }
    assert (
        set(result["messages"]["batchEfficiency"])
        == set(result["messages"]["requests"])
        == {"push", "pop", "ack"}
    )
    none = api.ask("GET", "status", queue="no-such-queue")["deadLetterQueue"]
    assert none == {"totalMessages": 0, "affectedPartitions": 0, "topErrors": []}


def test_metrics_as_json_have_the_dialects_names(api):
    answer = api.client.get("/metrics", headers={"Accept": "application/json"}).json()
    assert {"uptime", "requests", "messages", "database", "memory", "cpu"} <= set(answer)
    assert set(answer["database"]) == {"poolSize", "idleConnections", "waitingRequests"}
    assert answer["memory"]["rss"] > 1 << 20
    health = api.client.get("/health").json()
    assert (health["worker_id"], health["shared_state"]["enabled"]) == (0, True)
    assert set(health["queen"]["merging"]) == {"push", "pop", "ack"}


def test_throughput_is_of_the_namespace_and_task_that_were_asked_for(api, queue):
    api.ask(
        "POST", "configure", {"queue": queue, "namespace": queue, "task": "bill", "options": {}}
    )
    api.ask("POST", "push", {"items": [{"queue": queue, "payload": n} for n in range(3)]}, 201)

    def pushed(path: str, points: str, name: str, **query: str) -> int:
        return sum(point[name] for point in api.ask("GET", path, **query)[points])

    for asked, count in (({}, 3), ({"task": "bill"}, 3), ({"task": "other"}, 0)):
        assert pushed("status", "throughput", "ingested", namespace=queue, **asked) == count
        assert (
            pushed("status/analytics", "dataPoints", "messages", namespace=queue, **asked) == count
        )


CONTRACT = """
POST /api/v1/push                                    GET /api/v1/pop
GET /api/v1/pop/queue/{}                             GET /api/v1/pop/queue/{}/partition/{}
POST /api/v1/ack                                     POST /api/v1/ack/batch
POST /api/v1/lease/{}/extend                         POST /api/v1/transaction
POST /api/v1/configure                               POST /api/v1/stats/refresh
GET /api/v1/dlq                                      POST /api/v1/dlq/requeue
DELETE /api/v1/dlq                                   GET /api/v1/consumer-groups
GET /api/v1/consumer-groups/lagging                  GET /api/v1/consumer-groups/{}
DELETE /api/v1/consumer-groups/{}                    DELETE /api/v1/consumer-groups/{}/queues/{}
POST /api/v1/consumer-groups/{}/subscription         POST /api/v1/consumer-groups/{}/queues/{}/seek
POST /api/v1/consumer-groups/{}/queues/{}/partitions/{}/seek
GET /api/v1/messages                                 GET /api/v1/messages/{}/{}
DELETE /api/v1/messages/{}/{}                        POST /api/v1/messages/{}/{}/retry
POST /api/v1/messages/{}/{}/dlq                      DELETE /api/v1/queues/{}/clear
POST /api/v1/traces                                  GET /api/v1/traces/{}/{}
GET /api/v1/traces/by-name/{}                        GET /api/v1/traces/names
GET /api/v1/resources/queues                         GET /api/v1/resources/queues/{}
DELETE /api/v1/resources/queues/{}                   GET /api/v1/resources/partitions
GET /api/v1/resources/namespaces                     GET /api/v1/resources/tasks
GET /api/v1/resources/overview                       GET /api/v1/status
GET /api/v1/status/queues                            GET /api/v1/status/queues/{}
GET /api/v1/status/queues/{}/messages                GET /api/v1/status/analytics
GET /api/v1/status/buffers                           GET /api/v1/analytics/system-metrics
GET /api/v1/analytics/worker-metrics                 GET /api/v1/analytics/queue-lag
GET /api/v1/analytics/queue-ops                      GET /api/v1/analytics/queue-parked-replicas
GET /api/v1/analytics/retention                      GET /api/v1/analytics/postgres-stats
GET /health                                          GET /metrics
GET /metrics/prometheus                              GET /api/v1/system/maintenance
POST /api/v1/system/maintenance                      GET /api/v1/system/maintenance/pop
POST /api/v1/system/maintenance/pop                  GET /api/v1/system/shared-state
GET /internal/api/shared-state/stats                 GET /internal/api/inter-instance/stats
POST /internal/api/notify
"""


def test_every_route_of_the_contract_is_served(api):
    paths = api.client.get("/openapi.json").json()["paths"]
    served = {
        f"{method.upper()} {re.sub('{.*?}', '{}', path)}"
        for path, methods in paths.items()
        for method in methods
    }
    assert {
        route.strip() for route in re.split(r"  +|\n", CONTRACT) if route.strip()
    } - served == set()


def test_the_document_says_what_parameters_mean_and_shows_examples_that_fit(api):
    made = api.client.get("/openapi.json").json()
    served = {}
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            name = f"{method.upper()} {path}"
            served[name] = operation
            for parameter in operation.get("parameters", ()):
                assert parameter.get("description"), f"{name}: {parameter['name']}"
            contents = [answer.get("content", {}) for answer in operation["responses"].values()][:1]
            contents.append(operation.get("requestBody", {}).get("content", {}))
            for about in (one["application/json"] for one in contents if "application/json" in one):
                schema = about["schema"] | {"components": made["components"]}
                jsonschema.validate(about["example"], schema)
    assert recorded().keys() <= served.keys(), "run tools/api-examples again"


def test_the_page_has_a_curl_line_per_operation_that_works(api):
    answer = api.client.get("/docs")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    page = html.unescape(answer.text)
    document = api.client.get("/openapi.json").json()
    operations = sum(len(path) for path in document["paths"].values())
    lines = re.findall(r"^<pre>(curl .*?)</pre>", page.replace("<pre>curl", "\n<pre>curl"), re.M)
    assert len(lines) == operations
    assert "#/components" not in page, "types are written out"
    (push,) = [line for line in lines if '/api/v1/push"' in line]
    where = {"PENSTOCK_URL": str(api.client.base_url).rstrip("/"), "PATH": os.environ["PATH"]}
    done = subprocess.run(["sh", "-c", f"{push} -s"], capture_output=True, env=where, check=True)
    assert {row["status"] for row in json.loads(done.stdout)} <= {"queued", "duplicate"}


def test_whatever_the_database_refuses_no_sql_text_reaches_a_client(api, queue):
    api.push(queue, 1)
    nowhere = "00000000-0000-0000-0000-000000000000"
    huge = 10**12
    for method, path, body, query in (
        ("POST", "configure", {"queue": queue, "options": {"leaseTime": huge}}, {}),
        ("POST", "configure", {"queue": queue, "options": {"priority": -huge}}, {}),
        ("POST", "configure", {"queue": queue, "namespace": "\x00"}, {}),
        ("GET", f"pop/queue/{queue}", None, {"batch": huge, "partitions": huge}),
        ("GET", f"pop/queue/{queue}", None, {"consumerGroup": "\x00"}),
        (
            "GET",
            f"pop/queue/{queue}",
            None,
            {"consumerGroup": "g", "subscriptionFrom": "9999999-01-01T00:00:00Z"},
        ),
        ("GET", "pop", None, {"namespace": "\x00"}),
        ("POST", "ack", {"transactionId": "\x00", "partitionId": nowhere}, {}),
        ("POST", "ack", {"transactionId": "x", "partitionId": "'; DROP TABLE messages; --"}, {}),
        ("POST", "ack", {"transactionId": "x", "partitionId": nowhere, "status": "'"}, {}),
        ("POST", "lease/not-a-uuid/extend", {"seconds": huge}, {}),
        ("POST", f"lease/{nowhere}/extend", {"seconds": huge}, {}),
        ("GET", "messages", None, {"queue": queue, "from": "yesterday", "limit": huge}),
        ("GET", "messages", None, {"queue": "\x00"}),
        ("GET", f"messages/{nowhere}/'", None, {}),
        ("GET", "dlq", None, {"queue": "\x00", "offset": huge}),
        ("GET", "traces/by-name/%00", None, {}),
        ("DELETE", "resources/queues/%00", None, {}),
        ("DELETE", "consumer-groups/%00", None, {}),
        ("POST", "consumer-groups/g/queues/none/seek", {"timestamp": "never"}, {}),
        (
            "GET",
            f"pop/queue/{queue}",
            None,
            {"consumerGroup": "".join(str(n) for n in range(2000))},
        ),
        ("POST", f"messages/{nowhere}/x/dlq", {"error": "\x00", "consumerGroup": "\x00"}, {}),
    ):
        content = None if body is None else json.dumps(body).encode()
        answer = api.client.request(
            method, f"/api/v1/{path}", content=content, params=query or None
        )
        assert answer.status_code < 500, (method, path, body, query, answer.text)
        for word in (
            "asyncpg",
            "psql",
            "SELECT",
            "INSERT",
            "syntax",
            "relation",
            "int4",
            "out of range for type",
            "0x00",
        ):
            assert word not in answer.text, (path, answer.text)
    assert api.pop(queue, consumerGroup="still there")


def test_unknown_fields_of_a_later_version_are_ignored_and_unknown_options_refused(api, queue):
    item = {"queue": queue, "payload": 1, "someFutureField": {"a": 1}}
    (pushed,) = api.post("push", {"items": [item], "clientVersion": "9.9"}, 201)
    assert pushed["status"] == "queued"
    (message,) = api.pop(queue, someFutureParameter="7", autopilot="true")
    ids = {name: message[name] for name in ("transactionId", "partitionId", "leaseId")}
    (acked,) = api.post("ack", {**ids, "status": "completed", "someFutureField": 1})
    assert acked["success"]
    refused = api.post("configure", {"queue": queue, "options": {"someFutureOption": 1}}, 400)
    assert "someFutureOption" in refused["error"]  # it would silently not be in force
    refused = api.post(
        "configure", {"queue": queue, "leaseTime": 5}, 400
    )  # nor would an option beside `options`
    assert "leaseTime must be in options" in refused["error"]


@pytest.mark.parametrize("number", ["9" * 100_000, "-" + "9" * 100_000, "1e400"])
def test_an_option_with_an_absurd_number_is_named(api, queue, number):
    body = f'{{"queue":"{queue}","options":{{"retryLimit":3,"leaseTime":{number}}}}}'.encode()
    error = api.post("configure", body, 400)["error"]
    assert ("leaseTime" in error, "out of range" in error, len(error) < 200) == (True, True, True)
    assert (
        api.post("configure", {"queue": queue, "options": 7}, 400)["error"]
        == "options must be an object"
    )


def test_an_absurdly_long_time_to_wait_is_just_long(api, queue):
    api.push(queue, 1)
    assert len(api.pop(queue, wait="true", timeout="9" * 400, autoAck="true")) == 1
    error = api.get(f"pop/queue/{queue}", 400, batch="9" * 5000)["error"]
    assert ("`batch`" in error, len(error) < 300) == (True, True)


def test_lines_of_a_buffer_file_keep_who_pushed_them(api, queue) -> None:
    line = Event(queue=queue, payload=Raw(b"1"), transaction_id="t", producer="alice")
    (answer,) = api.ask("POST", "buffers/events", encode(line), 201)
    assert answer["status"] == "queued"
    (message,) = api.ask("GET", f"pop/queue/{queue}")["messages"]
    assert (message["producerSub"], message["data"]) == ("alice", 1)
    sealed = replace(line, transaction_id="u", sealed="no-such-key", payload=Raw(b'"not base64"'))
    assert "no event" in api.ask("POST", "buffers/events", encode(sealed), 400)["error"]
    sealed = replace(sealed, payload=Raw(b'""'))
    error = api.ask("POST", "buffers/events", encode(sealed), 503)["error"]
    assert "key 'no-such-key'" in error


def test_headers_travel_with_their_message_and_nobody_else_sees_the_field(api, queue):
    tenant = {"tenant": "a", "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-01", "x": "é\n"}
    items = [
        {"queue": queue, "payload": 1, "headers": tenant},
        {"queue": queue, "payload": 2, "headers": {}},
        {"queue": queue, "payload": 3},
    ]
    api.post("push", {"items": items}, status=201)
    operations = [
        {"type": "push", "items": [{"queue": queue, "payload": 4, "headers": {"a": "b"}}]},
        {"type": "push", "queue": queue, "payload": 5, "headers": {"c": "d"}},
    ]
    api.post("transaction", {"operations": operations})
    messages = api.get(f"pop/queue/{queue}", batch=10)["messages"]
    assert [m["headers"] for m in messages if "headers" in m] == [tenant, {"a": "b"}, {"c": "d"}]
    assert [m["data"] for m in messages if "headers" not in m] == [2, 3]
    listed = api.get("messages", queue=queue)["messages"]
    assert [m.get("headers") for m in listed] == [{"c": "d"}, {"a": "b"}, None, None, tenant]
    path = f"messages/{messages[0]['partitionId']}/{messages[0]['transactionId']}"
    assert api.get(path)["headers"] == tenant


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"a": 1}, "headers must be an object of strings"),
        (["a"], "headers must be an object of strings"),
        ({"a b": "x"}, "header name 'a b'"),
        ({f"h{n}": "x" for n in range(65)}, "at most 64 headers"),
        ({"h": "x" * 8192}, "at most 8192 bytes"),
    ],
)
def test_headers_that_are_too_many_or_no_strings_are_refused(api, queue, headers, said):
    body = {"items": [{"queue": queue, "payload": 1, "headers": headers}]}
    assert said in api.post("push", body, status=400)["error"]


def test_counts_agree_wherever_they_are_shown(api, broker, queue):
    """As a new user would: sixty messages fail for good, some are put back, the rest is purged."""
    api.post("configure", {"queue": queue, "options": {"retryLimit": 0}})
    for partition in ("a", "b", "c"):
        api.push(queue, *range(20), partition=partition)
    unread = api.get(f"queues/{queue}")  # nobody reads it yet: all of it waits
    assert (unread["waiting"], unread["groups"]) == (60, [])
    until(lambda: (api.get(f"queues/{queue}")["oldest"] or 0) > 0, 30, "the slow look")

    def counts() -> dict[str, Any]:
        """The six numbers; everything that shows them shows the same."""
        about = api.get(f"status/queues/{queue}")
        totals = about["totals"]
        assert totals["messages"] == api.get(f"resources/queues/{queue}")["totals"]
        (listed,) = [q for q in api.get("resources/queues")["queues"] if q["name"] == queue]
        assert {name: listed["messages"][name] for name in totals["messages"]} == totals["messages"]
        for name in ("total", "pending", "processing", "completed", "deadLetter"):
            assert sum(row["stats"][name] for row in about["partitions"]) == totals[name], name
        assert totals["deadLetter"] == api.get("dlq", queue=queue, limit=1)["total"]
        (group,) = [g for g in api.get("consumer-groups") if g["queueName"] == queue]
        assert group["totalLag"] == totals["pending"] + totals["processing"]
        assert (group["completed"], group["failed"]) == (totals["completed"], totals["failed"])
        assert group["deadLetters"] == totals["deadLetter"]
        ends = ("completed", "deadLetters", "dropped", "totalLag", "skipped")
        assert sum(group[name] for name in ends) == 60
        assert group["members"] == 1  # the one connection of this test, not the partitions
        assert group["state"] == "Stable"
        shown = api.get(f"queues/{queue}")  # the Console
        assert (shown["stored"], shown["deadLetters"]) == (totals["total"], totals["deadLetter"])
        (mine,) = shown["groups"]
        assert mine["name"] == ""  # not a group: queue mode
        names = ("lag", "leased", "acked", "failed", "dead", "dropped", "skipped")
        assert [mine[name] for name in names] == [
            *(group["totalLag"], totals["processing"], totals["completed"], totals["failed"]),
            *(totals["deadLetter"], group["dropped"], group["skipped"]),
        ]
        six = ("total", "pending", "processing", "completed", "failed", "deadLetter")
        return {name: totals[name] for name in six} | {"dropped": group["dropped"]}

    def fail(messages: list[dict[str, Any]], status: str = "failed") -> None:
        acks = [
            {**{key: m[key] for key in ("transactionId", "partitionId", "leaseId")}}
            | {"status": status, "error": "no"}
            for m in messages
        ]
        api.post("ack/batch", {"acknowledgments": acks})

    fail(api.pop(queue, batch=100, partitions=3))
    gone = {"total": 60, "pending": 0, "processing": 0, "completed": 0}
    assert counts() == gone | {"failed": 60, "deadLetter": 60, "dropped": 0}
    processed = sum(p["processed"] for p in api.get("status", queue=queue)["throughput"])
    assert processed == 0
    newest = api.get("dlq", queue=queue, limit=5)["messages"]
    for letter in newest:
        api.post("dlq/requeue", id=letter["dlqId"])
    assert counts() == gone | {"pending": 5, "failed": 60, "deadLetter": 55, "dropped": 0}
    held = api.pop(queue, batch=3, partitions=3)
    assert counts()["processing"] == 3
    for _ in range(3):  # one message, acknowledged three times
        fail(held, "completed")
    assert len(api.pop(queue, batch=5, partitions=3, autoAck="true")) == 2
    assert counts() == gone | {"completed": 5, "failed": 60, "deadLetter": 55, "dropped": 0}
    assert api.delete("dlq", queue=queue)["deleted"] == 55
    assert counts() == gone | {"completed": 5, "failed": 60, "deadLetter": 0, "dropped": 55}

    def metrics() -> list[float | None]:
        """Acknowledged, depth, dead letters, completed, failed, dropped."""
        samples = api.client.get("/metrics.json").json()["metrics"]
        mine, group = f'queue="{queue}"', f'queue="{queue}",group=""'
        names = [
            f'penstock_queue_acked_total{{{mine},status="completed"}}',
            f"penstock_queue_depth{{{mine}}}",
            f"penstock_queue_dead_letters{{{mine}}}",
            *(
                f"penstock_queue_group_{name}_total{{{group}}}"
                for name in ("completed", "failed", "dropped")
            ),
        ]
        return [samples.get(name) for name in names]

    until(lambda: metrics() == [5, 0, 0, 5, 60, 55], 30, "the metrics say the same")


def test_a_message_for_later_is_answered_listed_counted_and_cancelled(api, queue):
    moment = "2100-01-31T12:00:00.250Z"
    items = [
        {"queue": queue, "payload": 1, "delay": 3600, "transactionId": "a", "headers": {"h": "v"}},
        {"queue": queue, "payload": 2, "deliverAt": moment, "transactionId": "b/1"},
        {"queue": queue, "payload": 3, "delay": 0},
        {"queue": queue, "payload": 4, "transactionId": "a"},
    ]
    answers = api.post("push", {"items": items}, status=201)
    assert [one["status"] for one in answers] == ["scheduled", "scheduled", "queued", "duplicate"]
    assert answers[0]["message_id"] is None
    assert answers[1]["deliverAt"] == "2100-01-31T12:00:00.250000Z"
    assert MICROS.match(answers[0]["deliverAt"])
    operation = {"type": "push", "queue": queue, "payload": 5, "deliverAt": moment}
    (result,) = api.post("transaction", {"operations": [operation]})["results"]
    assert (result["success"], result["deliverAt"]) == (True, answers[1]["deliverAt"])
    assert [m["data"] for m in api.get(f"pop/queue/{queue}", batch=10)["messages"]] == [3]
    page = api.get("scheduled", queue=queue, limit=2)
    assert [one["transactionId"] for one in page["messages"]] == ["a", "b/1"]
    first, second = page["messages"]
    assert (first["headers"], "headers" in second) == ({"h": "v"}, False)
    assert (second["deliverAt"], MILLIS.match(second["pushedAt"]) is not None) == (moment, True)
    rest = api.get("scheduled", queue=queue, limit=2, cursor=page["next"])
    assert ([one["queue"] for one in rest["messages"]], rest["next"]) == ([queue], None)
    one = f"scheduled/{queue}/Default/b%2F1"
    assert api.get(one)["payload"] == 2
    assert api.delete(one)["success"] is True
    assert "waits" in api.delete(one, status=404)["error"]
    outcome = api.get(f"resources/queues/{queue}")
    assert outcome["totals"]["scheduled"] == 2
    listed = [q for q in api.get("resources/queues")["queues"] if q["name"] == queue]
    assert listed[0]["messages"]["scheduled"] == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"delay": -1}, "delay must be between 0 and 315360000 seconds"),
        ({"delay": 1e9}, "delay must be between 0 and 315360000 seconds"),
        ({"delay": "1"}, "delay must be a number of seconds"),
        ({"deliverAt": 5}, "deliverAt must be an ISO 8601 time"),
        ({"deliverAt": "soon"}, "deliverAt must be an ISO 8601 time, not 'soon'"),
        ({"delay": 1, "deliverAt": "2100-01-01T00:00:00Z"}, "give delay or deliverAt, not both"),
    ],
)
def test_a_time_that_is_none_is_refused(api, queue, fields, said):
    body = {"items": [{"queue": queue, "payload": 1, **fields}]}
    assert said in api.post("push", body, status=400)["error"]
