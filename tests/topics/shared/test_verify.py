"""`penstock topic verify --shared` and the scrub: what rotted in the database or in object storage
is found and named, and what is sound is not."""

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from penstock.cli.topic import commands
from penstock.topics.shared.catalog import SharedTopics
from tests.support.cli import CliRunner
from tests.support.topics import running
from tests.topics.shared.test_mover import execute, moving, objects
from tests.topics.test_scrub import flip, scrubbed


def verify(url: str, tier: Path, *words: str) -> tuple[int, str]:
    """The exit code and what was printed."""
    env = {"PENSTOCK_DATABASE_URL": url, "PENSTOCK_TOPICS_SHARED_TIER": f"file://{tier}"}
    done = CliRunner(env=env).invoke(commands, ["verify", "--shared", "--quiet", *words])
    return done.exit_code, done.output


async def fill(topics: SharedTopics) -> None:
    """Three rows in an object, and three in the database."""
    log = await topics.create("orders", 1)
    for size in (1 << 20, 1 << 20, 10):
        await log.append([b"x" * size])
    await topics.mover.step()
    for i in range(3):
        await log.append([b"%d" % i])


async def test_topics_are_sound_while_they_are_appended_to_moved_and_merged(
    database_url: str, tmp_path: Path
) -> None:
    async with moving(database_url, tmp_path) as topics:
        log = await topics.create("orders", 2)
        stop = asyncio.Event()

        async def work() -> None:
            while not stop.is_set():
                await log.append([b"x" * 1000] * 20)
                await topics.mover.step()

        working = asyncio.create_task(work())
        for _ in range(3):
            code, output = await asyncio.to_thread(verify, database_url, tmp_path)
            assert (code, output.count("sound")) == (0, 2), output
        stop.set()
        await working
        code, output = await asyncio.to_thread(verify, database_url, tmp_path, "orders", "--json")
        reports = [json.loads(line) for line in output.splitlines()]
        assert [one["topic"] for one in reports] == ["orders", "orders/1"]
        assert reports[0]["records"] == reports[0]["next_offset"] == log.next_offset
        assert reports[0]["missing"] == 0
        code, output = await asyncio.to_thread(verify, database_url, tmp_path, "others")
        assert (code, "others" in output) == (1, True)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("data = set_byte(data, 67, 255) WHERE last_offset = 4", "do not match their checksums"),
        ("records = 2 WHERE last_offset = 4", "1 records in"),
        ("last_offset = 9 WHERE last_offset = 5", "offsets 5 to 9"),
        ("object = object || 'x' WHERE last_offset = 1", "has no shared/"),
        ("position = position + 1 WHERE last_offset = 1", "do not match their checksums"),
    ],
)
async def test_a_damaged_row_is_named(
    database_url: str, tmp_path: Path, damage: str, named: str
) -> None:
    async with moving(database_url, tmp_path) as topics:
        await fill(topics)
        assert (await asyncio.to_thread(verify, database_url, tmp_path))[0] == 0
        await execute(database_url, f"UPDATE penstock.shared_batches SET {damage}")
        code, output = await asyncio.to_thread(verify, database_url, tmp_path)
        assert code == 1
        assert "1 DAMAGED" in output
        assert named in output


async def test_records_that_are_gone_from_the_end_are_named(
    database_url: str, tmp_path: Path
) -> None:
    async with moving(database_url, tmp_path) as topics:
        await fill(topics)
        await execute(database_url, "DELETE FROM penstock.shared_batches WHERE last_offset > 3")
        code, output = await asyncio.to_thread(verify, database_url, tmp_path)
        assert code == 1
        assert "offsets 4 to 5 are missing" in output


async def test_the_scrub_of_the_broker_that_moves_finds_a_flipped_bit(
    database_url: str, tmp_path: Path
) -> None:
    opened = partial(moving, database_url, tmp_path / "tier")
    async with opened() as topics, opened() as other, running(tmp_path / "local") as store:
        await fill(topics)
        await other.mover.step()
        store.shared = other
        assert (await scrubbed(store))["bytes"] == 0  # another one does it
        store.shared = topics
        sound = await scrubbed(store)
        assert sound["findings"] == 0
        assert sound["bytes"] > 2 << 20
        [path] = objects(tmp_path / "tier")
        flip(path, 100)
        assert (await scrubbed(store))["findings"] == 1
        store.shared = None
