"""What may be pushed: payloads that JSON can say, and addresses."""

import asyncio
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import attrs
import msgspec
import pydantic
import pytest

from penstock import Client, SyncClient
from penstock.client import Message
from penstock.errors import InvalidRequest
from penstock.wire.http.messages import EMPTY, Request, Response
from penstock.wire.http.routes import HttpRoute
from tests.client.scripted import GIVEN, queued
from tests.support.http import serving

NOWHERE = "http://127.0.0.1:1"  # nothing of these reaches a broker


@dataclass
class Reading:
    value: float
    raw: bytes = b""


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (float("nan"), "the payload is nan, which JSON cannot represent"),
        ({"prices": [1.5, {"eur": float("-inf")}]}, r"the payload's prices\[1\].eur is -inf"),
        (b'{"id": 7}', r"the payload is bytes.*msgspec.Raw"),
        ({"body": bytearray(b"x")}, r"the payload's body is bytearray.*base64"),
        (Reading(float("nan")), "the payload's value is nan"),
        ((1, Reading(1.0)), r"the payload's \[1\].raw is bytes"),
        (Decimal("NaN"), "the payload is NaN"),
    ],
)
async def test_what_json_would_change_in_silence_is_refused_wherever_it_is_pushed(
    payload: Any, text: str
) -> None:
    async with Client(NOWHERE, retry_for=0.0) as client:
        refused = pytest.raises(InvalidRequest, match=text)
        with refused:
            await client.push("q", payload)
        with refused:
            await client.push_many("q", [{"fine": 1}, payload])
        with refused:
            client.transaction().push("q", payload)
        with refused:
            await client.trace(Message(**GIVEN), payload)
        async with client.buffer() as buffer:
            with refused:
                await buffer.push("q", payload)
    with SyncClient(NOWHERE, retry_for=0.0) as plain, pytest.raises(InvalidRequest, match=text):
        plain.push("q", payload)


async def test_payloads_that_json_can_say_are_pushed_as_they_are() -> None:
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    fine = {
        "a": [1, 2.5, None, True, {"b": "c"}],
        "at": moment,
        "sum": Decimal("1.10"),
        "pair": (1, 2),
        "n": 1 << 70,
    }
    sent: list[Any] = []

    def push(request: Request) -> Response:
        sent.extend(json.loads(request.body)["items"])
        return queued(sent[-1:])

    async with (
        serving(HttpRoute("POST", "/api/v1/push", push)) as server,
        Client(server.url) as client,
    ):
        await client.push("q", fine)
        await client.push("q", msgspec.Raw(b'{"n": 7}'))
    assert [item["payload"] for item in sent] == [
        fine | {"at": "2026-01-31T12:00:00Z", "sum": "1.10", "pair": [1, 2]},
        {"n": 7},
    ]


@dataclass
class AsDataclass:
    id: int
    price: Any = 1.5


@attrs.define
class AsAttrs:
    id: int
    price: Any = 1.5


class AsStruct(msgspec.Struct):
    id: int
    price: Any = 1.5


class AsModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    id: int
    price: Any = 1.5


@pytest.mark.parametrize("kind", [AsDataclass, AsAttrs, AsStruct, AsModel])
async def test_models_are_pushed_as_objects_and_an_error_names_their_field(
    broker: Any, queue: str, kind: Any
) -> None:
    async with Client(broker.url) as client:
        await client.push(queue, kind(id=7))
        await client.push(queue, {"orders": [kind(id=8)]})
        messages = await client.pop(queue, batch=2)
        assert [message.data for message in messages] == [
            {"id": 7, "price": 1.5},
            {"orders": [{"id": 8, "price": 1.5}]},
        ]
        with pytest.raises(InvalidRequest, match=r"the payload's orders\[0\].price is nan"):
            await client.push(queue, {"orders": [kind(id=8, price=float("nan"))]})
        with pytest.raises(InvalidRequest, match=r"orders\[0\].price.eur is an instance of object"):
            await client.push(queue, {"orders": [kind(id=8, price={"eur": object()})]})


async def test_a_push_to_a_group_or_to_two_partitions_is_refused() -> None:
    async with Client(NOWHERE, retry_for=0.0) as client:
        for push in (client.push, client.transaction().push, client.buffer().push):
            with pytest.raises(
                InvalidRequest,
                match=r"a push has no group, and 'a b/c@d' names 'd': every group",
            ):
                done = push("a b/c@d", {})
                if asyncio.iscoroutine(done):
                    await done
        with pytest.raises(
            InvalidRequest, match="names the partition 'one' and the argument 'two'"
        ):
            await client.push("q/one", {}, partition="two")
    with (
        SyncClient(NOWHERE, retry_for=0.0) as plain,
        pytest.raises(InvalidRequest, match="a push has no group"),
    ):
        plain.push("a@b", {})


async def test_the_address_names_queue_partition_and_group():
    seen = []

    def pop(request: Request) -> Response:
        seen.append((request.params, request.head.query))
        return EMPTY

    route = HttpRoute("GET", "/api/v1/pop/queue/{queue}/partition/{partition}", pop)
    async with serving(route) as server, Client(server.url) as client:
        await client.pop("or ders/c 1@billing", batch=3)
        for bad in ("", "@g", "q/", "q@"):
            with pytest.raises(InvalidRequest):
                await client.pop(bad)
    assert seen == [({"queue": "or ders", "partition": "c 1"}, "batch=3&consumerGroup=billing")]
