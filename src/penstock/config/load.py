"""Build the `Config` from its layers: defaults < YAML < environment < flags.

Each layer is first flattened to `dotted.key -> (value, origin)`, later layers win key by key, and
every value that was given is converted by its field's type. All mistakes are collected, so that one
start reports all of them.
"""

import difflib
import math
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import parse_qs, urlsplit

from penstock.config.schema import Config
from penstock.config.values import (
    format_duration,
    format_size,
    parse_duration,
    parse_share,
    parse_size,
)
from penstock.errors import ConfigError

# Read by the command line, the client and the tests.
NOT_OURS = ("PENSTOCK_URL", "PENSTOCK_BROKER", "PENSTOCK_TOKEN", "PENSTOCK_SOAK", "PENSTOCK_CONFIG")
DEFAULT_FILES = ("penstock.yaml", "config.yaml")
Section = TypeVar("Section")
_PARSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "size": (parse_size, "a size such as 4096, 256Ki or 1Gi"),
    "duration": (parse_duration, "a duration such as 5, 100ms or 5m"),
    "share": (parse_share, "a share between 0 and 1, such as 0.1 or 10%"),
}
_SECRETS = ("secret", "postgres")
_PORT = re.compile(r"^(\[[^\]]*\]|[^:]*):?")  # what is left of host:port without it is the port
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Given:
    """A value and where it was given."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The effective configuration, where each given value came from, and what was ignored."""

    config: Config
    origins: dict[str, str]
    warnings: list[str]


class _Wrong(Exception):
    """A wrong value. The text says what is expected."""


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Loaded:
    """Load the configuration from `file`, `environ` (default: ours) and `flags` (dotted keys)."""
    problems: list[str] = []
    given: dict[str, Given] = {}
    if file is not None:
        given |= _from_yaml(file, problems)
    from_environment, warnings = _from_environment(os.environ if environ is None else environ)
    given |= from_environment
    given |= {
        name: Given(value, "flag") for name, value in (flags or {}).items() if value is not None
    }
    for name, _, item in leaves():  # keys of the last release, in milliseconds
        former = f"{name.rpartition('.')[0]}.{item.metadata['milliseconds']}"
        if former in given:
            old = given.pop(former)
            given.setdefault(name, Given(_in_milliseconds(old.value), old.origin))
    config = _made(Config, given, problems)
    return Loaded(config, {name: value.origin for name, value in given.items()}, warnings)


def default_file() -> Path | None:
    """Return the configuration file that is used when none is named."""
    named = os.environ.get("PENSTOCK_CONFIG")
    if named:
        return Path(named)
    return next((Path(name) for name in DEFAULT_FILES if Path(name).is_file()), None)


def parse_settings(pairs: list[str]) -> dict[str, str]:
    """Return the flags of `--set KEY=VALUE`."""
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {pair}: expected KEY=VALUE, such as --set topics.fsync=always"
            )
        settings[name.strip()] = value
    return settings


def leaves(kind: type = Config, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield every key as (dotted name, type, field), in order."""
    hints = get_type_hints(kind, include_extras=True)
    for item in fields(kind):
        annotation = hints[item.name]
        if is_dataclass(annotation):
            yield from leaves(annotation, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            yield prefix + item.name, annotation, item


def show(loaded: Loaded) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of `penstock config`: key, value as in a file, origin; secrets are masked."""
    for name, annotation, _ in leaves():
        value: Any = loaded.config
        for part in name.split("."):
            value = getattr(value, part)
        yield name, _display(value, annotation), loaded.origins.get(name, "default")


def build(
    kind: type[Section], tree: Mapping[str, Any], origin: str, base: Section | None = None
) -> Section:
    """Build a section (that of a route, say) from a mapping; other keys come from `base` or the
    defaults.
    """
    problems: list[str] = []
    given = _flatten(dict(tree), origin, [name for name, _, _ in leaves(kind)], problems)
    return _made(kind, given, problems, base)


def _from_yaml(file: Path, problems: list[str]) -> dict[str, Given]:
    from penstock.config.yaml_file import read  # 1 MiB that a broker without a file saves

    tree = read(file)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{file}: expected a mapping of keys at the top, got {type(tree).__name__}"
        )
    return _flatten(tree, str(file), [name for name, _, _ in leaves()], problems)


