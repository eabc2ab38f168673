"""Map HTTP requests to handlers, and decode what a handler takes.

A path consists of literal segments and parameters `{name}` (a whole segment, percent-decoded, not
empty). Its last segment may be `{name...}`, which takes the rest of the path. Literal segments take
precedence over parameters, and parameters over the rest. If a path matches but has no route for the
method, the search continues. The endpoint is cached with the head, so the search runs once per
distinct request head.

Every answer comes from a BoundRoute, including "not found" and "method not allowed".

An API is a class with a `tag` whose methods carry their routes, and `routes_of` collects them:

    class GroupsApi:
        tag = "groups"

        @serves(operations.DESCRIBE_GROUP)
        async def describe(self, group: str, args: GroupPage) -> dict[str, GroupPositions]: ...

`serves` names an operation of the contract. `route` declares an operation that is not in the
contract: its signature defines the types, and its docstring is the summary.

A method takes `args` (the decoded query), `body` (the decoded body), `request` and the parameters
of the path; optional ones are `| None`. Its result is written as JSON. None is an empty answer, and
a Response is sent unchanged. A method that takes only the request and returns a Response is called
directly: push, pop and ack use this form for speed.

If a single call of an engine answers an operation, `calling` makes its route without a class.

A misspelt property fails at import. Routes of base classes are ignored: APIs do not inherit from
each other. `/openapi.json` lists all paths.
"""

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from functools import reduce
from inspect import iscoroutinefunction, signature
from operator import or_
from types import NoneType, UnionType
from typing import Any, Protocol, TypeVar, get_args, get_origin
from urllib.parse import unquote_to_bytes

from penstock.contract.operation import Audited, Operation
from penstock.errors import InvalidRequest
from penstock.wire.auth import Role
from penstock.wire.http.answers import writer_of
from penstock.wire.http.decoding import body_decoder, query_decoder
from penstock.wire.http.messages import (
    EMPTY,
    Answer,
    ErrorWriter,
    Handler,
    Headers,
    HttpHead,
    Precheck,
    Request,
    RequestRefused,
    Response,
    StreamResponse,
    error_response,
    json_response,
)

ANY = "*"
_LONE_PERCENT = re.compile(r"%(?![0-9a-fA-F]{2})")


@dataclass(frozen=True, slots=True)
class HttpRoute:
    method: str  # GET, POST, ...; "*" for any
    path: str
    handler: Handler
    _: KW_ONLY
    query: type | None = None  # a msgspec Struct: one field per parameter
    body: Any = None  # a type for msgspec, or bytes for the body as it is
    body_optional: bool = False  # an empty body is None instead of an error
    decode: bool = True  # False: the handler decodes; the type is for the OpenAPI document
    answer: Any = None  # type of the answer, for the OpenAPI document
    answer_type: str = "application/json"
    status: int = 200
    may_be_empty: bool = False  # it may also answer 204 without a body, for the OpenAPI document
    summary: str = ""
    tag: str = ""
    gzip: bool = True  # a large JSON answer may be compressed when the client asks for it
    variant_of: str = ""  # the path that this one is an alias of
    choices: tuple[str, ...] = ()  # values of the path's last parameter; empty: any text
    hidden: bool = False  # not in the OpenAPI document
    media: tuple[str, ...] = ()  # accepted types of the body besides JSON
    packed: bool = False  # the handler gets the body still compressed
    write_error: ErrorWriter | None = None  # for a protocol with its own errors
    error_types: tuple[str, ...] = ()  # types of these errors, for the OpenAPI document
    page: bool = False  # shown in a browser: links on other sites may lead here
    # another process serves it and checks the origin and the body itself
    forwards: bool = False
    role: Role | None = None  # required of the token; None: read-only for GET, else read-write
    audit: Audited | None = None  # None: not recorded

    @property
    def takes_json(self) -> bool:
        return bool(self.media) or (self.body is not None and self.body is not bytes)

    @property
    def segments(self) -> list[str]:
        return self.path.split("/")[1:]

    @property
    def parameters(self) -> list[str]:
        return [name for name in map(_parameter, self.segments) if name]


class Api(Protocol):
    """A class whose methods are decorated with `route`."""

    @property
    def tag(self) -> str:
        """Return the heading of its routes in the OpenAPI document."""


A = TypeVar("A")
_Method = TypeVar("_Method", bound=Callable[..., Any])
_FROM_OPERATION = (
    *("summary", "tag", "query", "decode", "status", "role", "audit", "may_be_empty"),
    *("answer_type", "choices"),
)


