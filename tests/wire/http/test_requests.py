"""Requests and answers: routing, decoding, errors, and what an answer's head says."""

import asyncio
import json
import logging
from typing import Any

import msgspec
import pytest

from penstock.errors import Conflict, Full, InvalidOffset, NotFound, StorageFull, Unavailable
from penstock.metrics import Metrics
from penstock.wire.http.messages import EMPTY, Request, Response, json_response
from penstock.wire.http.routes import HttpRoute, Router
from penstock.wire.origins import Origins
from tests.support.http import Reply, connected, get, post, request, serving, talking


class Page(msgspec.Struct, frozen=True):
    limit: int = 10
    wait: bool = False
    name: str | None = None
    tag: list[str] = []


class Needed(msgspec.Struct):
    topic: str


class Push(msgspec.Struct):
    queue: str
    items: list[int]


def echo(request: Request) -> Response:
    return Response(200, request.body, "application/octet-stream")


def shown(request: Request) -> Response:
    return json_response({"params": dict(request.params), "path": request.head.path})


def args(request: Request) -> Response:
    return json_response(request.args)


async def later(request: Request) -> Response:
    await asyncio.sleep(0)
    return json_response({"later": request.params["id"]})


async def answers(routes: list[HttpRoute], *requests: bytes, **settings: Any) -> list[Reply]:
    """The answers to the requests, sent one after the other on one connection."""
    async with talking(*routes, **settings) as (_, wire):
        return [await wire.ask(one) for one in requests]


def error(reply: Reply) -> str:
    return str(json.loads(reply.body)["error"])


async def test_plain_handlers_coroutines_and_futures_answer_pipelined_requests_in_their_order() -> (
    None
):
    def future(request: Request) -> "asyncio.Future[Response]":
        made = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(
            0.01, made.set_result, Response(200, b"future", "text/plain")
        )
        return made

    routes = (
        HttpRoute("POST", "/echo", echo),
        HttpRoute("GET", "/later/{id}", later),
        HttpRoute("GET", "/future", future),
    )
    async with talking(*routes) as (_, wire):
        wire.send(post("/echo", b"1") + get("/later/2") + get("/future") + post("/echo", b"3"))
        wire.send(get("/later/4") + post("/echo", b"5"))
        result = [(await wire.reply()).body for _ in range(6)]
        assert result == [b"1", b'{"later":"2"}', b"future", b"3", b'{"later":"4"}', b"5"]


async def test_literal_segments_win_over_parameters_and_parameters_over_the_rest() -> None:
    def named(name: str) -> HttpRoute:
        return HttpRoute("GET", name, lambda request: json_response([name, dict(request.params)]))

    routes = [
        named(path) for path in ("/a/b", "/a/{x}", "/a/{x}/c", "/a/{rest...}", "/{one}/b/{two}")
    ]
    asked = ("/a/b", "/a/q", "/a/q/c", "/a/q/d/e", "/a/", "/z/b/y", "/a/b/y")
    result = [json.loads(reply.body) for reply in await answers(routes, *map(get, asked))]
    assert result == [
        ["/a/b", {}],
        ["/a/{x}", {"x": "q"}],
        ["/a/{x}/c", {"x": "q"}],
        ["/a/{rest...}", {"rest": "q/d/e"}],
        ["/a/{rest...}", {"rest": ""}],
        ["/{one}/b/{two}", {"one": "z", "two": "y"}],
        ["/a/{rest...}", {"rest": "b/y"}],
    ]


async def test_path_parameters_are_percent_decoded_after_the_path_is_split() -> None:
    routes = [HttpRoute("GET", "/queue/{queue}/x", shown), HttpRoute("GET", "/a b", shown)]
    result = await answers(routes, get("/queue/a%2Fb%20%C3%A9/x"), get("/a%20b"), get("/queue//x"))
    assert json.loads(result[0].body)["params"] == {"queue": "a/b é"}
    assert result[1].status == 200
    assert result[2].status == 404


@pytest.mark.parametrize(
    ("path", "text"), [("/q/%zz", "hexadecimal"), ("/q/%2", "hexadecimal"), ("/q/%ff", "UTF-8")]
)
async def test_a_path_that_cannot_be_decoded_is_a_400(path: str, text: str) -> None:
    reply = (await answers([HttpRoute("GET", "/q/{x}", shown)], get(path)))[0]
    assert reply.status == 400
    assert text in error(reply)


async def test_an_unknown_path_is_a_404_and_an_unknown_method_a_405_with_allow() -> None:
    routes = [
        HttpRoute("GET", "/x", shown),
        HttpRoute("POST", "/x", shown),
        HttpRoute("PUT", "/{y}", shown),
    ]
    missing, refused, fallen = await answers(
        routes, get("/nope/n"), request("DELETE", "/x", b""), request("PUT", "/x", b"")
    )
    assert missing.status == 404
    assert error(missing) == "Nothing at /nope/n"
    assert refused.status == 405
    assert refused.headers["allow"] == "GET, HEAD, OPTIONS, POST, PUT"
    assert fallen.status == 200