def _flatten(
    tree: dict[Any, Any], origin: str, keys: list[str], problems: list[str], prefix: str = ""
) -> dict[str, Given]:
    values: dict[str, Given] = {}
    for word, value in tree.items():
        name = f"{prefix}{word}"
        if not any(key.startswith(f"{name}.") for key in keys):
            values[name] = Given(value, origin)
        elif isinstance(value, dict):
            values |= _flatten(value, origin, keys, problems, f"{name}.")
        elif value is not None:  # as in `http_server:` with everything under it commented out
            problems.append(f"{name}: expected a section with keys, got {value!r} ({origin})")
    return values


def _from_environment(environ: Mapping[str, str]) -> tuple[dict[str, Given], list[str]]:
    values: dict[str, Given] = {}
    ours = set(NOT_OURS)
    for name, _, item in leaves():
        own = "PENSTOCK_" + name.upper().replace(".", "_")
        others, former = item.metadata["env"], item.metadata["milliseconds"]
        if former:
            others = (*others, own.removesuffix(item.name.upper()) + former.upper())
        for variable in (*others, own):
            ours.add(variable)
            if variable in environ:
                text = environ[variable]
                value = _in_milliseconds(text) if former and variable != own else text
                values[name] = Given(value, f"environment {variable}")
    warnings = [
        f"environment variable {variable} is not a setting{_suggest(variable, ours)}; ignored"
        for variable in sorted(environ)
        if variable.startswith("PENSTOCK_") and variable not in ours
    ]
    return values, warnings


def _in_milliseconds(value: Any) -> Any:
    """Return a value of a key whose plain numbers are milliseconds, as a duration."""
    return f"{value}ms" if str(value).strip().isdecimal() else value


def _made(
    kind: type[Section], given: dict[str, Given], problems: list[str], base: Section | None = None
) -> Section:
    """Build a section from its given values. Reports all mistakes at once."""
    keys = [name for name, _, _ in leaves(kind)]
    problems += [
        f"{name} = {one.value!r}: no such key ({one.origin}){_suggest(name, keys)}"
        for name, one in given.items()
        if name not in keys
    ]
    made: Section = _build(kind, "", given, problems, base)
    if problems:
        raise ConfigError("\n".join(problems))
    return made


def _suggest(word: str, keys: Any) -> str:
    close = difflib.get_close_matches(word, list(keys), n=1, cutoff=0.75)
    if not close and "." not in word:
        close = [name for name in keys if name.rpartition(".")[2] == word][:1]
    return f"; did you mean {close[0]}?" if close else ""


def _build(
    kind: type, prefix: str, given: dict[str, Given], problems: list[str], base: Any = None
) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    values: dict[str, Any] = {}
    for item in fields(kind):
        annotation, name = hints[item.name], prefix + item.name
        if base is not None:
            values[item.name] = getattr(base, item.name)
        if is_dataclass(annotation):
            inner = values.get(item.name)
            values[item.name] = _build(annotation, f"{name}.", given, problems, inner)  # type: ignore[arg-type]
        elif name in given:
            try:
                values[item.name] = _convert(given[name].value, annotation)
            except _Wrong as wrong:
                shown = "***" if _is_secret(annotation) else repr(given[name].value)
                problems.append(f"{name} = {shown}: expected {wrong} ({given[name].origin})")
    return kind(**values)


