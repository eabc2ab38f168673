"""The live brokers on a database, as each of them sees the others."""

from typing import cast

import pytest

from penstock.database import Database
from penstock.errors import Unavailable
from penstock.metrics import Metrics
from penstock.topics.shared import nodes
from penstock.topics.shared.nodes import SharedNodes
from tests.support.wait import eventually


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
