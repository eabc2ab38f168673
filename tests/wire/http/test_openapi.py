"""The OpenAPI document, and the server held to it."""

import json
import urllib.request
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta
from schemathesis.core.failures import FailureGroup

from penstock.errors import NotFound
from penstock.wire.http.messages import EMPTY, Request, Response, json_response
from penstock.wire.http.openapi import document
from penstock.wire.http.routes import HttpRoute
from tests.support.http import serving_in_thread
from tests.support.openapi import check_document


class Listing(msgspec.Struct, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=100, description="How many at most")] = 10
    wait: bool = False
    tag: list[str] = []
    name: str | None = None


class Item(msgspec.Struct, forbid_unknown_fields=True):
    queue: Annotated[str, Meta(min_length=1)]
    amount: Annotated[int, Meta(ge=0)]
    note: str | None = None
    parts: list[float] = []


class Stored(msgspec.Struct):
    id: int
    item: Item


class Shop:
    """A small but complete application: lists, creates, reads, deletes, takes raw bytes."""

    def __init__(self) -> None:
        self.items: dict[int, Item] = {}

    def listing(self, request: Request) -> Response:
        result = [Stored(number, item) for number, item in self.items.items()]
        return json_response(result[: request.args.limit])

    def create(self, request: Request) -> Response:
        number = len(self.items) % 100
        self.items[number] = request.data
        return json_response(Stored(number, request.data), 201)

    async def read(self, request: Request) -> Response:
        return json_response(Stored(0, self.find(request)))

    def delete(self, request: Request) -> Response:
        self.find(request)
        return EMPTY

    def raw(self, request: Request) -> Response:
        return Response(200, request.body, "application/octet-stream")

    def find(self, request: Request) -> Item:
        number = request.params["id"]
        if not number.isdecimal() or int(number) not in self.items:
            raise NotFound(f"no item {number}")
        return self.items[int(number)]

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute(
                "GET",
                "/items",
                self.listing,
                query=Listing,
                answer=list[Stored],
                summary="List",
                tag="items",
            ),
            HttpRoute(
                "POST",
                "/items",
                self.create,
                body=Item,
                answer=Stored,
                status=201,
                summary="Add",
                tag="items",
            ),
            HttpRoute("GET", "/items/{id}", self.read, answer=Stored, tag="items"),
            HttpRoute("DELETE", "/items/{id}", self.delete, status=204, tag="items"),
            HttpRoute(
                "POST",
                "/raw/{name...}",
                self.raw,
                body=bytes,
                answer=bytes,
                answer_type="application/octet-stream",
            ),
            HttpRoute("GET", "/hidden", self.delete, hidden=True),
        ]


def fetch(url: str) -> tuple[str, bytes]:
    with urllib.request.urlopen(url) as answer:
        return answer.headers["Content-Type"], answer.read()


def test_the_document_describes_parameters_bodies_and_answers() -> None:
    made: dict[str, Any] = document(Shop().routes())
    assert made["openapi"] == "3.1.0"
    assert set(made["paths"]) == {"/items", "/items/{id}", "/raw/{name}"}
    assert set(made["components"]["schemas"]) == {"Item", "Stored", "Error"}
    listing = made["paths"]["/items"]["get"]
    limit = next(parameter for parameter in listing["parameters"] if parameter["name"] == "limit")
    assert limit == {
        "name": "limit",
        "in": "query",
        "required": False,
        "description": "How many at most",
        "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 10},
    }
    create = made["paths"]["/items"]["post"]
    assert create["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/Item"
    }
    assert set(create["responses"]) == {"201", "default"}
    assert made["paths"]["/items/{id}"]["get"]["parameters"][0]["in"] == "path"
    identifiers = [
        operation["operationId"] for path in made["paths"].values() for operation in path.values()
    ]
    assert len(identifiers) == len(set(identifiers))


def test_the_server_keeps_what_its_document_promises() -> None:
    with serving_in_thread(*Shop().routes()) as server:
        kind, served = fetch(f"{server.url}/openapi.json")
        assert (kind, json.loads(served)) == (
            "application/json",
            json.loads(json.dumps(document(Shop().routes()))),
        )
        assert check_document(server.url, 10) > 40


def test_the_check_notices_a_server_that_breaks_its_promise() -> None:
    def wrong(_: Request) -> Response:
        return json_response({"id": "not a number"})

    with (
        serving_in_thread(HttpRoute("GET", "/items", wrong, answer=Stored)) as server,
        pytest.raises(FailureGroup, match="not a number"),
    ):
        check_document(server.url, 5)
