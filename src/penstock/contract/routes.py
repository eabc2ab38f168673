"""Export routes."""

import msgspec


class RoutePushed(msgspec.Struct):
    """The result of pushing records to a route."""

    accepted: int
    dropped: int
