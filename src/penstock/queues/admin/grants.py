"""Grant roles of the database the use of the outbox: EXECUTE on its functions, and no more."""

from typing import Any

import asyncpg

from penstock.errors import InvalidRequest, NotFound

FUNCTIONS = ("outbox_push", "outbox_push_many", "outbox_ack")


async def change_grant(connection: Any, schema: str, role: str, verb: str) -> None:
    """Grant or revoke the use of the outbox; `verb` is grant or revoke."""
    to = "TO" if verb == "grant" else "FROM"
    in_schema, of_role = _quoted(schema), _quoted(role)
    functions = ", ".join(f"{in_schema}.{name}" for name in FUNCTIONS)
    try:
        async with connection.transaction():
            # a restored database has lost this; until somebody may use the schema it does no harm
            await connection.execute(f"REVOKE EXECUTE ON FUNCTION {functions} FROM PUBLIC")
            await connection.execute(f"{verb} EXECUTE ON FUNCTION {functions} {to} {of_role}")
            await connection.execute(f"{verb} USAGE ON SCHEMA {in_schema} {to} {of_role}")
    except asyncpg.UndefinedObjectError as error:
        raise NotFound(f"{error}: create it first (CREATE ROLE {of_role} LOGIN)") from None
    except (asyncpg.UndefinedFunctionError, asyncpg.InvalidSchemaNameError):
        raise NotFound(
            f"schema {in_schema} of this database does not have the outbox functions: "
            "start a broker of this release on it first"
        ) from None
    except asyncpg.InsufficientPrivilegeError as error:
        raise InvalidRequest(f"{error}: use the role that the brokers use") from None


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
