"""Testing code that uses queues: a broker for the tests, and names of their own for each."""

from collections.abc import Callable

from penstock import SyncClient

pytest_plugins = ["penstock.testing"]


def bill(client: SyncClient, orders: str, invoices: str) -> None:
    """The code that is tested: take an order, push its invoice."""
    for message in client.take(f"{orders}@billing", idle=0):
        client.push(invoices, {"order": message.data["id"]}, partition=message.partition)
        message.ack()


def test_every_order_gets_an_invoice(
    penstock_client: SyncClient, penstock_name: Callable[[str], str]
) -> None:
    orders, invoices = penstock_name("orders"), penstock_name("invoices")
    penstock_client.push_many(orders, [{"id": 1}, {"id": 2}], partition="c-1")
    bill(penstock_client, orders, invoices)
    bill(penstock_client, orders, invoices)  # there is nothing left to do
    made = penstock_client.pop(invoices, batch=10)
    assert [message.data["order"] for message in made] == [1, 2]
