"""The published client `queen-mq` 0.15.0, unchanged, against a real broker process: every public
operation of it.
"""

import asyncio
import signal
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from queen import Queen

from tests.compat.conftest import with_queen
from tests.conftest import create_database
from tests.support.broker import BrokerProcess
from tests.support.tokens import SECRET, token
from tests.support.wait import eventually

pytestmark = pytest.mark.xdist_group("compat")


async def drained(
    queen: Queen, queue: str, count: int, group: str | None = None
) -> list[dict[str, Any]]:
    """Pop and acknowledge until `count` messages came."""
    collected: list[dict[str, Any]] = []
    while len(collected) < count:
        builder = queen.queue(queue).batch(count).wait(True).timeout_millis(5000)
        messages = await (builder.group(group) if group else builder).pop()
        assert messages, f"{len(collected)} of {count} messages came"
        collected += messages
        assert (await queen.ack(messages, True, {"group": group}))["success"]
    return collected


# -- queues
# -----------------------------------------------------------------------------------------------------------


async def test_a_queue_is_created_with_the_clients_defaults_and_options(queen, queue):
    made = await queen.queue(queue).create()
    assert made["configured"] is True
    assert made["queue"] == queue
    assert made["options"]["leaseTime"] == 300
    made = (
        await queen.queue(queue)
        .namespace("shop")
        .task("bill")
        .config({"lease_time": 7, "retry_limit": 1})
        .create()
    )
    assert (made["namespace"], made["task"]) == ("shop", "bill")
    assert (made["options"]["leaseTime"], made["options"]["retryLimit"]) == (7, 1)


async def test_an_unknown_option_is_refused_by_name(queen, queue):
    with pytest.raises(Exception, match="leaseTimes"):
        await queen.queue(queue).config({"lease_times": 7}).create()
    errors = []

    async def on_error(error: Exception) -> None:
        errors.append(str(error))

    answer = await queen.queue(queue).config({"lease_times": 7}).create().on_error(on_error)
    assert answer["success"] is False
    assert "leaseTimes" in errors[0]


async def test_a_queue_is_deleted_with_what_it_held(queen, queue):
    await queen.queue(queue).push({"data": 1})
    assert (await queen.queue(queue).delete())["deleted"] is True
    assert await queen.queue(queue).wait(False).pop() == []
    assert (await queen.queue(queue).delete())["existed"] is False


# -- push and pop
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload", [{"a": 1}, {}, [], [1, 2], "text", 7, 1.5, True, None, {"ä": "\u0000\U0001f600"}]
)
async def test_any_payload_comes_back_as_it_was(queen, queue, payload):
    (result,) = await queen.queue(queue).push({"data": payload})
    assert result["status"] == "queued"
    assert result["queueName"] == queue
    (message,) = await queen.queue(queue).wait(False).pop()
    assert message["data"] == payload
    assert message["id"] == result["message_id"]
    assert message["transactionId"] == result["transaction_id"]
    assert message["partitionId"] == result["partition_id"]
    assert message["partition"] == "Default"
    assert message["consumerGroup"] == "__QUEUE_MODE__"
    assert (await queen.ack(message))["success"] is True
    assert await queen.queue(queue).wait(False).pop() == []


async def test_duplicates_are_told_apart_and_the_callbacks_are_called(queen, queue):
    reported: dict[str, list[Any]] = {"success": [], "duplicate": []}

    async def success(items: list[Any]) -> None:
        reported["success"] += items

    async def duplicate(items: list[Any], error: Exception) -> None:
        reported["duplicate"] += items

    items = [{"transactionId": name, "data": name} for name in ("a", "b", "a")]
    results = await queen.queue(queue).push(items).on_success(success).on_duplicate(duplicate)
    assert [result["status"] for result in results] == ["queued", "queued", "duplicate"]
    assert [result["index"] for result in results] == [0, 1, 2]
    assert results[2]["message_id"] == results[0]["message_id"]
    assert [item["payload"] for item in reported["success"]] == ["a", "b"]
    assert [item["payload"] for item in reported["duplicate"]] == ["a"]


