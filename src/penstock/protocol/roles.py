"""The roles that tokens grant and requests need."""

from enum import IntEnum


class Role(IntEnum):
    """Levels, each of which includes those below it. `PUBLIC` needs no token."""

    PUBLIC = 0
    READ_ONLY = 1
    READ_WRITE = 2
    ADMIN = 3

    @property
    def title(self) -> str:
        return self.name.lower().replace("_", "-")
