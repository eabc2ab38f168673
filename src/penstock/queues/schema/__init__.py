"""The SQL of queues: `migrations` make the tables, `functions` are what a release works on them
with, `queries` are what the admin modules ask.

Migrations only add things, so that the previous release still works (docs/how-to/upgrade.md).
"""

from penstock.database.migrate import SchemaFiles, sql_files

SCHEMA = SchemaFiles.read(__name__, identity="SELECT id FROM installation")
_QUERIES = dict(sql_files(__name__, "queries"))


def query(name: str) -> str:
    """Return the text of `queries/<name>.sql`."""
    return _QUERIES[f"queries/{name}.sql"]
