"""PostgreSQL: the embedded server, the connection pool and its health, schema migrations."""

from penstock.database.database import Database
from penstock.database.migrate import SchemaFiles
from penstock.database.rows import struct_of

__all__ = ["Database", "SchemaFiles", "struct_of"]
