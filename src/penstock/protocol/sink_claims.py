"""The messages between an exactly-once sink and a broker about the rows of a task.

The rows are identified by (target, app, batch, task). Before a task writes its first row, it claims
this place with checksums of all its rows. The broker records when the task has written the last
one. `penstock.topics.write_claims` has the rules.
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
    app: Text  # the appId, and the query if there is one
    batch: Batch
    task: Task
    checksum: Text  # of the task's rows
    run: Text  # one attempt at the batch
    note: Text = ""  # stored with the first claim; later claims get it as their answer
    keys: Text = ""  # checksum of the columns that identify the rows; "": all columns


class Claimed(msgspec.Struct):
    """The answer to a claim.

    The verdict is one of: `write` the rows from number `rows` on; all rows are `done`; try again
    `later`, after `tasks`; rejected, since the place has `other` rows; rejected, since the batch is
    `behind` the `newest` one.
    """

    verdict: Verdict
    newest: int = 0
    note: str = ""
    tasks: list[int] = []  # that wrote in an earlier run and have not claimed in this one
    rows: int = 0  # of the task, in a queue already


class Commit(msgspec.Struct):
    """A report that a task has written all its rows, or that all tasks of a batch have."""

    target: Text
    app: Text
    batch: Batch
    task: Task | None = None  # None: the batch
