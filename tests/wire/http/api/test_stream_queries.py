"""`/streams/v1/*` and the depth of a queue, as Queen MQ's clients use them."""

from typing import Any

import pytest

from tests.wire.http.api.conftest import MICROS, Api


def ask(api: Api, path: str, body: Any, status: int = 200) -> Any:
    answer = api.client.post(f"/streams/v1/{path}", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["success"] is (status == 200)
    if status != 200:
        assert isinstance(answer.json()["error"], str)
    return answer.json()


def registered(api: Api, queue: str, **more: Any) -> str:
    body = {"name": queue, "source_queue": queue, "config_hash": "h1", **more}
    return str(ask(api, "queries", body)["query_id"])


def popped(api: Api, queue: str, *payloads: Any) -> list[dict[str, Any]]:
    if payloads:
        items = [{"queue": queue, "payload": payload} for payload in payloads]
        api.ask("POST", "push", {"items": items}, 201)
    query = {"consumerGroup": f"streams.{queue}", "batch": 100}
    answer = api.client.get(f"/api/v1/pop/queue/{queue}", params=query)
    return answer.json()["messages"] if answer.content else []


def cycle_of(query: str, messages: list[dict[str, Any]], count: int, **more: Any) -> dict[str, Any]:
    last = messages[count - 1]
    return {
        "query_id": query,
        "partition_id": last["partitionId"],
        "consumer_group": last["consumerGroup"],
        "state_ops": [],
        "push_items": [],
        "ack": {
            "transactionId": last["transactionId"],
            "leaseId": last["leaseId"],
            "status": "completed",
            "count": count,
        },
        **more,
    }


def test_a_query_is_registered_once_and_reset_by_another_hash(api, queue):
    body = {"name": queue, "source_queue": queue, "sink_queue": "sink", "config_hash": "h1"}
    first = ask(api, "queries", body)
    assert first == {
        "success": True, "query_id": first["query_id"], "name": queue, "config_hash": "h1",
        "fresh": True, "reset": False,
    }  # fmt: skip
    assert ask(api, "queries", body)["fresh"] is False
    other = body | {"config_hash": "h2"}
    assert "config_hash mismatch" in ask(api, "queries", other, 409)["error"]
    again = ask(api, "queries", other | {"reset": True})
    assert (again["query_id"], again["reset"]) == (first["query_id"], True)


def test_a_cycle_answers_what_it_did(api, queue):
    query = registered(api, queue)
    messages = popped(api, queue, 1, 2, 3)
    operations = [
        {"type": "upsert", "key": "a", "value": {"n": 1}},
        {"type": "upsert", "key": "b", "value": 2},
        {"type": "delete", "key": "b"},
    ]
    out = [{"queue": f"{queue}-out", "payload": 6, "transactionId": "t-1"}]
    done = ask(api, "cycle", cycle_of(query, messages, 3, state_ops=operations, push_items=out))
    [pushed] = done.pop("push_results")
    assert (pushed["status"], pushed["transaction_id"]) == ("queued", "t-1")
    assert done == {
        "success": True, "query_id": query, "partition_id": messages[0]["partitionId"],
        "state_ops_applied": 3,
        "ack_result": {"success": True, "count": 3, "lease_released": True, "dlq": False},
    }  # fmt: skip
    place = {"query_id": query, "partition_id": messages[0]["partitionId"]}
    [row] = ask(api, "state/get", place)["rows"]
    assert (row["key"], row["value"]) == ("a", {"n": 1})
    assert MICROS.match(row["updated_at"])
    # nothing to acknowledge: state and output only; an output that was pushed before is no failure
    done = ask(api, "cycle", {**place, "state_ops": operations[:1], "push_items": out})
    assert done["ack_result"] is None
    assert done["push_results"][0]["status"] == "duplicate"
    done = ask(api, "cycle", {**place, "ack": None, "state_ops": None, "push_items": None})
    assert done["state_ops_applied"] == 0


def test_a_gate_leaves_the_lease_with_the_rest(api, queue):
    query = registered(api, queue)
    messages = popped(api, queue, 1, 2, 3)
    done = ask(api, "cycle", cycle_of(query, messages, 2, release_lease=False))
    assert done["ack_result"]["lease_released"] is False
    assert popped(api, queue) == []
    done = ask(api, "cycle", cycle_of(query, messages, 3))
    assert done["ack_result"] == {
        "success": True, "count": 1, "lease_released": True, "dlq": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "change", "status"),
    [
        ("queries", {"name": ""}, 400),
        ("queries", {"name": None}, 400),
        ("queries", {"source_queue": ""}, 400),
        ("queries", {"config_hash": 7}, 400),
        ("cycle", {"query_id": None}, 400),
        ("cycle", {"query_id": "x"}, 404),
        ("cycle", {"partition_id": "x"}, 404),
        ("cycle", {"state_ops": [{"type": "add", "key": "k"}]}, 400),
        ("cycle", {"state_ops": [{"type": "upsert", "key": "k", "value": "\0"}]}, 400),
        ("cycle", {"push_items": [{"payload": 1}]}, 400),
        ("cycle", {"push_items": [{"queue": "q", "traceId": "x"}]}, 400),
        ("cycle", {"ack": {"leaseId": "x"}}, 400),
        ("cycle", {"ack": {"transactionId": "x", "leaseId": ""}}, 400),
        ("cycle", {"ack": {"transactionId": "x", "leaseId": "x"}}, 409),
        ("cycle", {"release_lease": "no"}, 400),
        ("state/get", {"query_id": "x"}, 404),
        ("state/get", {"keys": "k"}, 400),
        ("state/get", {"keys": ["\0"]}, 400),
        ("state/get", {"ripe_at_or_before": "now"}, 400),
    ],
)
def test_a_bad_request_is_refused_in_the_same_shape(api, queue, path, change, status):
    query = registered(api, queue)
    [message] = popped(api, queue, 1)
    body = {
        "queries": {"name": queue, "source_queue": queue, "config_hash": "h1"},
        "cycle": cycle_of(query, [message], 1),
        "state/get": {"query_id": query, "partition_id": message["partitionId"]},
    }[path]
    ask(api, path, body | change, status)
    assert ask(api, "cycle", cycle_of(query, [message], 1))["ack_result"]["count"] == 1


