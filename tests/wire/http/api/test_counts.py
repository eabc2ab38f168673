"""Counts, status and metrics of queues: they follow the messages and agree with each other."""

from typing import Any

from tests.support.wait import until
from tests.wire.http.api.conftest import MILLIS


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


def test_the_former_name_of_the_rate_of_completed_messages_stays_for_a_release(api, queue):
    api.push(queue, 1)

    def rated():
        rows = api.get("queues", filter=queue, sort="-deliveredRate")["queues"]
        return rows and rows[0]["completedRate"] is not None and rows[0]

    row = until(rated)
    assert row["deliveredRate"] == row["completedRate"]


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
    until(lambda: api.ask("GET", "status", queue=queue)["workers"][0]["pool"]["size"] >= 1)
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


SIX = ("total", "pending", "processing", "completed", "failed", "deadLetter")


def counts(api, queue) -> dict[str, Any]:
    """The six numbers of a queue of 60 messages; everything that shows them shows the same."""
    about = api.get(f"status/queues/{queue}")
    totals = about["totals"]
    assert totals["messages"] == api.get(f"resources/queues/{queue}")["totals"]
    (listed,) = [q for q in api.get("resources/queues")["queues"] if q["name"] == queue]
    assert {name: listed["messages"][name] for name in totals["messages"]} == totals["messages"]
    for name in ("total", "pending", "processing", "completed", "deadLetter"):
        assert sum(row["stats"][name] for row in about["partitions"]) == totals[name], name
    assert totals["deadLetter"] == api.get("dlq", queue=queue, limit=1)["total"]
    (group,) = [g for g in api.get("consumer-groups") if g["queueName"] == queue]
    check_group(group, totals)
    check_console(api.get(f"queues/{queue}"), group, totals)
    return {name: totals[name] for name in SIX} | {"dropped": group["dropped"]}


def check_group(group: dict[str, Any], totals: dict[str, Any]) -> None:
    """The list of groups says what the queue says."""
    assert group["totalLag"] == totals["pending"] + totals["processing"]
    assert (group["completed"], group["failed"]) == (totals["completed"], totals["failed"])
    assert group["deadLetters"] == totals["deadLetter"]
    ends = ("completed", "deadLetters", "dropped", "totalLag", "skipped")
    assert sum(group[name] for name in ends) == 60
    assert group["members"] == 1  # the one connection of this test, not the partitions
    assert group["state"] == "Stable"


def check_console(shown: dict[str, Any], group: dict[str, Any], totals: dict[str, Any]) -> None:
    """The Console says what the queue and its group say."""
    assert (shown["stored"], shown["deadLetters"]) == (totals["total"], totals["deadLetter"])
    (mine,) = shown["groups"]
    assert mine["name"] == ""  # not a group: queue mode
    expected = {
        "waiting": group["totalLag"],
        "leased": totals["processing"],
        "completed": totals["completed"],
        "failed": totals["failed"],
        "deadLetters": totals["deadLetter"],
        "dropped": group["dropped"],
        "skipped": group["skipped"],
    }
    assert {name: mine[name] for name in expected} == expected


def metrics(api, queue) -> list[float | None]:
    """Acknowledged, depth, dead letters, completed, failed, dropped."""
    samples = api.client.get("/metrics.json").json()["metrics"]
    mine, group = f'queue="{queue}"', f'queue="{queue}",group=""'
    names = [
        f'penstock_queue_acked_total{{{mine},status="completed"}}',
        f"penstock_queue_waiting{{{mine}}}",
        f"penstock_queue_dead_letters{{{mine}}}",
        *(
            f"penstock_queue_group_{name}_total{{{group}}}"
            for name in ("completed", "failed", "dropped")
        ),
    ]
    return [samples.get(name) for name in names]


def acknowledge(api, messages: list[dict[str, Any]], status: str) -> None:
    acks = [
        {key: m[key] for key in ("transactionId", "partitionId", "leaseId")}
        | {"status": status, "error": "no"}
        for m in messages
    ]
    api.post("ack/batch", {"acknowledgments": acks})


def test_counts_agree_wherever_they_are_shown(api, queue):
    """As a new user would: sixty messages fail for good, some are put back, the rest is purged."""
    api.post("configure", {"queue": queue, "options": {"retryLimit": 0}})
    for partition in ("a", "b", "c"):
        api.push(queue, *range(20), partition=partition)
    unread = api.get(f"queues/{queue}")  # nobody reads it yet: all of it waits
    assert (unread["waiting"], unread["groups"]) == (60, [])
    until(lambda: (api.get(f"queues/{queue}")["oldest"] or 0) > 0, 30, "the slow look")
    acknowledge(api, api.pop(queue, batch=100, partitions=3), "failed")
    gone = {"total": 60, "pending": 0, "processing": 0, "completed": 0}
    assert counts(api, queue) == gone | {"failed": 60, "deadLetter": 60, "dropped": 0}
    processed = sum(p["processed"] for p in api.get("status", queue=queue)["throughput"])
    assert processed == 0
    newest = api.get("dlq", queue=queue, limit=5)["messages"]
    for letter in newest:
        api.post("dlq/requeue", id=letter["dlqId"])
    requeued = {"pending": 5, "failed": 60, "deadLetter": 55, "dropped": 0}
    assert counts(api, queue) == gone | requeued
    held = api.pop(queue, batch=3, partitions=3)
    assert counts(api, queue)["processing"] == 3
    for _ in range(3):  # one message, acknowledged three times
        acknowledge(api, held, "completed")
    assert len(api.pop(queue, batch=5, partitions=3, autoAck="true")) == 2
    assert counts(api, queue) == gone | requeued | {"pending": 0, "completed": 5}
    assert api.delete("dlq", queue=queue)["deleted"] == 55
    purged = {"completed": 5, "failed": 60, "deadLetter": 0, "dropped": 55}
    assert counts(api, queue) == gone | purged
    until(lambda: metrics(api, queue) == [5, 0, 0, 5, 60, 55], 30, "the metrics say the same")
