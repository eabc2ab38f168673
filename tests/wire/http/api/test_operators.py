"""What operators change and list: options, dead letters, groups, pages."""

import uuid

import pytest

from tests.wire.http.api.conftest import MILLIS


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
    assert api.delete(f"messages/{nowhere}", 404)["error"] == "Message not found"
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


@pytest.mark.parametrize("number", ["9" * 100_000, "-" + "9" * 100_000, "1e400"])
def test_an_option_with_an_absurd_number_is_named(api, queue, number):
    body = f'{{"queue":"{queue}","options":{{"retryLimit":3,"leaseTime":{number}}}}}'.encode()
    error = api.post("configure", body, 400)["error"]
    assert ("leaseTime" in error, "out of range" in error, len(error) < 200) == (True, True, True)
    assert (
        api.post("configure", {"queue": queue, "options": 7}, 400)["error"]
        == "options must be an object"
    )
