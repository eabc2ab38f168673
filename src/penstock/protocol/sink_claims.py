"""What an exactly-once sink and a broker say to each other about a task's rows.

A sink's rows are known by (target, app, batch, task). A task claims that place with checksums of
all its rows before it writes the first one, and the broker records when the task has written the
last one. See `penstock.topics.write_claims` for the rules.
"""

from typing import Annotated, Literal

import msgspec

Batch = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
Task = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Row = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
Verdict = Literal["write", "done", "later", "other", "behind"]


class Claim(msgspec.Struct):
    """A sink task that asks to write its rows."""

    target: Text  # the topic or queue; "" when rows name their own
    app: Text  # the appId, and the query when there is one
    batch: Batch
    task: Task
    checksum: Text  # of the task's rows
    run: Text  # one attempt at the batch
    note: Text = ""  # kept with the first claim, and answered to those after it
    keys: Text = ""  # checksum of what identifies the rows; "": all of them does


class Claimed(msgspec.Struct):
    """`write` the rows from number `rows` on; all rows are `done`; `later`, after `tasks`; or
    rejected: the place has `other` rows, or the batch is `behind` the `newest` one."""

    verdict: Verdict
    newest: int = 0
    note: str = ""
    tasks: list[int] = []  # that wrote in an earlier run and have not claimed in this one
    rows: int = 0  # of the task, in a queue already


class Commit(msgspec.Struct):
    """A task that has written all its rows, or a batch whose tasks all have."""

    target: Text
    app: Text
    batch: Batch
    task: Task | None = None  # None: the batch
