"""Routes are declared at the methods that answer them."""

import pytest

from penstock.wire.auth import Role
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import route, routes_of


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
