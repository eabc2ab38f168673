"""Call the SQL functions that store and deliver messages. No other module on this path has SQL.

Each class is the argument list of a function in `schema/functions`: a field per argument, without
the prefix `p_`. The function's file documents them. Arguments and columns are passed by name, so
their order may change.

A commit is one statement: a push that takes for waiting pops calls `append`, then `take`; a
consumer's request calls `settle`, then `take`. The functions are independent of each other.
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any, NamedTuple
from uuid import UUID

from penstock.database import Database

Row = Any  # asyncpg.Record, whose columns are read by name
Fetch = Callable[..., Awaitable[list[Any]]]  # of the pool, or of a transaction's connection


class AppendArguments(NamedTuple):
    ids: list[int]
    starts: list[int]
    transactions: str  # the text of an array: the driver encodes it several times faster
    checked: bool
    traces: list[UUID | None] | None
    producers: list[str | None] | None
    keys: list[str | None] | None
    payloads: bytes
    payload_bounds: str  # the text of an array
    headers: bytes | None
    header_bounds: str | None  # the text of an array
    due_ats: list[datetime | None] | None
    delays: list[float | None] | None


class TakeArguments(NamedTuple):
    groups: list[int]
    batches: list[int]
    leases: list[UUID]
    since: list[datetime | None]
    partitions: list[int | None] | None
    spans: list[int] | None
    max_bytes: int
    hand_off: bool = False


class SettleArguments(NamedTuple):
    starts: list[int]
    partitions: list[int]
    groups: list[str]
    leases: list[UUID | None]
    statuses: Sequence[str] | None
    errors: Sequence[str | None] | None
    transactions: list[str]
    group_ids: Sequence[int | None] | None
    versions: Sequence[int | None] | None
    lasts: Sequence[int | None] | None
    times: list[float | None] | None
    delays: Sequence[float | None] | None
    limits: Sequence[int | None] | None


class AppendedRow(NamedTuple):
    """The row that `append` returns."""

    seqs: list[Any]  # int or None
    statuses: list[str] | None
    due_ats: list[datetime | None] | None


# Casts of arguments that are the text of an array
ARRAY_TEXTS = {
    (AppendArguments, "transactions"): "::text::text[]",
    (AppendArguments, "payload_bounds"): "::text::int[]",
    (AppendArguments, "header_bounds"): "::text::int[]",
}


def _call(function: str, arguments: type[Any], first: int = 1) -> str:
    """Return the SQL of a call whose parameters begin with number `first`."""
    named = (
        f"p_{name} => ${number}{ARRAY_TEXTS.get((arguments, name), '')}"
        for number, name in enumerate(arguments._fields, first)
    )
    return f"{function}({', '.join(named)})"


_AFTER_APPEND = 1 + len(AppendArguments._fields)
_AFTER_SETTLE = 1 + len(SettleArguments._fields)
APPEND = f"SELECT * FROM {_call('append', AppendArguments)}"
TAKE = f"SELECT * FROM {_call('take', TakeArguments)}"
SETTLE = f"SELECT * FROM {_call('settle', SettleArguments)}"
# The second call depends on the result of the first one, so PostgreSQL runs them in this order.
APPEND_AND_TAKE = f"""
    WITH appended AS MATERIALIZED (SELECT * FROM {_call("append", AppendArguments)})
    SELECT a.*, ARRAY(SELECT t FROM {_call("take", TakeArguments, _AFTER_APPEND)} t
                       WHERE a.seqs IS NOT NULL) AS taken
      FROM appended a"""
SETTLE_AND_TAKE = f"""
    WITH done AS MATERIALIZED (
      SELECT ARRAY(SELECT s FROM {_call("settle", SettleArguments)} s) AS settled)
    SELECT d.settled, ARRAY(SELECT t FROM {_call("take", TakeArguments, _AFTER_SETTLE)} t
                             WHERE d.settled IS NOT NULL) AS taken
      FROM done d"""


def joined(values: list[bytes]) -> tuple[bytes, str]:
    """Return values as arguments of `append`: their bytes, and their bounds as an array's text."""
    bounds = list(accumulate(map(len, values), initial=1))
    return b"".join(values), f"{{{str(bounds)[1:-1]}}}"


