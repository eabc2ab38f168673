"""The SQL of queues: `migrations` make the tables, `functions` are what a release works on them
with, `queries` are what the admin modules ask.

docs/operations.md (Upgrades) has the rule that migrations follow: additive, so that the release
before still works on the tables.
"""

from penstock.database import SchemaFiles

SCHEMA = SchemaFiles.read(__name__)
