"""Query parameters of operations: pages, times and filters."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec

from penstock.errors import InvalidRequest
from penstock.protocol.times import time_field

# the database reads and drops all rows before a page, so far pages need another way
MAX_OFFSET = 10_000
MAX_ROWS = 10_000  # in one page of a list that the broker sorts
BUCKETS = {"minute": timedelta(minutes=1), "hour": timedelta(hours=1), "day": timedelta(days=1)}

R = TypeVar("R", bound=msgspec.Struct)

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

    def page(self, rows: list[R]) -> tuple[list[R], int]:
        """Return the rows whose names match, sorted (unknown values last) and cut, and how many
        match.
        """
        words = self.filter.lower()
        matching = [row for row in rows if words in _name(row).lower()]
        name = self.sort.removeprefix("-") or "name"
        fields = {
            field.encode_name: field.name
            for row in rows[:1]
            for field in msgspec.structs.fields(row)
        }
        if rows and name not in fields:
            raise InvalidRequest(
                f"sort: unknown field {name[:60]!r}; the fields are {', '.join(sorted(fields))}"
                " (with - before it: largest first)"
            )
        field = fields.get(name, name)
        unknown = [row for row in matching if getattr(row, field) is None]
        sorted_rows = [row for row in matching if getattr(row, field) is not None]
        sorted_rows.sort(key=_name)
        sorted_rows.sort(key=lambda row: getattr(row, field), reverse=self.sort.startswith("-"))
        begin, limit = max(0, self.offset), min(max(1, self.limit), MAX_ROWS)
        return (sorted_rows + unknown)[begin : begin + limit], len(matching)


def _name(row: msgspec.Struct) -> str:
    return str(row.name)  # type: ignore[attr-defined]


class QueueListQuery(ListQuery):
    recent: bool = False


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