def _convert(value: Any, annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _convert_annotated(value, *get_args(annotation))
    if origin is Literal:
        choices = get_args(annotation)
        by_word = {c.lower() if isinstance(c, str) else c: c for c in choices}
        word = str(value).lower() if not isinstance(value, bool) else value
        if word == "warn" and "warning" in choices:
            word = "warning"
        if word not in by_word:
            close = difflib.get_close_matches(str(word), [str(choice) for choice in choices], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise _Wrong("one of " + ", ".join(str(choice) or '""' for choice in choices) + hint)
        return by_word[word]
    if origin in (Union, types.UnionType):
        inner = next(part for part in get_args(annotation) if part is not type(None))
        return None if value in (None, "") else _convert(value, inner)
    if origin is dict:
        if not isinstance(value, dict):
            raise _Wrong("a mapping of names to values")
        return {
            str(name): str(inner) if get_args(annotation)[1] is str else inner
            for name, inner in value.items()
        }
    return _convert_plain(value, annotation)


def _convert_annotated(value: Any, plain: type, tag: str) -> Any:
    if tag in _PARSED:
        parse, expected = _PARSED[tag]
        try:
            return parse(value)
        except ValueError:
            raise _Wrong(expected) from None
    if tag == "postgres":
        return _postgres_url(_convert_plain(value, str))
    if tag == "hosts" and not all(map(_is_port, _ports(str(value or "")))):
        raise _Wrong("host or host:port, several with commas ([::1]:5432 for IPv6)")
    return _convert_plain(value, plain)


def _postgres_url(url: str) -> str:
    """Reject a URL that can never work; otherwise the database would seem to be down."""
    if not url:
        return url
    scheme, colon, rest = url.partition("://")
    if not colon or scheme not in ("postgresql", "postgres"):
        given = f"not {scheme}://..." if colon else "not a URL without postgresql:// in front"
        raise _Wrong(f"postgresql://user:password@host:5432/database, {given}")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]
    query = parse_qs(urlsplit(f"//x?{rest.partition('?')[2]}").query)
    ports = [*_ports(authority), *query.get("port", [""])[-1].split(",")]
    if not all(map(_is_port, ports)):  # its parts are not shown: it may contain a password
        raise _Wrong(
            "a port from 1 to 65535 after host: (in a password / : @ are written %2F %3A %40)"
        )
    return url


def _ports(hosts: str) -> list[str]:
    return [_PORT.sub("", host.strip()) for host in hosts.split(",")]


def _is_port(text: str) -> bool:
    return not text or (text.isdecimal() and 0 < int(text) < 65536)


def _convert_plain(value: Any, kind: type) -> Any:
    if kind is bool:
        word = str(value).lower()
        if word not in _TRUE + _FALSE:
            raise _Wrong("true or false")
        return word in _TRUE
    if kind is int:
        try:
            if isinstance(value, bool | float):
                raise ValueError
            number = int(value)
        except (TypeError, ValueError):
            raise _Wrong("a whole number") from None
        if number < 0:
            raise _Wrong("a whole number that is not negative")
        return number
    if kind is float:
        try:
            if isinstance(value, bool) or not math.isfinite(float(value)):
                raise ValueError
            return float(value)
        except (TypeError, ValueError):
            raise _Wrong("a number") from None
    if kind is Path:
        if not isinstance(value, str | Path) or not str(value):
            raise _Wrong("a path")
        return Path(value).expanduser()
    if kind is str:
        if value is None:
            return ""
        if not isinstance(value, str | int | float):
            raise _Wrong("text")
        return str(value)
    raise TypeError(f"no conversion to {kind}")


def _is_secret(annotation: Any) -> bool:
    return get_origin(annotation) is Annotated and get_args(annotation)[1] in _SECRETS


def _display(value: Any, annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        tag = get_args(annotation)[1]
        if tag in _SECRETS:
            return "***" if value else '""'
        if tag == "size":
            return format_size(value)
        if tag == "duration":
            return format_duration(value)
    if get_origin(annotation) is dict:  # keys, and routes with their addresses and headers
        return "{" + ", ".join(f"{name}: ***" for name in value) + "}"
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'