async def test_a_trace_id_travels_with_the_message(queen, queue):
    trace = str(uuid.uuid4())
    await queen.queue(queue).push([{"data": 1, "traceId": trace}, {"data": 2}])
    messages = await queen.queue(queue).batch(2).wait(False).pop()
    assert [message["traceId"] for message in messages] == [trace, None]


async def test_a_buffered_push_arrives_after_a_flush_and_when_its_batch_is_full(queen, queue):
    options = {"message_count": 100, "time_millis": 60_000}
    for number in range(5):
        answer = await queen.queue(queue).buffer(options).push({"data": number})
        assert answer == {"buffered": True, "count": 1}
    assert queen.get_buffer_stats()["totalBufferedMessages"] == 5
    assert await queen.queue(queue).wait(False).pop() == []
    await queen.queue(queue).flush_buffer()
    assert [message["data"] for message in await drained(queen, queue, 5)] == list(range(5))
    for number in range(250):
        await queen.queue(queue).buffer(options).push({"data": number})
    await queen.flush_all_buffers()
    assert sorted(message["data"] for message in await drained(queen, queue, 250)) == list(
        range(250)
    )


async def test_a_waiting_pop_is_woken_by_a_push(queen, queue):
    await queen.queue(queue).create()
    waiting = asyncio.create_task(queen.queue(queue).wait(True).timeout_millis(20_000).pop())
    await asyncio.sleep(0.1)
    began = asyncio.get_running_loop().time()
    await queen.queue(queue).push({"data": "now"})
    (message,) = await waiting
    assert message["data"] == "now"
    assert asyncio.get_running_loop().time() - began < 15


async def test_partitions_are_popped_by_name_and_several_at_once_under_one_lease(queen, queue):
    for name in ("p 1", "p2", "p3"):
        await (
            queen.queue(queue)
            .partition(name)
            .push([{"data": f"{name}-{number}"} for number in range(2)])
        )
    (first,) = await queen.queue(queue).partition("p 1").wait(False).pop()
    assert first["data"] == "p 1-0"
    rest = await queen.queue(queue).partitions(10).batch(100).wait(False).pop()
    assert sorted(message["data"] for message in rest) == ["p2-0", "p2-1", "p3-0", "p3-1"]
    assert len({message["leaseId"] for message in rest}) == 1
    assert len({message["partitionId"] for message in rest}) == 2


async def test_queues_of_a_namespace_or_task_are_popped_together(queen, queue):
    space, task = f"ns-{queue}", f"task-{queue}"
    await queen.queue(f"{queue}-a").namespace(space).task(task).create()
    await queen.queue(f"{queue}-b").namespace(space).create()
    await queen.queue(f"{queue}-b").push({"data": "b"})
    (message,) = await queen.queue().namespace(space).wait(False).pop()
    assert message["data"] == "b"
    assert (await queen.ack(message))["success"]
    await queen.queue(f"{queue}-a").push({"data": "a"})
    (message,) = await queen.queue().task(task).wait(False).pop()
    assert message["data"] == "a"


# -- consume
# ----------------------------------------------------------------------------------------------------------


async def test_concurrent_consumers_handle_every_message_once(queen, queue):
    for partition in range(6):
        items = [{"data": f"{partition}-{number}"} for number in range(10)]
        await queen.queue(queue).partition(f"p{partition}").push(items)
    seen: list[str] = []

    async def handle(messages: list[dict[str, Any]]) -> None:
        seen.extend(message["data"] for message in messages)

    stop = asyncio.Event()
    consumer = (
        queen.queue(queue).concurrency(4).batch(10).timeout_millis(300).consume(handle, signal=stop)
    )
    running = asyncio.ensure_future(consumer._execute())
    await eventually(lambda: len(seen) >= 60)
    stop.set()
    await running
    assert sorted(seen) == sorted(
        f"{partition}-{number}" for partition in range(6) for number in range(10)
    )


async def test_messages_of_a_partition_are_handled_in_order_one_at_a_time(queen, queue):
    await queen.queue(queue).push([{"data": number} for number in range(20)])
    seen: list[int] = []

    async def handle(message: dict[str, Any]) -> None:
        seen.append(message["data"])

    await queen.queue(queue).batch(5).each().limit(20).consume(handle)
    assert seen == list(range(20))


