"""Queries and bodies become structs; a refusal says what is wrong and where.

A body may say it in words of its own: its `texts` map the name of a field to what is said when the
field is wrong or missing.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar, overload
from urllib.parse import parse_qsl

import msgspec

from penstock.errors import InvalidRequest

T = TypeVar("T")
_MAX_SHOWN = 100  # characters of a wrong value in the text of an error
_MISSING = re.compile(r"missing required field `(\w+)`")
_PLACE = re.compile(r" - at `\$\.?(.*?)`$")


def query_decoder(kind: type) -> Callable[[str], Any]:
    """A function from a query string to a `kind`; other parameters are ignored."""
    about: Any = msgspec.inspect.type_info(kind)
    repeated = {field.encode_name for field in about.fields if _is_list(field.type)}
    single = {field.encode_name for field in msgspec.structs.fields(kind)} - repeated

    def decode(query: str) -> Any:
        values: dict[str, Any] = {}
        if query:
            try:
                pairs = parse_qsl(query, keep_blank_values=True, errors="strict")
            except (UnicodeDecodeError, ValueError):
                raise InvalidRequest(
                    "The query string is not UTF-8 after percent-decoding"
                ) from None
            for name, value in pairs:
                if name in repeated:
                    values.setdefault(name, []).append(value)
                elif name in single:
                    values.setdefault(name, value)
        try:
            return msgspec.convert(values, kind, strict=False, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidRequest(_query_problem(str(error), values)) from None

    return decode


def _is_list(about: Any) -> bool:
    kinds = about.types if isinstance(about, msgspec.inspect.UnionType) else (about,)
    return any(
        isinstance(kind, msgspec.inspect.ListType | msgspec.inspect.SetType) for kind in kinds
    )


def _query_problem(text: str, values: dict[str, Any]) -> str:
    problem, _, place = text.partition(" - at `$.")
    if place:
        name = place.rstrip("`").split("[")[0]
        problem = problem[:1].lower() + problem[1:].replace(", got `str`", "")
        value = values.get(name)
        shown = repr(value) if len(str(value)) <= _MAX_SHOWN else f"{str(value)[:_MAX_SHOWN]!r}..."
        return f"Query parameter `{name}`: {problem}, got {shown}"
    return problem.replace("Object missing required field", "Missing query parameter")


@overload
def body_decoder(kind: type[T]) -> Callable[[bytes], T]: ...


@overload
def body_decoder(kind: Any, *, optional: bool) -> Callable[[bytes], Any]: ...


def body_decoder(kind: Any, *, optional: bool = False) -> Callable[[bytes], Any]:
    """A function from a body to a `kind`. An empty body is an error unless it is `optional`: then
    it is None.

    msgspec leaves raw JSON values as they are, also when their bytes are no UTF-8: that is looked
    at here, so that no answer of ours can carry it to someone else.
    """
    if kind is bytes:
        return lambda body: body
    decode = msgspec.json.Decoder(kind).decode

    def decode_body(body: bytes) -> Any:
        if not body:
            if optional:
                return None
            raise InvalidRequest("Empty request body")
        try:
            if not body.isascii():
                body.decode("utf-8")
            return decode(body)
        except msgspec.ValidationError as error:
            raise InvalidRequest(_body_problem(str(error), kind)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"Invalid JSON: {error}") from None
        except RecursionError:
            raise InvalidRequest("Invalid JSON: nested too deeply") from None

    return decode_body


def _body_problem(problem: str, kind: Any) -> str:
    texts = getattr(kind, "texts", None)
    if texts is None:
        return f"Invalid body: {problem}"
    missing, place = _MISSING.search(problem), _PLACE.search(problem)
    if missing:
        name = missing[1]
    else:
        name = re.sub(r"\[.*?\]", "", place[1]).rpartition(".")[2] if place else ""
    shown = problem.replace("`$.", "`").replace("at `$`", "at the top")
    return texts.get(name) or f"Invalid body: {shown}"
