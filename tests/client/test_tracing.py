"""Traces through queues, with the SDK's exporter in memory and a real broker."""

import asyncio
import itertools

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from penstock import Client, DeadLetter, Message, Retry, processing
from penstock.client import tracing
from tests.support.wait import eventually


@pytest.mark.parametrize("buffer_ms", [None, 10], ids=["directly", "over the broker's buffer"])
async def test_one_trace_from_a_web_handler_through_the_queue_to_the_worker(
    broker, queue, spans, buffer_ms
):
    async with Client(broker.url) as client:
        with spans.tracer.start_as_current_span("POST /orders"):
            await client.push(queue, 1, partition="p", headers={"tenant": "a"}, buffer_ms=buffer_ms)
        headers: list[dict[str, str]] = []
        loop = asyncio.get_running_loop()

        @client.consumer(f"{queue}@g")
        def handle(message: Message) -> None:  # in a thread: the context goes with it
            headers.append(message.headers)
            with spans.tracer.start_as_current_span("INSERT"):
                loop.call_soon_threadsafe(client.stop)

        await client.run()
        assert headers[0]["tenant"] == "a"
        assert headers[0]["traceparent"].startswith("00-")
    names = ("POST /orders", f"send {queue}", f"process {queue}", "INSERT")
    assert len({spans.trace_of(name) for name in names}) == 1
    chain = [spans(name)[0] for name in names]
    for parent, child in itertools.pairwise(chain):
        assert child.parent is not None
        assert child.parent.span_id == parent.context.span_id
    _, send, process, _ = chain
    assert (send.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert dict(send.attributes) | {"messaging.message.id": ""} == {
        "messaging.system": "penstock",
        "messaging.operation.name": "push",
        "messaging.operation.type": "send",
        "messaging.destination.name": queue,
        "messaging.destination.partition.id": "p",
        "messaging.message.id": "",
    }
    assert process.attributes["messaging.consumer.group.name"] == "g"
    assert process.attributes["messaging.message.id"] == send.attributes["messaging.message.id"]
    (receive,) = spans(f"receive {queue}")
    assert receive.kind is SpanKind.CLIENT
    assert [link.context.span_id for link in receive.links] == [send.context.span_id]


async def test_the_trace_goes_on_after_a_dead_letter_and_its_requeue(broker, queue, spans):
    async with Client(broker.url) as client:
        with spans.tracer.start_as_current_span("POST /orders"):
            await client.push(queue, 1)
        calls: list[Message] = []

        @client.consumer(f"{queue}@g")
        async def handle(message: Message) -> None:
            calls.append(message)
            if len(calls) == 1:
                raise DeadLetter("no such customer")
            if len(calls) == 2:
                raise Retry
            client.stop()

        running = asyncio.create_task(client.run())

        async def buried() -> bool:
            letters = (await client.admin.dead_letters(queue)).messages
            return bool(letters) and "traceparent" in letters[0].headers

        await eventually(buried)
        assert await client.admin.requeue(queue) == 1
        await running
    failed, retried, done = spans(f"process {queue}")
    trace = spans.trace_of("POST /orders")
    assert {span.context.trace_id for span in (failed, retried, done)} == {trace}
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes["error.type"] == "DeadLetter"
    assert [event.name for event in failed.events] == ["exception"]
    assert retried.attributes["messaging.penstock.outcome"] == "retry"
    assert (retried.status.is_ok, done.status.is_ok) == (True, True)


async def test_a_batch_has_links_to_all_its_messages(broker, queue, spans):
    async with Client(broker.url) as client:
        async with client.buffer() as buffer, client.transaction() as tx:
            await buffer.push(queue, 1)
            tx.push(queue, 2)
            await buffer.push(queue, 3, headers={"traceparent": "of the caller"})

        async def stored() -> bool:
            return (await client.admin.describe(queue)).stored == 3

        await eventually(stored)

        @client.consumer(queue, batch=10, batches=True)
        async def handle(messages: list[Message]) -> None:
            assert sorted(message.data for message in messages) == [1, 2, 3]
            client.stop()

        await client.run()
    made = {span.context.span_id for span in spans(f"create {queue}")}
    (process,) = spans(f"process {queue}")
    assert process.parent is None
    assert process.attributes["messaging.batch.message_count"] == 3
    linked = {link.context.span_id for link in process.links}
    assert len(linked) == 2
    assert linked < made
    assert {link.context.span_id for link in spans(f"send {queue}")[0].links} <= made


async def test_without_the_package_nothing_is_added_and_nothing_fails(
    broker, queue, spans, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tracing, "ENABLED", False)

    async with Client(broker.url) as client:
        await client.push(queue, 1)
        async for message in client.take(queue, idle=0):
            with processing(message):
                assert message.headers == {}
    assert spans(f"send {queue}") == spans(f"process {queue}") == []
