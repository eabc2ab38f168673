"""Order processing with two groups, and what to do about dead letters.

Billing and shipping both see every order, each at its own pace. Orders of one customer keep their
order. An order that cannot be billed goes to billing's dead letters; shipping is not affected.

The runbook at the end is what a person does, also from a shell:

    penstock queue dlq list orders --group billing     what went wrong, and with which message
    (mend the cause)
    penstock queue dlq requeue orders --group billing  deliver them again
"""

import asyncio

import msgspec

from penstock import Client, DeadLetter

QUEUE = "orders"
ORDERS = [{"id": 1, "total": 10}, {"id": 2, "total": -5}, {"id": 3, "total": 7}, {"id": "four"}]


class Order(msgspec.Struct):
    id: int | str
    total: int = 0


async def main() -> None:
    billed: list[int | str] = []
    shipped: list[int | str] = []
    mended = False

    async with Client.from_env() as client:

        @client.consumer(f"{QUEUE}@billing", concurrency=2)
        async def bill(order: Order) -> None:
            if order.total < 0 and not mended:
                raise DeadLetter(f"order {order.id} has a negative total")
            billed.append(order.id)

        @client.consumer(f"{QUEUE}@shipping", concurrency=2)
        async def ship(order: Order) -> None:
            shipped.append(order.id)

        await client.push_many(QUEUE, ORDERS, partition="customer-7")
        running = asyncio.create_task(client.run())
        while len(shipped) < len(ORDERS) or len(billed) < len(ORDERS) - 1:
            await asyncio.sleep(0.05)
        print("shipped:", shipped)
        print("billed:", billed)

        # The runbook
        letters = await client.admin.dead_letters(QUEUE, group="billing")
        for letter in letters.messages:
            print("dead letter:", letter.data, "because", letter.error)
        mended = True
        count = await client.admin.requeue(QUEUE, group="billing")
        print("delivered again:", count)
        while len(billed) < len(ORDERS):
            await asyncio.sleep(0.05)
        print("billed at last:", billed[-1])
        client.stop()
        await running


if __name__ == "__main__":
    asyncio.run(main())
