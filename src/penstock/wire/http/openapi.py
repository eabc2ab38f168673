"""Build the OpenAPI 3.1 document of the routes from the msgspec types of their queries and bodies.

`DocsApi` serves it at `/openapi.json`. It is built at the first request, when all routes exist, and
cached. The Console shows it on `docs.html`.
"""

import re
from collections.abc import Iterable
from functools import cached_property
from types import UnionType
from typing import Any, get_args, get_origin

import msgspec

from penstock import __version__
from penstock.protocol.status import CLASSES, REASONS
from penstock.wire.http.examples import meaning, parameter_example, recorded
from penstock.wire.http.guard import TokenGuard, role_of
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import ANY, HttpRoute, Router, route
from penstock.wire.queen.aliases import ALIASES

_REF = "#/components/schemas/{name}"
_TOKEN = {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {"type": "string"},
        "code": {"type": "string", "enum": list(CLASSES)},
        "retryAfter": {"type": "number"},
        "resume": {"type": "integer"},
    },
    "required": ["error"],
}


def document(routes: Iterable[HttpRoute], guard: TokenGuard | None = None) -> dict[str, Any]:
    """Build the document. With a `guard`, operations name the role that they need."""
    shown = [route for route in routes if not route.hidden and route.method != ANY]
    kinds = [
        kind
        for route in shown
        for kind in (route.query, route.body, route.answer)
        if _has_schema(kind)
    ]
    types = {id(one): one for kind in kinds for one in _alternatives(kind)}
    made, components = msgspec.json.schema_components(list(types.values()), ref_template=_REF)
    for component in components.values():  # fields that only the broker sets
        properties = component.get("properties", {})
        for name in [name for name in properties if name.startswith("_")]:
            del properties[name]
    schemas = dict(zip(types, made, strict=True))
    for kind in kinds:
        if id(kind) not in schemas:
            schemas[id(kind)] = {"anyOf": [schemas[id(one)] for one in _alternatives(kind)]}
    components["Error"] = _ERROR
    for noun in ALIASES:
        if noun.__name__ in components:  # its fields have aliases
            components[noun.__name__]["additionalProperties"] = True
    paths: dict[str, dict[str, Any]] = {}
    for one in shown:
        path = one.path.replace("...}", "}")
        operation = paths.setdefault(path, {})[one.method.lower()] = _operation(
            one, schemas, components
        )
        if guard is not None and guard.needs_token(one.path):
            operation |= {"security": [{"token": []}], "x-role": role_of(one).title}
    only_queries = {ref_name(schemas[id(one.query)]) for one in shown if one.query is not None}
    for name in only_queries - _referenced(paths):
        components.pop(name, None)  # shown as parameters, not referenced
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__},
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in shown) if tag],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": _TOKEN}},
    }


def _has_schema(kind: Any) -> bool:
    return kind is not None and kind is not bytes


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union of structs: msgspec describes only single structs."""
    members = get_args(kind) if get_origin(kind) is UnionType else ()
    structs = [one for one in members if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    return members if len(structs) > 1 else (kind,)


def ref_name(schema: dict[str, Any]) -> str:
    return str(schema.get("$ref", "")).rsplit("/", 1)[-1]


def _referenced(value: Any) -> set[str]:
    """Return the names of all components that `value` refers to directly."""
    if isinstance(value, dict):
        names = {ref_name(value)} if "$ref" in value else set()
        return names.union(*map(_referenced, value.values()))
    return set().union(*map(_referenced, value)) if isinstance(value, list) else set()


def _operation(
    route: HttpRoute, schemas: dict[int, Any], components: dict[str, Any]
) -> dict[str, Any]:
    path = route.path.replace("...}", "}")
    example = recorded().get(f"{route.method} {path}", {})
    parameters: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
            "example": parameter_example(path, name),
        }
        for name in route.parameters
    ]
    if route.choices:
        parameters[-1] |= {
            "schema": {"type": "string", "enum": list(route.choices)},
            "example": route.choices[0],
        }
    if route.query is not None:
        parameters += _query_parameters(components[ref_name(schemas[id(route.query)])])
    for parameter in parameters:
        if "description" not in parameter and (text := meaning(path, parameter["name"])):
            parameter["description"] = text
        if parameter["name"] in example.get("query", {}):
            parameter["example"] = example["query"][parameter["name"]]
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "responses": {str(route.status): _answer(route, schemas), "default": _problem(route)},
    }
    if route.may_be_empty:
        operation["responses"]["204"] = {"description": REASONS[204]}
    if route.summary:
        operation["summary"] = route.summary
    if route.tag:
        operation["tags"] = [route.tag]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        content: dict[str, Any] = (
            {"application/octet-stream": {}}
            if route.body is bytes
            else {"application/json": {"schema": schemas[id(route.body)]}}
        )
        _add_example(content, example.get("body"))
        operation["requestBody"] = {
            "required": not route.body_optional and route.body is not bytes,
            "content": content,
        }
    answer = operation["responses"][str(route.status)].get("content", {})
    _add_example(answer, example.get("answer"))
    return operation


def _add_example(content: dict[str, Any], example: Any) -> None:
    """Add the recorded example to a JSON body or answer."""
    if "application/json" in content and example is not None:
        content["application/json"]["example"] = example


def _query_parameters(schema: dict[str, Any]) -> list[dict[str, Any]]:
    required = set(schema.get("required", ()))
    return [
        {
            "name": name,
            "in": "query",
            "required": name in required,
            "schema": {key: value for key, value in about.items() if key != "description"},
            **({"description": about["description"]} if "description" in about else {}),
        }
        for name, about in schema.get("properties", {}).items()
    ]


def _answer(route: HttpRoute, schemas: dict[int, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": REASONS.get(route.status, "")}
    if _has_schema(route.answer):
        answer["content"] = {route.answer_type: {"schema": schemas[id(route.answer)]}}
    elif route.answer is bytes or route.answer_type != "application/json":
        answer["content"] = {route.answer_type: {}}
    return answer


def _problem(route: HttpRoute) -> dict[str, Any]:
    ours = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    return {
        "description": "An error: what is wrong, and where",
        "content": {kind: {} for kind in route.error_types} or ours,
    }


class DocsApi:
    """Serves `/openapi.json` for all routes of the router."""

    tag = ""

    def __init__(self, router: Router, guard: TokenGuard | None = None) -> None:
        self._router = router
        self._guard = guard

    @cached_property
    def _json(self) -> Response:
        made = document(self._router.routes, guard=self._guard)
        return Response(200, msgspec.json.encode(made))

    @route("GET", "/openapi.json", hidden=True, page=True)
    def openapi(self, _: Request) -> Response:
        return self._json
