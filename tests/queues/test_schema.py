"""The SQL files: what people run with psql is what the broker runs."""

import re

import asyncpg

from penstock.database.migrate import migrate, sql_files
from penstock.queues import Queues
from penstock.queues.admin.dead_letters import Which
from penstock.queues.schema import SCHEMA
from tests.queues.support import answer, pop, push

HIGHEST = re.compile(r"\$(\d+)")
# Called from Python or by pipelines: the planner must not depend on the session. (In the language
# SQL such a clause would keep the function from being inlined; the others run within these.)
ENTRY_POINTS = ("append", "take", "settle", "queue_mirror", "queue_trim", "queue_heal")


async def test_every_query_says_what_it_is_and_takes_the_parameters_it_names(
    database_url: str,
) -> None:
    connection = await asyncpg.connect(
        database_url, server_settings={"search_path": SCHEMA.search_path("penstock")}
    )
    for name, text in sql_files("penstock.queues.schema", "queries"):
        header = "".join(line for line in text.splitlines() if line.startswith("--"))
        assert text.startswith(f"-- {name.removeprefix('queries/').removesuffix('.sql')}: ")
        statement = await connection.prepare(text)
        count = len(statement.get_parameters())
        assert count == max(map(int, HIGHEST.findall(text.replace(header, ""))), default=0)
        assert count == 0 or "$" in header or " as in " in header, name
    await connection.close()


def test_hot_functions_bring_their_planner_settings() -> None:
    texts = {name.split("/")[1]: text for name, text in SCHEMA.functions}
    for name in ENTRY_POINTS:
        assert "SET enable_seqscan = off" in texts[f"{name}.sql"], name


async def test_dead_letters_from_before_they_were_counted_are_counted_by_the_migration(
    database_url: str, queues: Queues
) -> None:
    for group in ("a", "b"):
        await push(queues, "q", 1, 2)
        await answer(queues, (await pop(queues, "q", group=group)).messages, "dlq")
    before = await queues.figures.queues()
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        """SET search_path TO penstock;
               DROP FUNCTION dead_letters_counted() CASCADE;
               DROP TABLE letter_log;
               ALTER TABLE tallies DROP COLUMN letters;
               DELETE FROM schema_files WHERE name LIKE '%dead_letter_counts%'"""
    )
    await migrate(connection, "penstock", SCHEMA)
    await connection.close()
    assert await queues.figures.queues() == before
    assert [before[0].dead_letters, *(one.dead_letters for one in before[0].groups)] == [
        6,
        2,
        4,
    ]
    assert await queues.dead.purge(Which(group="b")) == 4
    (after,) = await queues.figures.queues()
    assert [after.dead_letters, *(one.dead_letters for one in after.groups)] == [2, 2, 0]