def route(method: str, path: str, **about: Any) -> Callable[[_Method], _Method]:
    """Declare a route of the method; a method may have several. `about` has the fields of
    `HttpRoute` that do not follow from the signature and the docstring.
    """

    def declare(handler: _Method) -> _Method:
        declared = HttpRoute(method, path, handler, **{**_described(handler), **about})
        for name, kinds in _parameters(handler).items():
            if kinds == (str,) and name not in declared.parameters:
                raise TypeError(f"{path} has no {{{name}}} for {handler.__qualname__}")
        handler.__dict__["routes"] = [declared, *handler.__dict__.get("routes", ())]
        return handler

    return declare


def serves(operation: Operation[Any], **about: Any) -> Callable[[_Method], _Method]:
    """Declare that the method answers an operation of the contract."""
    given = _fields_of(operation) | about

    def declare(method: _Method) -> _Method:
        for path in reversed(operation.also):
            route(operation.method, path, **given, variant_of=operation.path)(method)
        return route(operation.method, operation.path, **given)(method)

    return declare


def calling(operation: Operation[A], call: Callable[..., A | Awaitable[A]]) -> HttpRoute:
    """Return the route of an operation that `call` answers. Its arguments are the parameters of
    the path, the query and the body, in this order, if the operation has them.
    """
    said = _fields_of(operation)
    parts = ["args"] * (operation.query is not None) + ["data"] * (operation.body is not None)

    def arguments(request: Request) -> list[Any]:
        return [*request.params.values(), *(getattr(request, part) for part in parts)]

    handler = _writing(
        said.get("answer"),
        said["status"],
        lambda request: call(*arguments(request)),
        waits=iscoroutinefunction(call),
    )
    return HttpRoute(operation.method, operation.path, handler, **said)


def _fields_of(operation: Operation[Any]) -> dict[str, Any]:
    """Return the fields of the route that an operation defines."""
    bodies = _kinds(operation.body)
    given = {name: getattr(operation, name) for name in _FROM_OPERATION}
    if operation.answer is NoneType:
        given["status"] = 204 if operation.answer_type == "application/json" else 200
    else:
        given["answer"] = operation.answer
    return given | {"body": bodies[0], "body_optional": NoneType in bodies}


def routes_of(*apis: Api) -> list[HttpRoute]:
    """Return the routes that the methods of APIs declare, in the order of their classes."""
    return [
        replace(declared, handler=_bound(declared, getattr(api, name)), tag=declared.tag or api.tag)
        for api in apis
        for name, method in vars(type(api)).items()
        for declared in getattr(method, "routes", ())
    ]


def _described(handler: Callable[..., Any]) -> dict[str, Any]:
    """Return the fields of a route that follow from its method's signature and docstring."""
    takes = _parameters(handler)
    about: dict[str, Any] = {
        "summary": " ".join((handler.__doc__ or "").split()).removesuffix("."),
        "decode": "body" in takes,
    }
    if "args" in takes:
        about["query"] = takes["args"][0]
    if "body" in takes:
        about["body"] = takes["body"][0]
        about["body_optional"] = NoneType in takes["body"]
    returned = _kinds(signature(handler).return_annotation)
    written = [kind for kind in returned if not _is_raw(kind)]
    if written:
        about["answer"] = reduce(or_, written)
        about["may_be_empty"] = NoneType in returned
    elif returned == (None,):
        about["status"] = 204
    return about


