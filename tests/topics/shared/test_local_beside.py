"""Local topics on a broker that has shared ones."""

import asyncio
from pathlib import Path

import pytest

from penstock.topics.shared.catalog import SharedTopics
from penstock.topics.shared.log import SharedLog
from tests.support.topics import running
from tests.support.wait import eventually


async def test_a_local_topic_is_created_once_while_the_database_is_asked_for_a_shared_one(
    tmp_path: Path, broker: SharedTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writers of one log would damage it. The second answer of the database comes late."""
    find, asked = broker.find, 0
    async with running(tmp_path) as store:

        async def find_slowly(name: str) -> SharedLog | None:
            nonlocal asked
            asked += 1
            if asked > 1:
                await eventually(lambda: store.get(name))
            return await find(name)

        monkeypatch.setattr(broker, "find", find_slowly)
        store.shared = broker
        first, second = await asyncio.gather(store.create("orders"), store.create("orders"))
        assert first is second
        store.shared = None
