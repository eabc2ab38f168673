"""Backups of shared topics: what is in the database and what is in object storage fit together."""

import asyncio
import subprocess
from functools import partial
from pathlib import Path

import asyncpg
import pytest

from penstock.backup.dump import Dump, load
from penstock.database.embedded import BINARIES, EmbeddedPostgres
from penstock.errors import Unavailable
from tests.backup.test_backup import penstock
from tests.conftest import fresh_database
from tests.support.wait import eventually
from tests.topics.shared.conftest import database_url  # noqa: F401 - a fixture
from tests.topics.shared.test_log import values
from tests.topics.shared.test_mover import execute, moving, objects, rows


def environment(url: str, directory: Path, tier: Path) -> dict[str, str]:
    return {
        "PENSTOCK_DATABASE_URL": url,
        "PENSTOCK_DATA_DIRECTORY": str(directory),
        "PENSTOCK_TOPICS_SHARED_TIER": f"file://{tier}",
    }


async def run(*words: str, code: int = 0, **env: str) -> str:
    """Run a command in a thread: the broker of the test is in this process."""
    return await asyncio.to_thread(partial(penstock, *words, code=code, **env))


async def test_a_backup_under_appends_and_moves_restores_all_that_was_answered(
    postgres: EmbeddedPostgres,
    database_url: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    source = environment(database_url, tmp_path / "none", tmp_path / "tier")
    async with moving(database_url, tmp_path / "tier") as topics:
        log = await topics.create("orders", 1)
        stop = asyncio.Event()
        answered = 0

        async def append() -> None:
            nonlocal answered
            while not stop.is_set():
                await log.append([b"%d" % answered])
                answered += 1

        async def move() -> None:
            while not stop.is_set():
                await topics.mover.step()

        await log.append([b"%d" % n for n in range(1000)])
        answered = 1000
        await topics.mover.step()
        tasks = [asyncio.create_task(append()), asyncio.create_task(move())]
        for place in ("whole", "lean"):
            before = answered
            words = ("backup", str(tmp_path / place), *(["--tier"] if place == "whole" else []))
            await run(*words, **source)
            assert answered > before
        stop.set()
        await asyncio.gather(*tasks)
        end = log.next_offset
    assert "shared" in (tmp_path / "whole" / "manifest.json").read_text()
    assert not (tmp_path / "lean" / "shared").exists()

    whole, tier = str(tmp_path / "whole"), tmp_path / "restored-tier"
    url = await asyncio.to_thread(partial(fresh_database, postgres, empty=True))
    target = environment(url, tmp_path / "restored", tier)
    await run("restore", whole, "--check", **target)
    nowhere = {**target, "PENSTOCK_TOPICS_SHARED_TIER": ""}
    assert "topics.shared_tier" in await run("restore", whole, code=1, **nowhere)
    await run("restore", whole, **target)
    async with moving(url, tier) as topics:
        restored = await topics.find("orders")
        assert restored is not None
        found = await values(restored)
        assert len(found) >= 1000
        assert found == [b"%d" % n for n in range(len(found))]
        # Readers may have seen records that are not in the backup: their offsets are not used.
        again = (await restored.append([b"after"])).first_offset
        assert again >= end
        [gap] = await restored.gaps()
        assert (gap["gap_start"], gap["gap_end"]) == (len(found), again)


async def test_a_database_without_the_tables_is_named(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    url = await asyncio.to_thread(partial(fresh_database, postgres, empty=True))
    source = environment(url, tmp_path / "none", tmp_path / "tier")
    output = await run("backup", str(tmp_path / "place"), code=1, **source)
    assert "cannot be backed up" in output
    assert "shared_batches" in output

    refused = Dump(url, "penstock", None)
    with pytest.raises(Unavailable):
        await asyncio.to_thread(refused.__enter__)
    observer = await asyncpg.connect(url)

    async def its_connection_is_closed() -> bool:
        connections = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        return bool(await observer.fetchval(connections) == 1)

    await eventually(its_connection_is_closed)
    await observer.close()


async def test_a_backup_of_a_release_without_shared_topics_can_be_restored(
    postgres: EmbeddedPostgres,
) -> None:
    fresh = partial(fresh_database, postgres, empty=True)
    there, here = await asyncio.to_thread(fresh), await asyncio.to_thread(fresh)
    await execute(there, "CREATE SCHEMA penstock; CREATE TABLE penstock.queues AS SELECT 1 AS id")
    command = [str(BINARIES / "pg_dump"), "--format=custom", "--schema=penstock", there]
    dumped = await asyncio.to_thread(subprocess.check_output, command)
    await asyncio.to_thread(load, here, "penstock", [dumped], None)
    connection = await asyncpg.connect(here)
    assert await connection.fetchval("SELECT id FROM penstock.queues") == 1
    await connection.close()


async def test_no_object_of_a_backup_is_deleted_before_its_end(
    database_url: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    async with moving(database_url, tmp_path) as topics:
        log = await topics.create("orders", 1)
        await log.append([b"first"])
        await topics.mover.step()
        [named] = {row["object"] for row in await rows(database_url)}

        dump = Dump(database_url, "penstock", None)
        await asyncio.to_thread(dump.__enter__)
        assert dump.objects == [named]
        await log.append([b"second"])
        await topics.mover.step()  # merges it into another one, whose grace is over at once
        [merged] = {row["object"] for row in await rows(database_url)}
        assert merged != named
        await topics.mover.step()
        assert {path.name for path in objects(tmp_path)} == {
            name.rpartition("/")[2] for name in (named, merged)
        }
        await asyncio.to_thread(dump.__exit__)

        async def only_the_merged_one_is_left() -> bool:
            await topics.mover.step()
            return [path.name for path in objects(tmp_path)] == [merged.rpartition("/")[2]]

        await eventually(only_the_merged_one_is_left)  # the server notices the end of a connection
