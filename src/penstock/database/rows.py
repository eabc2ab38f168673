"""Rows of a query as structs: a column fills the field of its name."""

from typing import Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)


def struct_of(kind: type[S], row: Any, **others: Any) -> S:
    """The struct of a row; `others` are the fields that are not columns, or not as they are."""
    columns = {name: row[name] for name in kind.__struct_fields__ if name not in others}
    return kind(**columns, **others)