async def test_each_group_gets_every_message_and_queue_mode_gets_its_own_copy(queen, queue):
    await queen.queue(queue).push([{"data": number} for number in range(5)])
    for group in ("billing", "a group/ä", None):
        messages = await drained(queen, queue, 5, group)
        assert [message["data"] for message in messages] == list(range(5))


async def test_consume_stops_when_idle_and_calls_back(queen, queue):
    await queen.queue(queue).config({"retry_limit": 0}).create()
    await queen.queue(queue).push([{"data": "good"}, {"data": "bad"}])
    reported: dict[str, list[Any]] = {"success": [], "error": []}

    async def handle(message: dict[str, Any]) -> str:
        if message["data"] == "bad":
            raise ValueError("no")
        return "done"

    async def success(message: dict[str, Any], result: Any) -> None:
        reported["success"].append(result)
        await queen.ack(message)

    async def error(message: dict[str, Any], failure: Exception) -> None:
        reported["error"].append(str(failure))
        await queen.ack(message, False, {"error": str(failure)})

    consumer = queen.queue(queue).idle_millis(400).timeout_millis(200).consume(handle)
    await consumer.on_success(success).on_error(error)
    assert reported == {"success": ["done"], "error": ["no"]}
    dead = await queen.queue(queue).dlq().get()
    assert [message["errorMessage"] for message in dead["messages"]] == ["no"]


async def test_a_group_that_wants_new_messages_only_does_not_see_old_ones(queen, queue):
    await queen.queue(queue).push({"data": "old"})
    late = queen.queue(queue).group("late").subscription_mode("new").batch(10).wait(False)
    assert await late.pop() == []
    await queen.queue(queue).push({"data": "new"})
    await queen.queue(queue).partition("later").push({"data": "newer"})
    collected = []
    while len(collected) < 2:
        messages = await late.wait(True).timeout_millis(3000).pop()
        assert messages
        collected += [message["data"] for message in messages]
    assert sorted(collected) == ["new", "newer"]


async def test_a_group_may_start_at_a_moment_or_now(queen, queue):
    await queen.queue(queue).push({"data": "first"})
    moment = datetime.now(UTC).isoformat()
    await queen.queue(queue).push({"data": "second"})
    replay = (
        await queen.queue(queue)
        .group("replay")
        .subscription_from(moment)
        .batch(10)
        .wait(False)
        .pop()
    )
    assert [message["data"] for message in replay] == ["second"]
    assert (
        await queen.queue(queue).group("now").subscription_from("now").batch(10).wait(False).pop()
        == []
    )
    everything = (
        await queen.queue(queue).group("all").subscription_mode("all").batch(10).wait(False).pop()
    )
    assert [message["data"] for message in everything] == ["first", "second"]


async def test_leases_are_renewed_while_a_message_is_handled(queen, queue):
    await queen.queue(queue).config({"lease_time": 1, "retry_limit": 5}).create()
    await queen.queue(queue).push({"data": 1})
    handled = 0

    async def handle(message: dict[str, Any]) -> None:
        nonlocal handled
        handled += 1
        await asyncio.sleep(1.6)
        assert await queen.queue(queue).wait(False).pop() == []

    await queen.queue(queue).renew_lease(True, 300).limit(1).consume(handle)
    assert handled == 1
    assert await queen.queue(queue).wait(False).pop() == []


async def test_renew_answers_with_the_new_expiry(queen, queue):
    await queen.queue(queue).push([{"data": 1}, {"data": 2}])
    messages = await queen.queue(queue).batch(2).wait(False).pop()
    renewed = await queen.renew(messages[0])
    assert renewed["success"] is True
    assert datetime.fromisoformat(renewed["newExpiresAt"]) > datetime.now(UTC)
    assert [result["success"] for result in await queen.renew(messages)] == [True]  # one lease
    assert (await queen.renew(str(uuid.uuid4())))["success"] is False


# -- ack, transactions, dead letters
# ----------------------------------------------------------------------------------


