"""Call an SQL function on the connection of the application.

All drivers send every argument as text, and the statement casts it. The package of a connection's
class determines the driver. Only drivers that the application has imported are imported.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.errors import Conflict, Full, InvalidRequest, PenstockError

Argument = tuple[str, str | None]  # the type in SQL, and the value as text
MARKS = {"asyncpg": "${}", "psycopg": "%s", "sqlalchemy": ":a{}"}  # argument placeholders by driver
IDLE = 0  # psycopg's TransactionStatus: no transaction is open
NO_TRANSACTION = (
    "the outbox needs an open transaction: without one the message would be committed alone "
    "(asyncpg: `async with connection.transaction()`; psycopg: autocommit off)"
)


class LeaseLost(Conflict):
    """The message's lease is lost: another consumer has the message or will get it. Roll back."""


ERRORS: dict[str, type[PenstockError]] = {
    "PQ001": LeaseLost,
    "PQ002": Full,
    "PQ003": InvalidRequest,  # the queue is encrypted
    "22023": InvalidRequest,  # invalid_parameter_value
    "0A000": InvalidRequest,  # feature_not_supported: the isolation level
}


def is_lease_lost(error: BaseException) -> bool:
    """Return whether a commit failed because the lease of an acknowledged message was lost."""
    return isinstance(error, LeaseLost) or _sqlstate(error) == "PQ001"


async def fetch(connection: Any, schema: str, function: str, arguments: Sequence[Argument]) -> Any:
    """Return the answer of a function on an asynchronous connection."""
    driver = _driver(connection, blocking=False)
    sql, values = _statement(driver, schema, function, arguments)
    with _errors():
        if driver == "asyncpg":
            return await connection.fetchval(sql, *values)
        if driver == "psycopg":
            async with connection.cursor(row_factory=_tuples()) as cursor:
                await cursor.execute(sql, values)
                return (await cursor.fetchone())[0]
        return (await connection.execute(*_text(sql, values))).scalar_one()


def fetch_sync(connection: Any, schema: str, function: str, arguments: Sequence[Argument]) -> Any:
    """Return the answer of a function on a blocking connection."""
    driver = _driver(connection, blocking=True)
    sql, values = _statement(driver, schema, function, arguments)
    with _errors():
        if driver == "psycopg":
            with connection.cursor(row_factory=_tuples()) as cursor:
                cursor.execute(sql, values)
                return cursor.fetchone()[0]
        return connection.execute(*_text(sql, values)).scalar_one()


def _driver(connection: Any, *, blocking: bool) -> str:
    """Return the driver of a connection. Refuse the wrong kind, or one without a transaction."""
    name = type(connection).__name__
    packages = (kind.__module__.partition(".")[0] for kind in type(connection).__mro__)
    driver = next((package for package in packages if package in MARKS), None)
    if driver is None:
        raise InvalidRequest(
            f"{name} is not a connection of asyncpg, psycopg or SQLAlchemy: "
            "call the SQL function outbox_push or outbox_ack yourself"
        )
    waits = driver == "asyncpg" or inspect.iscoroutinefunction(type(connection).execute)
    if blocking and waits:
        raise InvalidRequest(f"{name} is an asynchronous connection: use penstock.outbox")
    if not blocking and not waits:
        raise InvalidRequest(f"{name} is a blocking connection: use penstock.outbox.sync")
    if driver == "asyncpg":
        alone = not connection.is_in_transaction()
    elif driver == "psycopg":
        alone = connection.autocommit and connection.info.transaction_status == IDLE
    else:
        alone = False  # SQLAlchemy begins a transaction with the statement
    if alone:
        raise InvalidRequest(NO_TRANSACTION)
    return driver


def _statement(
    driver: str, schema: str, function: str, arguments: Sequence[Argument]
) -> tuple[str, list[str | None]]:
    marks = [
        f"CAST(CAST({MARKS[driver].format(number)} AS text) AS {kind})"
        for number, (kind, _) in enumerate(arguments, 1)
    ]
    name = '"' + schema.replace('"', '""') + '"'
    if driver == "psycopg":
        name = name.replace("%", "%%")
    elif driver == "sqlalchemy":
        name = name.replace(":", "\\:")
    return f"SELECT {name}.{function}({', '.join(marks)})", [value for _, value in arguments]


def _text(sql: str, values: list[str | None]) -> tuple[Any, dict[str, str | None]]:
    from sqlalchemy import text

    return text(sql), {f"a{number}": value for number, value in enumerate(values, 1)}


def _tuples() -> Any:
    """Return the row factory for tuples: the application may have set another default."""
    from psycopg.rows import tuple_row

    return tuple_row


@contextmanager
def _errors() -> Iterator[None]:
    """Translate errors of the outbox's functions into ours."""
    try:
        yield
    except Exception as error:
        kind = ERRORS.get(_sqlstate(error) or "")
        if kind is None:
            raise
        cause = getattr(error, "orig", None) or error
        raise kind(str(cause).strip()) from error


def _sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error, also of one that SQLAlchemy has wrapped."""
    seen: BaseException | None = error
    while seen is not None:
        state = getattr(seen, "sqlstate", None) or getattr(seen, "pgcode", None)
        if isinstance(state, str):
            return state
        seen = getattr(seen, "orig", None) or seen.__cause__
    return None
