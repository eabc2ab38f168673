"""Requests that carry many items: how many are too many, and working through them without keeping
others waiting.

Everything runs on one event loop, so a request with a million items would hold up all others for
seconds. Above `queues.max_items` it is refused, and the refusal is cheap: the items of a body that
is large enough are counted before it is decoded, and counting stops at the limit. What is allowed
is worked through in slices.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from penstock.errors import TooLarge
from penstock.io import tasks
from penstock.protocol.status import NOT_JSON

T = TypeVar("T")
SLICE = 1000  # items handled before others get a turn: a few milliseconds
SMALLEST = 12  # bytes of an item in a body: {"type":""} and a comma; less ends the decoding


class ItemLimit:
    """At most so many items in one request."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._counted = 0
        self._decode = msgspec.json.Decoder(_body_of(self._count)).decode

    def check_body(self, body: bytes) -> None:
        """Raise when there are too many items in a body that is still to be decoded, and is worth
        the look.
        """
        if len(body) <= self.most * SMALLEST or body.count(b"{") <= self.most:
            return
        self._counted = 0
        try:
            self._decode(body)
        except NOT_JSON:
            return  # whoever decodes it says what is wrong

    def check(self, count: int) -> None:
        if count > self.most:
            raise TooLarge(
                f"too many items in one request: at most {self.most} (queues.max_items). "
                "Send them in several requests"
            )

    def _count(self) -> None:
        self._counted += 1
        if self._counted > self.most:
            self.check(self._counted)


def _body_of(count: Callable[[], None]) -> Any:
    """Return a type that counts items: `items` of a push, `acknowledgments`, `operations` and
    their `items`.
    """

    def counted(_: Any) -> None:
        count()

    item = msgspec.defstruct("Item", [], namespace={"__post_init__": counted})
    inner = ("items", list[item] | None, None)  # type: ignore[valid-type]
    operation = msgspec.defstruct("Operation", [inner], namespace={"__post_init__": counted})
    lists = [(name, list[item] | None, None) for name in ("items", "acknowledgments")]  # type: ignore[valid-type]
    return msgspec.defstruct("Body", [*lists, ("operations", list[operation] | None, None)])  # type: ignore[valid-type]


def slices(items: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """Yield the items, some at a time, and let other tasks run in between."""
    return tasks.slices(items, SLICE)