async def test_a_failed_message_beside_completed_ones_comes_back_alone(queen, queue):
    await queen.queue(queue).config({"retry_delay": 0}).create()
    await queen.queue(queue).push([{"data": number} for number in range(3)])
    messages = await queen.queue(queue).batch(3).wait(False).pop()
    messages[1] |= {"_status": False, "_error": "again"}
    assert (await queen.ack(messages))["success"] is True
    (again,) = await queen.queue(queue).batch(3).wait(True).timeout_millis(3000).pop()
    assert again["data"] == 1


async def test_a_message_that_keeps_failing_ends_among_the_dead_letters(queen, queue):
    await queen.queue(queue).config({"retry_limit": 1, "retry_delay": 0}).create()
    await queen.queue(queue).partition("p").push([{"data": "poison"}, {"data": "fine"}])
    for _ in range(2):
        (message,) = await queen.queue(queue).wait(True).timeout_millis(3000).pop()
        assert message["data"] == "poison"
        assert (await queen.ack(message, False, {"error": "broken"}))["success"]
    (message,) = await queen.queue(queue).wait(True).timeout_millis(3000).pop()
    assert message["data"] == "fine"
    page = await queen.queue(queue).partition("p").dlq("__QUEUE_MODE__").limit(10).offset(0).get()
    (dead,) = page["messages"]
    assert page["total"] == 1
    assert (dead["data"], dead["errorMessage"], dead["retryCount"]) == ("poison", "broken", 1)
    assert (dead["queue"], dead["partition"], dead["consumerGroup"]) == (
        queue,
        "p",
        "__QUEUE_MODE__",
    )
    assert (await queen.queue(queue).partition("elsewhere").dlq().get())["messages"] == []
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    assert (await queen.queue(queue).dlq().from_(tomorrow).get())["messages"] == []
    assert (await queen.queue(queue).dlq().to(tomorrow).get())["total"] == 1
    assert (await queen.queue(queue).dlq().offset(1).get())["messages"] == []


async def test_a_transaction_acknowledges_and_pushes_together(queen, queue):
    onward = f"{queue}-next"
    await queen.queue(queue).push({"data": 1})
    (message,) = await queen.queue(queue).wait(False).pop()
    transaction = (
        queen.transaction()
        .ack(message)
        .queue(onward)
        .partition("p")
        .push([{"data": "a"}, {"data": "b"}])
    )
    done = await transaction.commit()
    assert done["success"] is True
    assert [result["type"] for result in done["results"]] == ["ack", "push", "push"]
    assert await queen.queue(queue).wait(False).pop() == []
    assert [
        outcome["data"] for outcome in await queen.queue(onward).batch(5).wait(False).pop()
    ] == ["a", "b"]


async def test_a_transaction_that_cannot_be_applied_changes_nothing(queen, queue):
    await queen.queue(queue).push({"data": 1})
    (message,) = await queen.queue(queue).wait(False).pop()
    stranger = {**message, "transactionId": "nobody"}
    with pytest.raises(Exception, match="Message not found"):
        await queen.transaction().queue(f"{queue}-next").push({"data": 2}).ack(stranger).commit()
    assert await queen.queue(f"{queue}-next").wait(False).pop() == []
    done = (
        await queen.transaction()
        .ack(message, "completed", {"consumer_group": "__QUEUE_MODE__"})
        .commit()
    )
    assert done["success"] is True


async def test_a_lost_lease_is_told_when_acknowledging(queen, queue):
    await queen.queue(queue).push({"data": 1})
    (message,) = await queen.queue(queue).wait(False).pop()
    answer = await queen.ack({**message, "leaseId": str(uuid.uuid4())})
    assert answer == {"success": False, "error": "Invalid or expired lease"}
    answer = await queen.ack({**message, "transactionId": "nobody"})
    assert answer == {"success": False, "error": "Message not found"}


# -- traces, groups, administration
# -----------------------------------------------------------------------------------


