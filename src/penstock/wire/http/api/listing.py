"""Lists that the server filters, sorts and cuts: the same query for all of them."""

from typing import TypeVar

import msgspec

from penstock.contract.queries import ListQuery
from penstock.errors import InvalidRequest

MAX_ROWS = 10_000
R = TypeVar("R", bound=msgspec.Struct)


def page_of(rows: list[R], query: ListQuery) -> tuple[list[R], int]:
    """Filtered by name, sorted (unknown last), and cut; and how many there are in all."""
    words = query.filter.lower()
    matching = [row for row in rows if words in _name(row).lower()]
    name = query.sort.removeprefix("-") or "name"
    fields = {
        field.encode_name: field.name for row in rows[:1] for field in msgspec.structs.fields(row)
    }
    if rows and name not in fields:
        raise InvalidRequest(
            f"sort: unknown field {name[:60]!r}; the fields are {', '.join(sorted(fields))} (with -"
            " before it: largest first)"
        )
    field = fields.get(name, name)
    unknown = [row for row in matching if getattr(row, field) is None]
    sorted_rows = [row for row in matching if getattr(row, field) is not None]
    sorted_rows.sort(key=_name)
    sorted_rows.sort(key=lambda row: getattr(row, field), reverse=query.sort.startswith("-"))
    begin, limit = max(0, query.offset), min(max(1, query.limit), MAX_ROWS)
    return (sorted_rows + unknown)[begin : begin + limit], len(matching)


def _name(row: msgspec.Struct) -> str:
    return str(row.name)  # type: ignore[attr-defined]