def test_a_body_that_is_not_json_is_refused_in_the_same_shape(api):
    for path in ("queries", "cycle", "state/get"):
        for content in (b"", b"{", b"[]", b"7"):
            answer = api.client.post(f"/streams/v1/{path}", content=content)
            assert (answer.status_code, answer.json()["success"]) == (400, False)


def test_depth_is_what_a_group_has_not_finished_with(api, queue):
    for partition, count in (("a", 3), ("b", 1), ("c", 1)):
        items = [{"queue": queue, "partition": partition, "payload": n} for n in range(count)]
        api.ask("POST", "push", {"items": items}, 201)
    query = {"consumerGroup": "g", "batch": 2}
    api.get(f"pop/queue/{queue}/partition/a", **query)
    api.get(f"pop/queue/{queue}/partition/b", autoAck="true", **query)
    depth = api.get(f"resources/queues/{queue}/depth", group="g")
    rows = {row.pop("partition"): row for row in depth.pop("partitions")}
    assert depth == {
        "queue": queue, "group": "g", "pending": 4, "processing": 2, "ready": 2,
        "partitionsPending": 2, "partitionsReady": 2,
    }  # fmt: skip
    assert rows == {
        "a": {"pending": 3, "processing": 2, "ready": 1},
        "b": {"pending": 0, "processing": 0, "ready": 0},
        "c": {"pending": 1, "processing": 0, "ready": 1},
    }
    assert api.get(f"resources/queues/{queue}/depth")["pending"] == 4
    unknown = api.get(f"resources/queues/{queue}/depth", group="other")
    assert (unknown["pending"], unknown["ready"]) == (5, 5)
    assert api.get(f"resources/queues/{queue}/depth", group="other", limit=1)["pending"] == 5
    api.get(f"resources/queues/{queue}-none/depth", 404)
