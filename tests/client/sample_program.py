"""A program with mistakes: type checkers must find each line that is marked, and no other."""

from datetime import UTC, datetime, timedelta

from penstock import Client, DeadLetter, Message, Record, Retry, SyncClient, SyncMessage
from penstock.errors import QueueFull

client = Client("http://127.0.0.1:6632", token="secret", timeout=5)
wrong = Client("http://127.0.0.1:6632", tokn="secret")  # wrong


@client.consumer("orders@billing", concurrency=8, batch=10)
async def bill(message: Message) -> None:
    if message.data is None:
        raise DeadLetter("nothing to bill")
    if message.headers.get("tenant") == "busy":
        raise Retry("later", delay=5)


@client.consumer("orders@billing", concurency=8)  # wrong
async def twice(message: Message) -> None: ...


async def program() -> int:
    async with Client.from_env() as ours:
        try:
            pushed = await ours.push("orders", {"id": 7}, partition="c-1", delay=30)
        except QueueFull as full:
            return len(full.results)
        await ours.push("orders", {}, headers={"tenant": "a"}, deliver_at=datetime.now(UTC))
        await ours.push("orders", {}, delay=timedelta(minutes=1))
        await ours.push("orders", {"id": 7}, partitoin="c-1")  # wrong
        await ours.push("orders", {"id": 7}, delay="30")  # wrong
        async for message in ours.take("orders@billing", batch=10, idle=0):
            await message.ack()
            await message.retry(delay=5)
            await message.retry(dealy=5)  # wrong
            await message.dead_letter("why")
            await message.extend(60)
            await ours.ack(message, "done")  # wrong
        async for message in ours.take("orders@billing", bach=10):  # wrong
            await message.ack()
        await ours.configure("orders", lease_time=30)
        await ours.configure("orders", laese_time=30)  # wrong
        letters = await ours.admin.dead_letters("orders", group="billing")
        reasons: list[str | None] = [letter.error for letter in letters.messages]
        letters["messages"]  # wrong
        orders = ours.topic("orders-log")
        offset = await orders.produce(b"...")
        async for record in orders.tail(start="earliest"):
            seen: Record = record
            offset = seen.offset
        async for batch in orders.group("billing").take():
            offset += batch.count
        orders.producer(lingr=1)  # wrong
        await ours.schedules.create("nightly", cron="0 3 * * *", queue="reports", catch_up="one")
        await ours.schedules.create("nightly", crn="0 3 * * *", queue="reports")  # wrong
        return offset + len(reasons) + len(pushed.transaction_id)


def plain_program() -> None:
    with SyncClient("http://127.0.0.1:6632") as plain:
        plain.push("orders", {"id": 7}, partition="c-1")
        plain.push("orders", {"id": 7}, partitoin="c-1")  # wrong
        for message in plain.take("orders@billing", batch=10):
            taken: SyncMessage = message
            taken.ack()
        for message in plain.take("orders@billing", bach=10):  # wrong
            message.ack()
        messages: list[SyncMessage] = plain.pop("orders", wait=1.5)
        print(len(messages), plain.topic("orders-log").produce(b"..."))
        with plain.buffer(linger=0.1) as buffer:
            buffer.push("orders", {"id": 8})
        plain.buffer(lnger=0.1)  # wrong
    SyncClient("http://127.0.0.1:6632", tokn="secret")  # wrong

    @plain.consumer("orders@billing", concurency=8)  # wrong
    def bill(message: SyncMessage) -> None: ...
