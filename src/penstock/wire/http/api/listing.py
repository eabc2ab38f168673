"""Lists that the server filters, sorts and cuts: the same query for all of them."""

from typing import Any, TypeVar

import msgspec

from penstock.errors import InvalidRequest

MAX_ROWS = 500
Row = TypeVar("Row", bound=msgspec.Struct)


class ListQuery(msgspec.Struct):
    filter: str = ""  # part of the name
    sort: str = ""  # a field; with `-` before it the largest first
    limit: int = 50
    offset: int = 0


def page_of(rows: list[Row], query: ListQuery, default: str = "name") -> tuple[list[Row], int]:
    """Filtered by name, sorted (unknown last), and cut; and how many there are in all."""
    words = query.filter.lower()
    matching = [row for row in rows if words in _field(row, "name").lower()]
    name = query.sort.removeprefix("-") or default
    fields = {
        field.encode_name: field.name for row in rows[:1] for field in msgspec.structs.fields(row)
    }
    if rows and name not in fields:
        raise InvalidRequest(
            f"sort: there is no {name[:60]!r}, only {', '.join(sorted(fields))} (and -... for the"
            " largest first)"
        )
    field = fields.get(name, name)
    unknown = [row for row in matching if _field(row, field) is None]
    sorted_rows = [row for row in matching if _field(row, field) is not None]
    sorted_rows.sort(key=lambda row: str(_field(row, "name")))
    sorted_rows.sort(key=lambda row: _field(row, field), reverse=query.sort.startswith("-"))
    begin, limit = max(0, query.offset), min(max(1, query.limit), MAX_ROWS)
    return (sorted_rows + unknown)[begin : begin + limit], len(matching)


def _field(row: msgspec.Struct, name: str) -> Any:
    return getattr(row, name)
