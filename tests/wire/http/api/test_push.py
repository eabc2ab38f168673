"""Pushes over HTTP: their items, what is refused and why, headers, messages for later."""

import uuid

import httpx
import pytest
from msgspec import Raw
from msgspec.structs import replace

from penstock.protocol.buffer_lines import Event, encode
from tests.wire.http.api.conftest import MICROS, MILLIS


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


def test_lines_of_a_buffer_file_keep_who_pushed_them(api, queue) -> None:
    line = Event(queue=queue, payload=Raw(b"1"), transaction_id="t", producer="alice")
    (answer,) = api.ask("POST", "buffers/events", encode(line), 201)
    assert answer["status"] == "queued"
    (message,) = api.ask("GET", f"pop/queue/{queue}")["messages"]
    assert (message["producerSub"], message["data"]) == ("alice", 1)
    sealed = replace(line, transaction_id="u", sealed="no-such-key", payload=Raw(b'"not base64"'))
    assert "not an event" in api.ask("POST", "buffers/events", encode(sealed), 400)["error"]
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
    assert [m["headers"] for m in listed] == [{"c": "d"}, {"a": "b"}, {}, {}, tenant]
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
    assert (first["headers"], second["headers"]) == ({"h": "v"}, {})
    assert (second["deliverAt"], MILLIS.match(second["pushedAt"]) is not None) == (moment, True)
    rest = api.get("scheduled", queue=queue, limit=2, cursor=page["next"])
    assert ([one["queue"] for one in rest["messages"]], rest["next"]) == ([queue], None)
    one = f"scheduled/{queue}/Default/b%2F1"
    assert api.get(one)["payload"] == 2
    api.delete(one, status=204)
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


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"transaction_id": "t"}, "field of items `transaction_id`: did you mean `transactionId`?"),
        ({"delayMs": 5}, "field of items `delayMs`: did you mean `delay`?"),
        ({"deliver_at": "x", "zone": 1}, "field of items `deliver_at`: did you mean `deliverAt`?"),
    ],
)
def test_a_misspelled_field_of_an_item_is_refused_with_the_nearest_name(api, queue, body, text):
    items = [{"queue": queue, "payload": 1}, {"queue": queue, "payload": 2, **body}]
    answer = api.client.post("/api/v1/push", json={"items": items})
    assert (answer.status_code, answer.json()["error"]) == (400, f"Unknown {text}")
    assert api.client.get(f"/api/v1/pop/queue/{queue}").status_code == 204


def test_a_misspelled_field_of_a_push_is_refused_and_other_fields_are_ignored(api, queue):
    items = [{"queue": queue, "payload": {"transaction_id": 1.0e2}, "namespace": "n", "ü": [1]}]
    answer = api.client.post("/api/v1/push", json={"items": items, "buffer_ms": 10})
    assert answer.status_code == 400
    assert answer.json()["error"] == "Unknown field `buffer_ms`: did you mean `bufferMs`?"
    (result,) = api.post("push", {"items": items, "client": "x"}, 201)
    assert result["status"] == "queued"
    wrong = [{"queue": 5, "namespace": "n"}]
    answer = api.client.post("/api/v1/push", json={"items": wrong})
    assert (answer.status_code, answer.json()["error"]) == (400, "Queue must be a string")