def _parameters(handler: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """Return the types of a method's parameters, by name."""
    return {
        one.name: _kinds(one.annotation)
        for one in signature(handler).parameters.values()
        if one.name != "self"
    }


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is UnionType else (annotation,)


def _is_raw(kind: Any) -> bool:
    """Check for a result that is not written as JSON."""
    return kind in (Response, StreamResponse, NoneType, None) or get_origin(kind) is Awaitable


def _bound(declared: HttpRoute, method: Callable[..., Any]) -> Handler:
    """Return a handler that passes the method its arguments and writes its result."""
    takes = _parameters(method)
    returned = _kinds(signature(method).return_annotation)
    if [*takes.values()] == [(Request,)] and returned != (None,) and all(map(_is_raw, returned)):
        return method  # it is a handler
    parts = [(name, _part(name)) for name in takes]

    def call(request: Request) -> Any:
        return method(**{name: part(request) for name, part in parts})

    return _writing(declared.answer, declared.status, call, waits=iscoroutinefunction(method))


def _writing(kind: Any, status: int, call: Callable[[Request], Any], *, waits: bool) -> Handler:
    """Return a handler that writes what `call` returns, a `kind`; `waits`: `call` is a coroutine
    function.
    """
    write = writer_of(kind)

    def written(result: Any) -> Answer:
        if isinstance(result, Answer):
            return result
        return EMPTY if result is None else json_response(write(result), status)

    def call_now(request: Request) -> Answer:
        return written(call(request))

    async def call_and_wait(request: Request) -> Answer:
        return written(await call(request))

    return call_and_wait if waits else call_now


def _part(name: str) -> Callable[[Request], Any]:
    if name == "request":
        return lambda request: request
    if name == "args":
        return lambda request: request.args
    if name == "body":
        return lambda request: request.data
    return lambda request: request.params.get(name)


Protect = Callable[[HttpRoute, Handler], tuple[Handler, Precheck | None]]  # see `guard.py`
Trail = Callable[[Audited, Handler], Handler]  # see `audit.py`


class BoundRoute:
    """A route with its decoders and its cached metric labels."""

    __slots__ = (
        "_args", "_cache_args", "_data", "call", "gzip", "labels", "method", "name", "parameters",
        "precheck", "route", "write_error",
    )  # fmt: skip

    def __init__(
        self, route: HttpRoute, protect: Protect | None = None, trail: Trail | None = None
    ) -> None:
        self.route = route
        self.method = route.method
        self.name = route.path
        self.gzip = route.gzip
        self.write_error = route.write_error
        self.parameters = tuple(route.parameters)
        self.labels: dict[int, tuple[str, ...]] = {}  # status -> label values, filled by the server
        query = route.query
        self._cache_args = query is not None and bool(query.__struct_config__.frozen)  # type: ignore[attr-defined]
        self._args = query_decoder(query) if query is not None else None
        decodes_body = route.decode and route.body is not None
        self._data = (
            body_decoder(route.body, optional=route.body_optional) if decodes_body else None
        )
        decodes = self._args is not None or self._data is not None
        self.call: Handler = self._decode_and_call if decodes else route.handler
        if trail is not None and route.audit is not None:
            self.call = trail(route.audit, self.call)
        self.precheck: Precheck | None = None  # asked before a long body is received
        if protect is not None:
            self.call, self.precheck = protect(route, self.call)

    def _decode_and_call(self, request: Request) -> Answer | Awaitable[Answer]:
        if self._args is not None:
            head = request.head
            if head.args is not None:
                request.args = head.args
            else:
                request.args = self._args(head.query)
                if self._cache_args:
                    head.args = request.args
        if self._data is not None:
            request.data = self._data(request.body)
        return self.route.handler(request)


def _parameter(segment: str) -> str:
    return (
        segment[1:-1].removesuffix("...")
        if segment.startswith("{") and segment.endswith("}")
        else ""
    )


class _Node:
    __slots__ = ("literal", "methods", "one", "rest")

    def __init__(self) -> None:
        self.literal: dict[str, _Node] = {}  # by segment
        self.one: _Node | None = None  # below {name}
        self.rest: _Node | None = None  # {name...}
        self.methods: dict[str, BoundRoute] = {}  # of the path that ends here


class Router:
    def __init__(
        self,
        routes: Iterable[HttpRoute] = (),
        protect: Protect | None = None,
        trail: Trail | None = None,
    ) -> None:
        self._protect = protect  # None: authentication is off
        self._trail = trail  # None: changes are not recorded
        self._root = _Node()  # of all paths
        self._endpoints: list[BoundRoute] = []  # in the order they were added
        # (is OPTIONS, allowed methods) -> endpoint; bounded by the number of sets of methods
        self._refusals: dict[tuple[bool, str], BoundRoute] = {}
        self._not_found = BoundRoute(HttpRoute(ANY, "(none)", _not_found))
        self.extend(routes)

    def add(self, route: HttpRoute) -> None:
        if not route.path.startswith("/"):
            raise ValueError(f"a route's path starts with a slash: {route.path!r}")
        node = self._root
        for depth, segment in enumerate(route.segments):
            if segment.endswith("...}"):
                if depth + 1 != len(route.segments):
                    raise ValueError(f"{segment} must be the last segment of {route.path}")
                node.rest = node = node.rest or _Node()
            elif _parameter(segment):
                node.one = node = node.one or _Node()
            else:
                node = node.literal.setdefault(segment, _Node())
        if route.method in node.methods:
            raise ValueError(f"{route.method} {route.path} is routed twice")
        endpoint = BoundRoute(route, self._protect, self._trail)
        node.methods[route.method] = endpoint
        self._endpoints.append(endpoint)

    def extend(self, routes: Iterable[HttpRoute]) -> None:
        for route in routes:
            self.add(route)

    @property
    def routes(self) -> list[HttpRoute]:
        return [endpoint.route for endpoint in self._endpoints]

    def find(self, head: HttpHead) -> BoundRoute:
        """Return the endpoint for this head, and set the head's path parameters."""
        method, path = head.method, head.path
        raw = path.split("/")[1:]
        try:
            segments = [_percent_decoded(segment) for segment in raw] if "%" in path else raw
        except InvalidRequest as error:
            return _always(error_response(400, str(error)))
        search = _Search(method, segments)
        endpoint = search.below(self._root, 0)
        if endpoint is not None:
            head.params = dict(zip(endpoint.parameters, search.values, strict=True))
            return endpoint
        allowed = search.allowed
        if path == "*" and method == "OPTIONS":
            allowed = {endpoint.method for endpoint in self._endpoints} - {ANY}
        return self._without_route(method, allowed) if allowed else self._not_found

    def _without_route(self, method: str, allowed: set[str]) -> BoundRoute:
        if "GET" in allowed:
            allowed.add("HEAD")
        allow = ", ".join(sorted(allowed | {"OPTIONS"}))
        key = method == "OPTIONS", allow
        if key not in self._refusals:
            text, headers = f"Method not allowed, try one of: {allow}", (("Allow", allow),)
            self._refusals[key] = (
                BoundRoute(HttpRoute(ANY, "(204)", _preflight(allow)))
                if method == "OPTIONS"
                else _always(error_response(405, text, headers))
            )
        return self._refusals[key]


class _Search:
    """Search for the best endpoint of a path."""

    __slots__ = ("_method", "_segments", "allowed", "values")

    def __init__(self, method: str, segments: list[str]) -> None:
        self._method = method
        self._segments = segments
        self.values: list[str] = []  # of the parameters on the way to the endpoint
        self.allowed: set[str] = set()  # the methods of paths that match but lack the method

    def below(self, node: _Node, depth: int) -> BoundRoute | None:
        """Return the best endpoint for the segments from `depth` on."""
        if depth == len(self._segments):
            return self._of(node)
        segment = self._segments[depth]
        literal = node.literal.get(segment)
        if literal is not None and (endpoint := self.below(literal, depth + 1)) is not None:
            return endpoint
        if node.one is not None and segment:
            self.values.append(segment)
            if (endpoint := self.below(node.one, depth + 1)) is not None:
                return endpoint
            self.values.pop()
        if node.rest is not None and (endpoint := self._of(node.rest)) is not None:
            self.values.append("/".join(self._segments[depth:]))
            return endpoint
        return None

    def _of(self, node: _Node) -> BoundRoute | None:
        methods = {name: one for name, one in node.methods.items() if self._may_be(one.route)}
        for method in (self._method, "GET") if self._method == "HEAD" else (self._method,):
            if method in methods:
                return methods[method]
        if ANY not in methods:
            self.allowed.update(methods)
        return methods.get(ANY)

    def _may_be(self, route: HttpRoute) -> bool:
        return not route.choices or self.values[-1] in route.choices


def _percent_decoded(segment: str) -> str:
    if "%" not in segment:
        return segment
    if _LONE_PERCENT.search(segment):
        raise InvalidRequest("The path holds a percent sign without two hexadecimal digits")
    try:
        return unquote_to_bytes(segment).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("The path is not UTF-8 after percent-decoding") from None


def refusing(status: int, text: str, headers: Headers = ()) -> BoundRoute:
    """Return an endpoint that refuses requests, before the body is received if possible."""
    endpoint = _always(error_response(status, text, headers))
    endpoint.precheck = lambda _: RequestRefused(status, text, headers)
    return endpoint


def _always(response: Response) -> BoundRoute:
    return BoundRoute(HttpRoute(ANY, f"({response.status})", lambda _: response))


def _not_found(request: Request) -> Response:
    return error_response(404, f"Nothing at {request.head.path}")


def _preflight(allow: str) -> Handler:
    """Answer OPTIONS with the allowed methods. A CORS preflight gets permission for the headers it
    asks for.
    """

    def answer(request: Request) -> Response:
        asked = request.header("access-control-request-headers") or "Content-Type, Authorization"
        headers = (
            ("Allow", allow),
            ("Access-Control-Allow-Methods", allow),
            ("Access-Control-Allow-Headers", asked),
            ("Access-Control-Max-Age", "600"),
        )
        return Response(204, headers=headers)

    return answer
