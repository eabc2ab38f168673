"""Declare operations of the HTTP API once, for the broker, its clients and the reference."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from penstock.protocol.roles import Role

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Audited:
    """An audited change: its name, and the fields of body and answer that are recorded. The name
    may contain parameters of the path, as in `route.{action}`.
    """

    action: str
    body: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Operation(Generic[A]):
    """An operation, and the type of its answer."""

    method: str
    path: str
    answer: type[A]  # NoneType: no body
    summary: str
    _: KW_ONLY
    tag: str = ""
    also: tuple[str, ...] = ()  # further paths
    choices: tuple[str, ...] = ()  # values of the path's last parameter; empty: any text
    query: Any = None  # a struct with one field per parameter
    body: Any = None  # a type for msgspec, `| None` if it may be empty; bytes: the body as it is
    decode: bool = True  # False: the handler decodes the body
    status: int = 200
    may_be_empty: bool = False  # the answer may also be 204 without a body
    answer_type: str = "application/json"
    role: Role | None = None  # None: read-only for GET, else read-write
    audit: Audited | None = None
    again: bool | None = None  # a client may repeat it; None: all methods but POST

    @property
    def repeatable(self) -> bool:
        return self.method != "POST" if self.again is None else self.again

    def at(self, *names: str) -> str:
        """Return the path that has so many parameters, filled in, in order."""
        paths = (self.path, *self.also)
        path = next(one for one in paths if one.count("{") == len(names))
        given = iter(names)
        return "/".join(
            quote(next(given), safe="") if part.startswith("{") else part
            for part in path.split("/")
        )


@dataclass(frozen=True, slots=True)
class Section:
    """A heading of the reference. The paths of its operations start with `base`."""

    tag: str
    base: str

    def get(self, path: str, answer: type[A], summary: str, **about: Any) -> Operation[A]:
        return self._operation("GET", path, answer, summary, about)

    def post(self, path: str, answer: type[A], summary: str, **about: Any) -> Operation[A]:
        return self._operation("POST", path, answer, summary, about)

    def put(self, path: str, answer: type[A], summary: str, **about: Any) -> Operation[A]:
        return self._operation("PUT", path, answer, summary, about)

    def patch(self, path: str, answer: type[A], summary: str, **about: Any) -> Operation[A]:
        return self._operation("PATCH", path, answer, summary, about)

    def delete(self, path: str, answer: type[A], summary: str, **about: Any) -> Operation[A]:
        return self._operation("DELETE", path, answer, summary, about)

    def _operation(
        self, method: str, path: str, answer: type[A], summary: str, about: dict[str, Any]
    ) -> Operation[A]:
        about["also"] = tuple(self.base + further for further in about.get("also", ()))
        return Operation(method, self.base + path, answer, summary, tag=self.tag, **about)
