"""Convert rows of a query to structs. Each column fills the field of the same name."""

from typing import Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)


def struct_of(kind: type[S], row: Any, **others: Any) -> S:
    """Return the struct of a row. `others` has the fields that are not taken from columns."""
    columns = {name: row[name] for name in kind.__struct_fields__ if name not in others}
    return kind(**columns, **others)