async def test_a_route_for_any_method_takes_every_method() -> None:
    routes = [
        HttpRoute(
            "*",
            "/f/{rest...}",
            lambda request: Response(200, request.head.method.encode(), "text/plain"),
        )
    ]
    answer = await answers(
        routes, get("/f/1"), request("DELETE", "/f/2", b""), request("OPTIONS", "/f/3", b"")
    )
    assert [reply.body for reply in answer] == [b"GET", b"DELETE", b"OPTIONS"]


def test_a_route_that_exists_twice_is_refused_when_it_is_added() -> None:
    with pytest.raises(ValueError, match="routed twice"):
        Router([HttpRoute("GET", "/a/{x}", shown), HttpRoute("GET", "/a/{y}", shown)])


async def test_head_gives_the_head_of_get_without_its_body() -> None:
    async with talking(HttpRoute("GET", "/x", lambda _: Response(200, b"12345", "text/plain"))) as (
        _,
        wire,
    ):
        reply = await wire.ask(request("HEAD", "/x", b""))
        assert (reply.status, reply.headers["content-length"], reply.body) == (200, "5", b"")
        assert (await wire.ask(get("/x"))).body == b"12345"


async def test_options_tells_a_browser_what_it_may_send() -> None:
    asked = request(
        "OPTIONS", "/x", b"", "Origin: http://a", "Access-Control-Request-Headers: X-One, X-Two"
    )
    reply, plain = await answers(
        [HttpRoute("POST", "/x", shown)],
        asked,
        post("/x", b"", "Origin: http://a"),
        origins=Origins("http://a", any_host=True),
    )
    assert reply.status == 204
    assert reply.headers["allow"] == "OPTIONS, POST"
    assert reply.headers["access-control-allow-methods"] == "OPTIONS, POST"
    assert reply.headers["access-control-allow-headers"] == "X-One, X-Two"
    assert reply.headers["access-control-allow-origin"] == "http://a"
    assert (plain.headers["access-control-allow-origin"], plain.headers["vary"]) == (
        "http://a",
        "Origin",
    )


async def test_a_query_becomes_a_typed_struct_leniently_and_unknown_parameters_are_ignored() -> (
    None
):
    routes = [HttpRoute("GET", "/q", args, query=Page)]
    asked = (
        "/q",
        "/q?limit=5&wait=1&name=a+b%C3%A9&x=y",
        "/q?wait=True&tag=a&tag=b",
        "/q?limit=1&limit=2&name=",
    )
    result = [json.loads(reply.body) for reply in await answers(routes, *map(get, asked))]
    assert result == [
        {"limit": 10, "wait": False, "name": None, "tag": []},
        {"limit": 5, "wait": True, "name": "a bé", "tag": []},
        {"limit": 10, "wait": True, "name": None, "tag": ["a", "b"]},
        {"limit": 1, "wait": False, "name": "", "tag": []},
    ]


async def test_a_bad_query_value_is_a_400_that_names_the_parameter() -> None:
    routes = [HttpRoute("GET", "/q", args, query=Page), HttpRoute("GET", "/n", args, query=Needed)]
    result = await answers(
        routes, *map(get, ("/q?limit=ten", "/q?wait=maybe", "/n", "/q?name=%ff"))
    )
    assert [reply.status for reply in result] == [400] * 4
    assert error(result[0]) == "Query parameter `limit`: expected `int`, got 'ten'"
    assert error(result[1]) == "Query parameter `wait`: expected `bool`, got 'maybe'"
    assert error(result[2]) == "Missing query parameter `topic`"
    assert "UTF-8" in error(result[3])


async def test_a_bad_body_is_a_400_that_says_what_and_where() -> None:
    routes = [HttpRoute("POST", "/p", lambda request: json_response(request.data.items), body=Push)]
    bodies = (
        b'{"queue":"q","items":[1,2]}',
        b"",
        b'{"queue":',
        b'{"queue":"q","items":[1,"2"]}',
        b'{"queue":"\xff\xfe","items":[]}',
        b"[" * 100_000,
        b'{"items":[]}',
    )
    result = await answers(routes, *(post("/p", body) for body in bodies))
    assert (result[0].status, result[0].body) == (200, b"[1,2]")
    assert [reply.status for reply in result[1:]] == [400] * 6
    assert error(result[1]) == "Empty request body"
    assert error(result[2]).startswith("Invalid JSON: ")
    assert "$.items[1]" in error(result[3])
    assert error(result[4]).startswith("Invalid JSON: ")
    assert "`queue`" in error(result[6])


async def test_an_optional_body_may_be_empty_and_raw_bytes_stay_as_they_are() -> None:
    routes = [
        HttpRoute(
            "POST",
            "/optional",
            lambda request: json_response(request.data),
            body=Push,
            body_optional=True,
        ),
        HttpRoute(
            "POST", "/raw", lambda request: Response(200, request.data, "text/plain"), body=bytes
        ),
    ]
    result = await answers(
        routes, post("/optional", b""), post("/raw", b"\xff\x00"), post("/raw", b"")
    )
    assert [reply.body for reply in result] == [b"null", b"\xff\x00", b""]


