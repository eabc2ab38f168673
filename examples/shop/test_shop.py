"""Tests of the shop: `pytest examples/shop`. Handlers are functions; the path needs a broker."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock import DeadLetter, SyncClient
from shop import worker
from shop.models import OrderPlaced

pytest_plugins = ["penstock.testing"]


def test_a_negative_total_is_put_aside_at_once() -> None:
    with pytest.raises(DeadLetter, match="negative total"):
        asyncio.run(worker.charge(OrderPlaced(id=1, customer="anna", total=-5)))


def test_a_consumer_is_the_function_it_was_made_of() -> None:
    assert worker.bill.__name__ == "bill"
    assert worker.bill.address.queue == "shop.orders"


def test_a_payment_that_fails_is_tried_again(
    penstock_client: SyncClient, penstock_name: Callable[[str], str]
) -> None:
    """The same retry policy, with a queue of its own and a provider that fails twice."""
    queue, attempts = penstock_name("orders"), list[int]()

    @penstock_client.consumer(queue, retry=worker.backoff(5, first=0.01))
    def bill(message: Any) -> None:
        attempts.append(message.attempt)
        if len(attempts) < 3:
            raise worker.PaymentFailed
        penstock_client.stop()

    penstock_client.push(queue, OrderPlaced(id=1, customer="anna", total=5))
    began = time.monotonic()
    penstock_client.run(handle_signals=False)
    assert attempts == [1, 2, 3]
    assert time.monotonic() - began < 30
