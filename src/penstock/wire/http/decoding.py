"""Queries and bodies become structs; a refusal says what is wrong and where.

A body may say it in words of its own: its `texts` map the name of a field to what is said when the
field is wrong or missing.

A query parameter may be written in snake_case too. Parameters and fields that are not known are
ignored, as Queen MQ does. Where that could change what happens to messages (push and pop), one that
looks like a misspelling is refused with the nearest name.
"""

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeVar, get_args, get_origin, overload
from urllib.parse import parse_qsl

import msgspec

from penstock.errors import InvalidRequest

T = TypeVar("T")
_MAX_SHOWN = 100  # characters of a wrong value in the text of an error
_MISSING = re.compile(r"missing required field `(\w+)`")
_PLACE = re.compile(r" - at `\$\.?(.*?)`$")
_WORD = re.compile(r"[A-Z]?[a-z]+")
_SIMILARITY = 0.7  # `batchSize` is near to `batch`, `priority` to none of the parameters of a pop
_MAX_NAME = 64  # characters of a name that is compared with others
_MAX_COMPARED = 20  # unknown names of a request


def query_decoder(kind: type) -> Callable[[str], Any]:
    """Return a function from a query string to a `kind`. Other parameters are ignored; with the
    class attribute `refuse_misspelled`, those that look like a misspelling are rejected.
    """
    about: Any = msgspec.inspect.type_info(kind)
    repeated = {field.encode_name for field in about.fields if _is_list(field.type)}
    names = {field.encode_name: field.encode_name for field in about.fields}
    aliases = {field.name: field.encode_name for field in about.fields} | names
    known = tuple(names)
    careful = getattr(kind, "refuse_misspelled", False)

    def decode(query: str) -> Any:
        values: dict[str, Any] = {}
        if query:
            try:
                pairs = parse_qsl(query, keep_blank_values=True, errors="strict")
            except (UnicodeDecodeError, ValueError):
                raise InvalidRequest(
                    "The query string is not UTF-8 after percent-decoding"
                ) from None
            unknown: list[str] = []
            for given, value in pairs:
                name = aliases.get(given)
                if name is None:
                    unknown.append(given)
                elif name in repeated:
                    values.setdefault(name, []).append(value)
                else:
                    values.setdefault(name, value)
            if careful and unknown:
                _refuse_misspelled("query parameter", unknown, known, words=True)
        try:
            return msgspec.convert(values, kind, strict=False, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidRequest(_query_problem(str(error), values)) from None

    return decode


def _refuse_misspelled(
    what: str, unknown: Iterable[str], known: tuple[str, ...], *, words: bool = False
) -> None:
    for name in list(unknown)[:_MAX_COMPARED]:
        meant = nearest(name, known, words=words)
        if meant:
            raise InvalidRequest(f"Unknown {what} `{name}`: did you mean `{meant}`?")


@lru_cache(maxsize=1024)
def nearest(name: str, known: tuple[str, ...], *, words: bool = False) -> str | None:
    """Return the known name that this name misspells. With `words`, also return a name that
    contains it as a word (`group` of `consumerGroup`).
    """
    if len(name) > _MAX_NAME:
        return None
    plain = re.sub(r"[^a-z]", "", name.lower())
    by_plain = {one.lower(): one for one in known}
    close = get_close_matches(plain, by_plain, 1, _SIMILARITY)
    if close:
        return by_plain[close[0]]
    for one in known if words else ():
        if plain in (word.lower() for word in _WORD.findall(one)):
            return one
    return None


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
def body_decoder(kind: type[T], *, refuse_misspelled: bool = False) -> Callable[[bytes], T]: ...


@overload
def body_decoder(kind: Any, *, optional: bool) -> Callable[[bytes], Any]: ...


def body_decoder(
    kind: Any, *, optional: bool = False, refuse_misspelled: bool = False
) -> Callable[[bytes], Any]:
    """Return a function from a body to a `kind`. An empty body is an error unless it is `optional`:
    then it is None. With `refuse_misspelled`, fields that look like a misspelling are rejected. A
    body without unknown fields costs nothing more.

    msgspec leaves raw JSON values as they are, also when their bytes are no UTF-8: that is looked
    at here, so that no answer of ours can carry it to someone else.
    """
    if kind is bytes:
        return lambda body: body
    decode = msgspec.json.Decoder(kind).decode
    decode_strictly = msgspec.json.Decoder(_strict(kind)).decode if refuse_misspelled else None

    def decode_body(body: bytes) -> Any:
        if not body:
            if optional:
                return None
            raise InvalidRequest("Empty request body")
        try:
            if not body.isascii():
                body.decode("utf-8")
            if decode_strictly is not None:
                try:
                    return decode_strictly(body)
                except msgspec.ValidationError as error:
                    if "unknown field" in str(error):
                        _check_fields(kind, body)
            return decode(body)
        except msgspec.ValidationError as error:
            raise InvalidRequest(_body_problem(str(error), kind)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"Invalid JSON: {error}") from None
        except RecursionError:
            raise InvalidRequest("Invalid JSON: nested too deeply") from None

    return decode_body


def _strict(kind: Any) -> Any:
    """Return `kind` with unknown fields forbidden, also in the objects of its lists."""
    lists: list[Any] = []
    for field in msgspec.structs.fields(kind):
        item = get_args(field.type)[0] if get_origin(field.type) is list else None
        if isinstance(item, type) and issubclass(item, msgspec.Struct):
            lists.append((field.name, list[_strict(item)]))  # type: ignore[misc]
    return msgspec.defstruct(kind.__name__, lists, bases=(kind,), forbid_unknown_fields=True)


def _check_fields(kind: type, body: bytes) -> None:
    """Refuse misspelled fields of a body, and of the objects in its lists."""
    about: Any = msgspec.inspect.type_info(kind)
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    known = _public(about)
    _refuse_misspelled("field", given.keys() - set(known), known)
    for field in about.fields:
        item = getattr(field.type, "item_type", None)
        if isinstance(item, msgspec.inspect.StructType) and field.encode_name in given:
            known = _public(item)
            objects = msgspec.json.decode(
                given[field.encode_name], type=list[dict[str, msgspec.Raw]]
            )
            unknown = set().union(*objects) - set(known)
            _refuse_misspelled(f"field of {field.encode_name}", sorted(unknown), known)


def _public(about: Any) -> tuple[str, ...]:
    """Return the names of the fields that a request may have."""
    names = (field.encode_name for field in about.fields)
    return tuple(name for name in names if not name.startswith("_"))


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
