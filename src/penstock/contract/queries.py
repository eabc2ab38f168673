"""Query parameters of operations: pages, times and filters."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_origin

import msgspec

from penstock.errors import InvalidRequest
from penstock.protocol.times import time_field

# the database reads and drops all rows before a page, so far pages need another way
MAX_OFFSET = 10_000
MAX_ROWS = 10_000  # in one page of a list that the broker sorts
BUCKETS = {"minute": timedelta(minutes=1), "hour": timedelta(hours=1), "day": timedelta(days=1)}

R = TypeVar("R")
S = TypeVar("S", bound=msgspec.Struct)

Limit = Annotated[int, msgspec.Meta(ge=0, le=10_000)]
Offset = Annotated[
    int, msgspec.Meta(ge=0, description=f"number of entries to skip, at most {MAX_OFFSET}")
]


def check_offset(offset: int, farther: str) -> None:
    """Refuse a large offset. `farther` says what to do instead."""
    if offset > MAX_OFFSET:
        raise ValueError(f"offset must be at most {MAX_OFFSET}, not {offset}: {farther}")


class Paged(msgspec.Struct, frozen=True):
    """The query of a listing with `limit` and `offset`."""

    offset: Offset = 0

    farther: ClassVar[str]

    def __post_init__(self) -> None:
        check_offset(self.offset, self.farther)


class TimesQuery(msgspec.Struct, frozen=True, kw_only=True):
    from_: str | None = msgspec.field(name="from", default=None)
    to: str | None = None

    @property
    def since(self) -> datetime | None:
        return time_field(self.from_, "from") if self.from_ else None

    @property
    def until(self) -> datetime | None:
        return time_field(self.to, "to") if self.to else None

    def range(self, default: timedelta) -> tuple[datetime, datetime]:
        until = self.until or datetime.now(UTC)
        return self.since or until - default, until


class RangeQuery(TimesQuery, frozen=True):
    queue: str | None = None
    namespace: str | None = None
    task: str | None = None
    interval: Literal["minute", "hour", "day"] = "hour"


class LaggingQuery(msgspec.Struct, rename="camel", frozen=True):
    min_lag_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 3600.0


class GroupListQuery(msgspec.Struct, rename="camel", frozen=True):
    """The next page begins after the queue and the group that end this one."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 10_000
    queue: str | None = None
    after_queue: str = ""
    after_group: str = ""


class TopicGroupListQuery(msgspec.Struct, rename="camel", frozen=True):
    """The next page begins after the topic and the group that end this one."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    after_topic: str = ""
    after_group: str = ""


class GroupPage(Paged, frozen=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 10_000

    farther: ClassVar[str] = (
        "partitions that are behind are listed by GET /api/v1/consumer-groups/lagging"
    )


class DeleteGroupQuery(msgspec.Struct, rename="camel", frozen=True):
    delete_metadata: bool = True


class SeekBody(msgspec.Struct, rename="camel"):
    to_end: bool = False
    to_beginning: bool = False
    timestamp: str | None = None
    dry_run: bool = False

    texts: ClassVar[dict[str, str]] = {}


class DeadLetterQuery(TimesQuery, rename="camel", frozen=True):
    queue: str | None = None
    consumer_group: str | None = None
    partition: str | None = None
    id: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    error: str | None = None  # part of the error's text


class DeadLetterPageQuery(DeadLetterQuery, frozen=True):
    limit: Limit = 100
    before: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    offset: Offset = 0

    def __post_init__(self) -> None:
        check_offset(self.offset, "read on with before=<number of the last one>")


class ConsumersQuery(msgspec.Struct, frozen=True):
    queue: str | None = None
    group: str | None = None


class ScheduledQuery(msgspec.Struct, frozen=True):
    queue: str | None = None
    partition: str | None = None
    limit: Limit = 100
    cursor: str | None = None


class ForceQuery(msgspec.Struct, frozen=True):
    force: bool = False


class LimitQuery(msgspec.Struct, frozen=True):
    limit: Limit = 100


class RouteDeadLettersQuery(LimitQuery, frozen=True):
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0


class ClearQuery(msgspec.Struct, frozen=True):
    partition: str | None = None


class MessagesQuery(TimesQuery, frozen=True):
    queue: str | None = None
    partition: str | None = None
    ns: str | None = None
    task: str | None = None
    status: (
        Literal["waiting", "leased", "pending", "processing", "completed", "dead_letter", ""] | None
    ) = None
    limit: Limit = 200
    cursor: str | None = None
    offset: Offset = 0

    def __post_init__(self) -> None:
        farther = "read on with cursor=<next of the page before>, or narrow it with from and to"
        check_offset(self.offset, farther)


class GroupQuery(msgspec.Struct, rename="camel", frozen=True):
    consumer_group: str | None = None


class ListQuery(msgspec.Struct):
    """The query of a list that the broker filters, sorts and cuts."""

    filter: str = ""  # part of the name
    sort: str = ""  # a field; with `-` before it the largest first
    limit: int = 50
    offset: int = 0

    def page(self, rows: list[S]) -> tuple[list[S], int]:
        """Return the rows whose names match, sorted (unknown values last) and cut, and how many
        match.
        """
        if not rows:
            return [], 0
        matching = self.arrange(rows, attrgetter("name"), attrgetter(self.field_of(type(rows[0]))))
        return self.cut(matching), len(matching)

    def field_of(self, kind: type[msgspec.Struct]) -> str:
        """Return the attribute of `kind` by which `sort` sorts."""
        name = self.sort.removeprefix("-") or "name"
        fields = {
            field.encode_name: field.name
            for field in msgspec.structs.fields(kind)
            if get_origin(field.type) is not list
        }
        if name not in fields:
            raise InvalidRequest(
                f"sort: unknown field {name[:60]!r}; the fields are {', '.join(sorted(fields))}"
                " (with - before it: largest first)"
            )
        return fields[name]

    def arrange(
        self, rows: Iterable[R], name: Callable[[R], str], value: Callable[[R], Any]
    ) -> list[R]:
        """Return the rows whose names match, sorted by a value; unknown values are last."""
        words = self.filter.lower()
        matching = sorted((row for row in rows if words in name(row).lower()), key=name)
        known = [row for row in matching if value(row) is not None]
        unknown = [row for row in matching if value(row) is None]
        return sorted(known, key=value, reverse=self.descending) + unknown

    @property
    def descending(self) -> bool:
        return self.sort.startswith("-")

    @property
    def bounds(self) -> tuple[int, int]:
        """Return how many rows the page has at most, and how many are before it."""
        return min(max(1, self.limit), MAX_ROWS), min(max(0, self.offset), 1 << 31)

    def cut(self, rows: list[R]) -> list[R]:
        limit, offset = self.bounds
        return rows[offset : offset + limit]


class QueueListQuery(ListQuery):
    recent: bool = False
    cursor: str | None = None


class RecentQuery(msgspec.Struct):
    recent: bool = False


class QueuePartitionsQuery(msgspec.Struct, frozen=True):
    group: str = ""  # "": consumers without a group
    filter: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=500)] = 50
    offset: Offset = 0


class AuditQuery(msgspec.Struct, frozen=True):
    filter: str = ""  # part of who, action or object
    before: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
