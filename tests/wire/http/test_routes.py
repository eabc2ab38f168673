"""Routes are declared at the methods that answer them."""

import importlib
import json
import pkgutil
from datetime import UTC, datetime
from inspect import signature
from types import UnionType
from typing import get_args

import msgspec
import pytest

from penstock.contract import operations
from penstock.contract.noun import Noun
from penstock.wire.auth import Role
from penstock.wire.http import api
from penstock.wire.http.answers import plain, writer_of
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import route, routes_of
from tests.support.http import get, post
from tests.wire.http.test_requests import answers


class Things:
    tag = "things"

    def __init__(self, name: str) -> None:
        self.name = name

    @route("GET", "/things", summary="All")
    @route("GET", "/v2/things", summary="All, by its newer name", tag="v2")
    def everything(self, _: Request) -> Response:
        return Response(200, self.name.encode())

    @route("DELETE", "/things/{name}", role=Role.ADMIN)
    async def delete(self, _: Request) -> Response:
        return Response(204)

    def helper(self) -> None: ...


def test_the_routes_of_an_api_stand_at_its_methods_and_call_the_object() -> None:
    one, two = routes_of(Things("one")), routes_of(Things("two"))
    assert [(each.method, each.path, each.tag) for each in one] == [
        ("GET", "/things", "things"),
        ("GET", "/v2/things", "v2"),
        ("DELETE", "/things/{name}", "things"),
    ]
    assert one[2].role is Role.ADMIN
    request: Request = None  # type: ignore[assignment]
    assert [api[1].handler(request).body for api in (one, two)] == [b"one", b"two"]  # type: ignore[union-attr]


def test_a_misspelt_property_of_a_route_is_refused_where_it_is_declared() -> None:
    with pytest.raises(TypeError, match="sumary"):
        route("GET", "/things", sumary="All")(Things.everything)


class Color(msgspec.Struct):
    color: str


class Painted(Noun):
    thing_name: str
    color: str | None
    painted_at: datetime


class Paints:
    tag = "paints"

    @route("POST", "/things/{name}/paint", status=202)
    async def paint(self, name: str, body: Color | None) -> Painted | None:
        """Paint a thing,
        or look at it.
        """
        color = body and body.color
        return None if name == "air" else Painted(name, color, datetime(2026, 1, 31, tzinfo=UTC))

    @route("POST", "/things/{name}/clean")
    def clean(self, request: Request, name: str) -> None:
        """Clean a thing."""
        assert request.params["name"] == name


async def test_the_signature_says_what_a_method_takes_and_answers_and_its_docstring_what_it_is_for():
    paint, clean = routes = routes_of(Paints())
    assert (paint.summary, paint.body, paint.body_optional) == (
        "Paint a thing, or look at it",
        Color,
        True,
    )
    assert (paint.answer, paint.status, paint.may_be_empty) == (Painted, 202, True)
    assert (clean.answer, clean.status) == (None, 204)
    red, plain, nothing, cleaned = await answers(
        routes,
        post("/things/car/paint", b'{"color":"red"}'),
        post("/things/car/paint", b""),
        post("/things/air/paint", b""),
        post("/things/car/clean", b""),
    )
    at = "2026-01-31T00:00:00.000Z"
    assert json.loads(red.body) == {"thingName": "car", "color": "red", "paintedAt": at}
    assert json.loads(plain.body)["color"] is None
    assert [one.status for one in (red, plain, nothing, cleaned)] == [202, 202, 204, 204]


class Doors:
    tag = "doors"

    @route("POST", "/doors/{name}/{action}", choices=("open", "close"))
    def act(self, name: str, action: str) -> Painted:
        return Painted(name, action, datetime(2026, 1, 31, tzinfo=UTC))

    @route("GET", "/doors/{name}/key")
    def key(self, name: str) -> Painted | None: ...


async def test_a_path_whose_last_parameter_has_choices_does_not_exist_with_another_value() -> None:
    opened, unknown, other, looked = await answers(
        routes_of(Doors()),
        post("/doors/front/open", b""),
        post("/doors/front/paint", b""),
        post("/doors/front/key", b""),
        get("/doors/front/paint"),
    )
    assert json.loads(opened.body)["color"] == "open"
    assert [one.status for one in (unknown, other, looked)] == [404, 405, 404]
    assert other.headers["allow"] == "GET, HEAD, OPTIONS"


def test_the_path_of_an_operation_is_the_one_that_has_so_many_parameters() -> None:
    assert operations.DELETE_GROUP.at("mail") == "/api/v1/consumer-groups/mail"
    on_queue = "/api/v1/consumer-groups/mail/queues/a%2Fb"
    assert operations.DELETE_GROUP.at("mail", "a/b") == on_queue


def test_a_parameter_that_the_path_does_not_have_is_refused_where_it_is_declared() -> None:
    with pytest.raises(TypeError, match=r"has no \{name\} for Paints\.paint"):
        route("GET", "/things")(Paints.paint)


def test_answers_with_times_are_bodies_which_write_them_in_milliseconds() -> None:
    modules = [f"{api.__name__}.{module.name}" for module in pkgutil.iter_modules(api.__path__)]
    kinds = [kind for name in modules for kind in vars(importlib.import_module(name)).values()]
    methods = [one for kind in kinds if hasattr(kind, "tag") for one in vars(kind).values()]
    routes = [route for method in methods for route in getattr(method, "routes", ())]
    structs = [route for route in routes if route.answer_type == "application/json"]
    # Handlers that return a response have written it themselves.
    structs = [one for one in structs if signature(one.handler).return_annotation is not Response]
    assert len(structs) > 60
    with_times = 0
    for one in structs:
        kinds = get_args(one.answer) if isinstance(one.answer, UnionType) else (one.answer,)
        if any("DateTimeType" in repr(msgspec.inspect.type_info(kind)) for kind in kinds):
            with_times += 1
            assert writer_of(one.answer) is plain, one.path
    assert with_times > 10
