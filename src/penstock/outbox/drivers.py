"""Calls an SQL function on whatever connection the application has.

Every argument travels as text and is cast in the statement, so that all drivers send the same. A
connection is recognised by the package its class comes from; no driver is imported that the
application has not imported itself.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from penstock.errors import Conflict, Full, InvalidRequest, PenstockError

Argument = tuple[str, str | None]  # the type in SQL, and the value as text
DRIVERS = ("asyncpg", "psycopg", "sqlalchemy")
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
    """Whether a commit failed because the lease of a message it acknowledges was lost."""
    return isinstance(error, LeaseLost) or _sqlstate(error) == "PQ001"


async def fetch(connection: Any, schema: str, function: str, arguments: Sequence[Argument]) -> Any:
    """The answer of a function on an asynchronous connection."""
    driver = _driver(connection)
    if driver != "asyncpg" and not _is_async(connection):
        raise InvalidRequest(
            f"{type(connection).__name__} is a blocking connection: use penstock.outbox.sync"
        )
    _check_transaction(driver, connection)
    try:
        if driver == "asyncpg":
            sql, values = _statement(schema, function, arguments, "${}")
            return await connection.fetchval(sql, *values)
        if driver == "psycopg":
            sql, values = _statement(schema, function, arguments, "%s")
            async with connection.cursor(row_factory=_tuples()) as cursor:
                await cursor.execute(sql, values)
                return (await cursor.fetchone())[0]
        return (await connection.execute(*_text(schema, function, arguments))).scalar_one()
    except Exception as error:
        _raise_mapped(error)
        raise


def fetch_sync(connection: Any, schema: str, function: str, arguments: Sequence[Argument]) -> Any:
    """The answer of a function on a blocking connection."""
    driver = _driver(connection)
    if driver == "asyncpg" or _is_async(connection):
        raise InvalidRequest(
            f"{type(connection).__name__} is an asynchronous connection: use penstock.outbox"
        )
    _check_transaction(driver, connection)
    try:
        if driver == "psycopg":
            sql, values = _statement(schema, function, arguments, "%s")
            with connection.cursor(row_factory=_tuples()) as cursor:
                cursor.execute(sql, values)
                return cursor.fetchone()[0]
        return connection.execute(*_text(schema, function, arguments)).scalar_one()
    except Exception as error:
        _raise_mapped(error)
        raise


def _driver(connection: Any) -> str:
    for kind in type(connection).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in DRIVERS:
            return package
    raise InvalidRequest(
        f"{type(connection).__name__} is no connection of asyncpg, psycopg or SQLAlchemy: "
        "call the SQL function outbox_push or outbox_ack yourself"
    )


def _is_async(connection: Any) -> bool:
    return inspect.iscoroutinefunction(type(connection).execute)


def _check_transaction(driver: str, connection: Any) -> None:
    if driver == "asyncpg":
        alone = not connection.is_in_transaction()
    elif driver == "psycopg":
        alone = connection.autocommit and connection.info.transaction_status == IDLE
    else:
        alone = False  # SQLAlchemy begins one with the statement
    if alone:
        raise InvalidRequest(NO_TRANSACTION)


def _statement(
    schema: str, function: str, arguments: Sequence[Argument], mark: str
) -> tuple[str, list[str | None]]:
    marks = [
        f"{mark.format(number)}::text::{kind}" for number, (kind, _) in enumerate(arguments, 1)
    ]
    name = _quoted(schema).replace("%", "%%") if mark == "%s" else _quoted(schema)
    sql = f"SELECT {name}.{function}({', '.join(marks)})"
    return sql, [value for _, value in arguments]


def _text(
    schema: str, function: str, arguments: Sequence[Argument]
) -> tuple[Any, dict[str, str | None]]:
    from sqlalchemy import text

    marks = [
        f"CAST(CAST(:a{number} AS text) AS {kind})" for number, (kind, _) in enumerate(arguments)
    ]
    name = _quoted(schema).replace(":", "\\:")
    return text(f"SELECT {name}.{function}({', '.join(marks)})"), {
        f"a{number}": value for number, (_, value) in enumerate(arguments)
    }


def _tuples() -> Any:
    """The application may have asked for rows of another kind."""
    from psycopg.rows import tuple_row

    return tuple_row


def _quoted(schema: str) -> str:
    return '"' + schema.replace('"', '""') + '"'


def _raise_mapped(error: Exception) -> None:
    kind = ERRORS.get(_sqlstate(error) or "")
    if kind is not None:
        cause = getattr(error, "orig", None) or error
        raise kind(str(cause).strip()) from error


def _sqlstate(error: BaseException) -> str | None:
    """What PostgreSQL calls an error; SQLAlchemy and its adapters wrap those of the driver."""
    seen: BaseException | None = error
    while seen is not None:
        state = getattr(seen, "sqlstate", None) or getattr(seen, "pgcode", None)
        if isinstance(state, str):
            return state
        seen = getattr(seen, "orig", None) or seen.__cause__
    return None