def array_text(values: list[str]) -> str:
    """Return values, which contain no NUL, as the text of an array."""
    text = "\0".join(values)
    if '"' in text or "\\" in text:
        text = text.replace("\\", "\\\\").replace('"', '\\"')
    return '{"' + text.replace("\0", '","') + '"}'


class Calls:
    """The functions, called through a pool of connections."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def append(self, items: AppendArguments, fetch: Fetch | None = None) -> AppendedRow:
        """Store messages, through `fetch` if they are part of a transaction."""
        [row] = await (fetch or self._database.fetch)(APPEND, *items)
        return AppendedRow(row["seqs"], row["statuses"], row["due_ats"])

    async def append_and_take(
        self, items: AppendArguments, pops: TakeArguments
    ) -> tuple[AppendedRow, list[Row]]:
        """Store messages, then take for pops, in one commit. Return the rows of both."""
        [row] = await self._database.fetch(APPEND_AND_TAKE, *items, *pops)
        return AppendedRow(row["seqs"], row["statuses"], row["due_ats"]), row["taken"]

    async def settle(self, runs: SettleArguments, fetch: Fetch | None = None) -> list[Row]:
        """Record outcomes, through `fetch` in a transaction. Return rows of type `settled`."""
        return await (fetch or self._database.fetch)(SETTLE, *runs)

    async def settle_and_take(
        self, runs: SettleArguments | None, pops: TakeArguments | None
    ) -> tuple[list[Row], list[Row]]:
        """Record outcomes, then take for pops, in one commit. Return the rows of both."""
        if pops is None:
            return [] if runs is None else await self.settle(runs), []
        if runs is None:
            return [], await self._database.fetch(TAKE, *pops)
        [row] = await self._database.fetch(SETTLE_AND_TAKE, *runs, *pops)
        return row["settled"], row["taken"]

    async def release(self, leases: list[UUID]) -> int:
        """End leases without counting an attempt. Return how many ended."""
        return len(await self._database.fetch("SELECT queue_release($1, false)", leases))

    async def complete(self, leases: list[UUID]) -> None:
        """End leases and complete their messages."""
        await self._database.fetch("SELECT queue_release($1, true)", leases)

    async def leases_between(self, first: UUID, last: UUID) -> list[UUID]:
        rows = await self._database.fetch(
            "SELECT DISTINCT lease_id FROM leases WHERE lease_id BETWEEN $1 AND $2", first, last
        )
        return [row["lease_id"] for row in rows]

    async def extend(self, lease: UUID, seconds: int) -> Row:
        """Extend a lease (idempotent). Return a row with `outcome` and `expires_at`."""
        [row] = await self._database.read("SELECT * FROM queue_extend($1, $2)", lease, seconds)
        return row

    async def subscribe(
        self, queue_id: int, group: str, partition: int | None, mode: str, start: datetime | None
    ) -> int | None:
        """Create a group if needed, fix its start, and return its id; None: the queue is gone."""
        [row] = await self._database.read(
            "SELECT queue_subscribe($1, $2, $3, $4, $5) AS id",
            *(queue_id, group, partition, mode, start),
        )
        number: int | None = row["id"]
        return number

    async def lock(
        self, fetch: Fetch, pushed: list[int], acked: list[int | None], groups: list[str]
    ) -> None:
        """Lock everything that a transaction will change, in the order that all follow."""
        await fetch("SELECT queue_lock($1, $2, $3)", pushed, acked, groups)

    async def live_leases(self, fetch: Fetch, leases: list[UUID]) -> set[UUID]:
        """Return the unexpired leases, locked until the transaction ends."""
        rows = await fetch(
            """SELECT lease_id FROM leases
                WHERE lease_id = ANY ($1) AND expires_at > clock_timestamp() FOR SHARE""",
            leases,
        )
        return {row["lease_id"] for row in rows}
