"""The live brokers on a database, as each of them sees the others."""

from typing import cast

import pytest

from penstock.database import Database
from penstock.errors import Unavailable
from penstock.metrics import Metrics
from penstock.topics.shared import nodes
from penstock.topics.shared.catalog import SharedTopics
from penstock.topics.shared.groups import NotCoordinator
from penstock.topics.shared.nodes import SharedNodes
from tests.support.wait import eventually
from tests.topics.shared.test_mover import execute


class DatabaseDown:
    def __init__(self) -> None:
        self.calls = 0

    async def fetch(self, *_: object) -> None:
        self.calls += 1
        raise Unavailable("the database is down")


async def test_an_outage_of_the_database_is_not_logged_at_every_heartbeat(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(nodes, "BEAT_SECONDS", 0.01)
    database = DatabaseDown()
    shared = SharedNodes(cast(Database, database), Metrics())
    await shared.start("127.0.0.1", 9092)
    await eventually(lambda: database.calls > 4)
    await shared.stop()
    assert caplog.messages == []


async def test_a_dead_broker_is_left_out_and_its_groups_move_with_another_epoch(
    broker: SharedTopics, database_url: str
) -> None:
    nodes, groups = broker.nodes, broker.groups
    log = await broker.create("orders", 1)
    await log.append([b"a", b"b"])
    await nodes.start("here", 1)
    await execute(
        database_url,
        "INSERT INTO penstock.shared_nodes VALUES (99, 'dead', 'there', 2, clock_timestamp())",
    )
    await eventually(lambda: nodes.alive == [nodes.own, 99])
    before = await nodes.coordinator("group", 99)
    assert await groups.commit("group", [(log, 1, "")], before) == {"orders"}
    assert await nodes.coordinator("group", nodes.own) == before  # it lives
    await execute(
        database_url,
        "UPDATE penstock.shared_nodes SET seen_at = seen_at - interval '1 min' WHERE node_id = 99",
    )
    await eventually(lambda: nodes.alive == [nodes.own])
    after = await nodes.coordinator("group", nodes.own)
    assert after == (nodes.own, before[1] + 1)
    with pytest.raises(NotCoordinator):  # the dead one was only frozen
        await groups.commit("group", [(log, 2, "")], before)
    assert await groups.commit("group", [(log, 1, "")], after) == {"orders"}