async def test_traces_are_attached_to_messages_and_found_by_name(queen, queue):
    await queen.queue(queue).push({"data": {"order": 7}})
    reported = []

    async def handle(message: dict[str, Any]) -> None:
        reported.append(message)
        answer = await message["trace"]({"traceName": [f"t-{queue}", "all"], "data": {"step": 1}})
        assert answer["success"] is True
        await message["trace"]({"data": {"step": 2}, "eventType": "error"})

    await queen.queue(queue).limit(1).consume(handle)
    message = reported[0]
    traces = (
        await queen.admin.get_traces_for_message(message["partitionId"], message["transactionId"])
    )["traces"]
    assert [(trace["event_type"], trace["data"]) for trace in traces] == [
        ("info", {"step": 1}),
        ("error", {"step": 2}),
    ]
    assert sorted(traces[0]["trace_names"]) == sorted([f"t-{queue}", "all"])
    page = await queen.admin.get_traces_by_name(f"t-{queue}", limit=10)
    assert page["total"] == 1
    assert page["traces"][0]["message_payload"] == {"order": 7}
    assert page["traces"][0]["queue_name"] == queue
    names = (await queen.admin.get_trace_names(limit=100))["trace_names"]
    assert {"trace_name", "trace_count", "message_count", "last_seen"} <= names[0].keys()
    assert f"t-{queue}" in [name["trace_name"] for name in names]


async def test_groups_are_listed_moved_and_deleted(queen, queue):
    group = f"g-{queue}"
    await queen.queue(queue).push([{"data": number} for number in range(3)])
    await drained(queen, queue, 3, group)
    (row,) = [row for row in await queen.admin.list_consumer_groups() if row["name"] == group]
    assert (row["queueName"], row["topics"], row["members"]) == (queue, [queue], 1)
    assert row["partitionsWithLag"] == 0
    detail = await queen.admin.get_consumer_group(group)
    assert detail[queue]["partitions"][0]["totalConsumed"] == 3
    moved = await queen.admin.seek_consumer_group(
        group, queue, {"timestamp": "2020-01-01T00:00:00Z"}
    )
    assert moved["success"] is True
    assert len(await queen.queue(queue).group(group).batch(10).wait(False).pop()) == 3
    await queen.admin.seek_consumer_group(group, queue, {"toEnd": True})
    assert await queen.queue(queue).group(group).batch(10).wait(False).pop() == []
    assert isinstance(await queen.admin.get_lagging_consumers(60), list)
    updated = await queen.update_consumer_group_timestamp(group, "2030-01-01T00:00:00Z")
    assert updated["success"] is True
    assert (await queen.admin.delete_consumer_group_for_queue(group, queue))["success"] is True
    assert (await queen.delete_consumer_group(group))["success"] is True
    assert len(await queen.queue(queue).group(group).batch(10).wait(False).pop()) == 3


async def test_messages_are_listed_looked_at_retried_put_aside_and_deleted(queen, queue):
    await queen.queue(queue).config({"retry_limit": 0}).create()
    await queen.queue(queue).push(
        [{"data": number, "transactionId": f"m{number}"} for number in range(3)]
    )
    listed = (await queen.admin.list_messages(queue=queue))["messages"]
    assert [message["transactionId"] for message in listed] == ["m2", "m1", "m0"]
    assert {message["status"] for message in listed} == {"pending"}
    partition = listed[0]["partitionId"]
    detail = await queen.admin.get_message(partition, "m1")
    assert (detail["payload"], detail["status"], detail["queueConfig"]["retryLimit"]) == (
        1,
        "pending",
        0,
    )
    await queen.admin.move_message_to_dlq(partition, "m0")
    assert [dead["data"] for dead in (await queen.queue(queue).dlq().get())["messages"]] == [0]
    await queen.admin.retry_message(partition, "m0")
    assert (await queen.queue(queue).dlq().get())["total"] == 0
    assert (await queen.admin.delete_message(partition, "m1"))["success"] is True
    messages = await drained(queen, queue, 2)
    assert sorted(message["data"] for message in messages) == [0, 2]


