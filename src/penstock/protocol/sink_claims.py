"""What an exactly-once sink and a broker say to each other before a task's rows are written.

A sink's rows are known by (target, app, batch, task). A task claims that place with a checksum of
all its rows; the broker keeps the checksum as long as it keeps the identity, and answers whether
the rows may be written. See `penstock.topics.write_claims` for the rules.
"""

from typing import Annotated, Literal

import msgspec

Batch = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
Task = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Verdict = Literal["write", "wait", "other", "behind", "complete"]


class Claim(msgspec.Struct):
    """A sink task that asks to write its rows."""

    target: Text  # the topic or queue; "" when rows name their own
    app: Text  # the appId, and the query when there is one
    batch: Batch
    task: Task
    checksum: Text  # of the task's rows
    run: Text  # one attempt at the batch
    note: Text = ""  # kept with the first claim, and answered to those after it


class Claimed(msgspec.Struct):
    """`write`; `wait` for `tasks`; or rejected: `other` rows are written under this identity,
    the batch is `behind` the `newest` one, or it is `complete` and had no such task."""

    verdict: Verdict
    newest: int = 0
    note: str = ""
    tasks: list[int] = []


class Commit(msgspec.Struct):
    """A batch whose tasks have all written."""

    target: Text
    app: Text
    batch: Batch
