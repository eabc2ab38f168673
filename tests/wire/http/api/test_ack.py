"""Acknowledgments, leases and transactions over HTTP."""

import uuid
from datetime import UTC, datetime, timedelta

import pytest

from tests.wire.http.api.conftest import MILLIS


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


def test_an_ack_does_not_choose_its_group_by_the_name_of_the_engines_field(api, queue):
    api.push(queue, 1)
    (message,) = api.pop(queue)
    names = {key: message[key] for key in ("transactionId", "partitionId", "leaseId")}
    acks = {"acknowledgments": [{**names, "group": "others", "status": None}]}
    (result,) = api.post("ack/batch", acks)
    assert (result["success"], result["leaseReleased"]) == (True, True)
    assert "_group" in api.post("ack", {**names, "_group": "others"}, 400)["error"]


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


def test_a_misspelled_field_of_an_ack_is_refused_with_the_nearest_name(api, queue):
    api.push(queue, 1)
    (message,) = api.get(f"pop/queue/{queue}", consumerGroup="g")["messages"]
    ack = {key: message[key] for key in ("transactionId", "partitionId", "leaseId")}
    for path, body in (
        ("ack", {**ack, "consumer_group": "g"}),
        ("ack/batch", {"acknowledgments": [ack], "consumer_group": "g"}),
    ):
        answer = api.client.post(f"/api/v1/{path}", json=body)
        assert answer.status_code == 400
        text = "Unknown field `consumer_group`: did you mean `consumerGroup`?"
        assert answer.json()["error"] == text