async def test_an_operator_sees_queues_partitions_and_status(queen, queue):
    admin = queen.admin
    await queen.queue(queue).namespace("ops").task("look").create()
    await queen.queue(queue).partition("p1").push([{"data": 1}, {"data": 2}])
    queues = (await admin.list_queues(limit=1000))["queues"]
    assert queue in [row["name"] for row in queues]
    assert (await admin.get_queue(queue))["namespace"] == "ops"
    partitions = (await admin.get_partitions(queue=queue))["partitions"]
    assert {"p1"} <= {row["name"] for row in partitions}
    assert "ops" in [row["namespace"] for row in (await admin.get_namespaces())["namespaces"]]
    assert "look" in [row["task"] for row in (await admin.get_tasks())["tasks"]]
    overview = await admin.get_overview()
    assert overview["queues"] >= 1
    assert {"total", "pending", "processing", "completed", "failed", "deadLetter"} <= overview[
        "messages"
    ].keys()
    assert {"timeRange", "throughput", "queues", "messages", "leases"} <= (
        await admin.get_status()
    ).keys()
    assert {"queues", "pagination"} <= (await admin.get_queue_stats(limit=5)).keys()
    detail = await admin.get_queue_detail(queue)
    assert detail["queue"]["config"]["leaseTime"] == 300
    assert {"p1"} <= {row["name"] for row in detail["partitions"]}
    assert {"dataPoints", "interval"} <= (await admin.get_analytics(interval="minute")).keys()
    assert isinstance(await admin.refresh_consumer_stats(), dict)
    assert isinstance(await admin.get_system_metrics(), dict)
    assert isinstance(await admin.get_worker_metrics(), dict)
    assert isinstance(await admin.get_postgres_stats(), dict)
    assert (await admin.health())["status"] == "healthy"
    await admin.metrics()
    await admin.clear_queue(queue, "p1")
    assert await queen.queue(queue).wait(False).pop() == []


async def test_maintenance_buffers_pushes_and_holds_pops(queen, queue):
    admin = queen.admin
    await queen.queue(queue).push({"data": "before"})
    assert (await admin.set_maintenance_mode(True))["maintenanceMode"] is True
    try:
        (result,) = await queen.queue(queue).push({"data": "during"})
        assert result["status"] == "buffered"
        assert (await admin.get_maintenance_mode())["maintenanceMode"] is True
        (message,) = await queen.queue(queue).wait(False).pop()  # what is stored can still be taken
        assert message["data"] == "before"
        assert (await queen.ack(message))["success"]
    finally:
        assert (await admin.set_maintenance_mode(False))["maintenanceMode"] is False
    (message,) = await queen.queue(queue).wait(True).timeout_millis(10_000).pop()
    assert message["data"] == "during"
    assert (await admin.set_pop_maintenance_mode(True))["popMaintenanceMode"] is True
    try:
        await queen.queue(queue).partition("p").push({"data": "held"})
        assert await queen.queue(queue).wait(True).timeout_millis(1000).pop() == []
        assert (await admin.get_pop_maintenance_mode())["popMaintenanceMode"] is True
    finally:
        await admin.set_pop_maintenance_mode(False)
    (message,) = await queen.queue(queue).wait(True).timeout_millis(10_000).pop()
    assert message["data"] == "held"


async def test_a_client_with_two_urls_goes_on_when_one_is_dead(broker, queue):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    try:
        async with Queen(
            urls=["http://127.0.0.1:1", broker.url], load_balancing_strategy="round-robin"
        ) as queen:
            for number in range(4):
                await queen.queue(queue).push({"data": number})
            assert len(await drained(queen, queue, 4)) == 4
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- authentication
# ---------------------------------------------------------------------------------------------------


async def test_the_clients_bearer_token_lets_it_in_and_names_the_producer(
    postgres, tmp_path, queue
):
    env = {"JWT_ENABLED": "true", "JWT_SECRET": SECRET}
    with BrokerProcess(tmp_path, database_url=await create_database(postgres), env=env) as guarded:
        async with with_queen(guarded, bearer_token=token("read-write", "alice")) as queen:
            await queen.queue(queue).create()
            await queen.queue(queue).partition("p").push([{"data": {"n": 1}}])
            [message] = await drained(queen, queue, 1)
            assert (message["data"], message["producerSub"]) == ({"n": 1}, "alice")
            with pytest.raises(Exception, match="needs the role admin"):
                await queen.queue(queue).delete()

        async with with_queen(guarded) as queen:
            with pytest.raises(Exception, match="Authentication required"):
                await queen.queue(queue).create()