@pytest.mark.parametrize(
    ("raised", "status", "retry"),
    [
        (NotFound("no queue q"), 404, None),
        (InvalidOffset("offset 9 is past the end"), 400, None),
        (Conflict("lease lost"), 409, None),
        (Full("queue q is full"), 429, None),
        (Unavailable("database down", 2.2), 503, "3"),
        (StorageFull("disk full"), 507, None),
    ],
)
async def test_errors_become_statuses_with_their_text(
    raised: Exception, status: int, retry: str | None
) -> None:
    def plain(_: Request) -> Response:
        raise raised

    async def coroutine(_: Request) -> Response:
        await asyncio.sleep(0)
        raise raised

    for reply in await answers(
        [HttpRoute("GET", "/p", plain), HttpRoute("GET", "/c", coroutine)], get("/p"), get("/c")
    ):
        assert (reply.status, error(reply), reply.headers.get("retry-after")) == (
            status,
            str(raised),
            retry,
        )


async def test_an_unexpected_error_is_logged_once_with_its_id_and_tells_the_client_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_: Request) -> Response:
        raise RuntimeError("secret detail")

    def bad_header(_: Request) -> Response:
        return Response(200, b"", headers=(("X-A", "1\r\nX-B: 2"),))

    with caplog.at_level(logging.ERROR, "penstock.http"):
        result = await answers(
            [HttpRoute("GET", "/x", broken), HttpRoute("GET", "/h", bad_header)],
            get("/x"),
            get("/h"),
        )
    for reply, record in zip(result, caplog.records, strict=True):
        answer = json.loads(reply.body)
        assert (reply.status, answer["error"]) == (500, "internal error")
        assert answer["id"] in record.getMessage()
        assert b"secret" not in reply.body
        assert record.exc_info is not None
    assert "x-b" not in result[1].headers


async def test_an_answer_without_a_body_has_no_length_and_no_type() -> None:
    reply, after = await answers([HttpRoute("GET", "/x", lambda _: EMPTY)], get("/x"), get("/x"))
    assert (reply.status, after.status) == (204, 204)
    assert "content-length" not in reply.headers
    assert "content-type" not in reply.headers
    assert "date" in reply.headers


async def test_headers_are_found_by_lower_case_name_and_repeated_ones_are_joined() -> None:
    def handler(request: Request) -> Response:
        return json_response([request.header("x-a"), request.header("x-none"), request.address])

    assert json.loads(
        (await answers([HttpRoute("GET", "/x", handler)], get("/x", "X-A: 1", "x-a: 2")))[0].body
    ) == [
        "1, 2",
        None,
        "127.0.0.1",
    ]


async def test_a_proxy_may_send_the_absolute_form() -> None:
    routes = [HttpRoute("GET", "/a", args, query=Page), HttpRoute("GET", "/", shown)]
    result = await answers(routes, get("http://host:80/a?limit=3"), get("http://host"))
    assert json.loads(result[0].body)["limit"] == 3
    assert json.loads(result[1].body)["path"] == "/"


async def test_every_answer_is_counted_by_route_and_status() -> None:
    metrics = Metrics()

    async with (
        serving(HttpRoute("GET", "/q/{x}", shown), metrics=metrics) as server,
        connected(server) as wire,
    ):
        for path in ("/q/1", "/q/2", "/nope"):
            await wire.ask(get(path))
        assert metrics.samples()["penstock_http_connections"] == 1
    counts = metrics.samples()
    assert counts['penstock_http_requests_total{method="GET",route="/q/{x}",status="200"}'] == 2
    assert counts['penstock_http_requests_total{method="*",route="(none)",status="404"}'] == 1


async def test_many_distinct_heads_do_not_grow_memory_and_repeated_ones_are_parsed_once() -> None:
    async with talking(HttpRoute("GET", "/q", args, query=Page)) as (server, wire):
        cache = server.state.cache
        for start in range(0, 10_000, 100):
            wire.send(b"".join(get(f"/q?limit={number}") for number in range(start, start + 100)))
            result = [json.loads((await wire.reply()).body)["limit"] for _ in range(100)]
            assert result == list(range(start, start + 100))
            assert len(cache.young) + len(cache.old) + len(cache.seen) <= 6144
        assert not cache.young, "a head that was seen once is not kept"
        for _ in range(2):
            await wire.ask(get("/q?limit=0"))
        kept = dict(cache.young)
        assert len(kept) == 1
        await wire.ask(get("/q?limit=0"))
        assert cache.young == kept
        for number in range(10_000):
            cache.get(get(f"/q?limit={number // 2}"))
            assert len(cache.young) + len(cache.old) + len(cache.seen) <= 6144
        assert len(cache.young) > 0
