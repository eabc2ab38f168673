"""Which requests are recorded as changes, and what is kept of them."""

from datetime import UTC, datetime, timedelta

import pytest

from penstock.broker import Broker
from penstock.config import Config
from penstock.contract import operations
from penstock.contract.queries import AuditQuery
from penstock.monitor import audit as storage
from penstock.monitor.audit import Audit
from penstock.wire.http.audit import object_of, recording
from penstock.wire.http.messages import EMPTY, HttpHead
from penstock.wire.http.routes import Audited
from penstock.wire.listeners import Listeners
from tests.queues.support import running

# What moves messages and records, and what consumers and jobs report of their own work.
NOT_CHANGES = {
    "POST /api/v1/push",
    "POST /api/v1/pop",
    "POST /api/v1/pop/any",
    "POST /api/v1/pop/queue/{queue}",
    "POST /api/v1/pop/queue/{queue}/partition/{partition}",
    "POST /api/v1/consumers",
    "POST /api/v1/ack",
    "POST /api/v1/ack/batch",
    "POST /api/v1/lease/{lease}/extend",
    "POST /api/v1/transaction",
    "POST /api/v1/traces",
    "POST /api/v1/sinks/claim",
    "POST /api/v1/sinks/push",
    "POST /api/v1/sinks/commit",
    "POST /api/v1/stats/refresh",
    "POST /internal/api/notify",
    "POST /topics/{topic}/produce",
    "POST /topics/{topic}/groups/{group}/commit",
    "POST /topics/{topic}/groups/{group}/lease",
    "POST /topics/{topic}/groups/{group}/complete",
    "POST /topics/{topic}/groups/{group}/renew",
    "PUT /topics/{topic}/archived",
    "PUT /api/v1/pipelines/{name}",
    "POST /api/v1/routes/{name}/push",
    "POST /api/v1/routes/{name}/v1/{signal}",
    "POST /api/v1/routes/{name}/write",
    "POST /api/v1/write",
    "POST /v1/{signal}",
    "POST /streams/v1/cycle",
    "POST /streams/v1/queries",
    "POST /streams/v1/state/get",
}


def test_every_request_that_changes_something_is_recorded(tmp_path):
    broker = Broker(Config(data_directory=tmp_path))
    routes = Listeners(broker).owner_routes()
    broker.pool.shutdown()
    changing = {f"{one.method} {one.path}" for one in routes if one.method != "GET"}
    recorded = {f"{one.method} {one.path}" for one in routes if one.audit is not None}
    assert changing - recorded == NOT_CHANGES
    assert not recorded & NOT_CHANGES


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"queue": "orders"}, "orders"),
        ({"queue": "orders", "consumerGroup": "mail"}, "orders@mail"),
        ({"group": "mail", "queue": "orders", "partition": "c-7"}, "orders/c-7@mail"),
        ({"group": "mail"}, "@mail"),
        ({}, ""),
    ],
)
def test_the_object_reads_like_elsewhere(named, text):
    assert object_of(named) == text


async def test_a_change_whose_body_is_nested_too_deeply_to_be_read_again_is_recorded_without_it():
    recorded: list[tuple] = []

    async def record(*entry) -> None:
        recorded.append(entry)

    class Nested:
        params, who = {"queue": "orders"}, "ann"
        head = HttpHead("POST", "/", "/", [])
        body = b'{"options": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

    handler = recording(record, Audited("queue.configure", body=("options",)), lambda _: EMPTY)
    assert await handler(Nested()) is EMPTY
    assert recorded == [("ann", "queue.configure", "orders", {})]


async def test_the_name_of_a_change_takes_parameters_of_the_path():
    recorded: list[tuple] = []

    async def record(*entry) -> None:
        recorded.append(entry)

    class Pause:
        params, who, body = {"name": "lake", "action": "pause"}, "ann", b""
        head = HttpHead("POST", "/", "/", [])

    await recording(record, operations.CONTROL_ROUTE.audit, lambda _: EMPTY)(Pause())
    assert recorded == [("ann", "route.pause", "lake", {})]


class FakeOutage:
    """The database of a test that can be away."""

    def __init__(self, database) -> None:
        self._database = database
        self.healthy = True

    def __getattr__(self, name: str):
        return getattr(self._database, name)


async def test_entries_wait_while_the_database_is_away_and_old_ones_go(database_url, monkeypatch):
    monkeypatch.setattr(storage, "KEPT_ENTRIES", 5)

    async with running(database_url) as queues:
        database = queues.database
        outage = FakeOutage(database)
        audit = Audit(outage, "b-1")
        outage.healthy = False
        await audit.record("ana", "queue.delete", "orders\0", {"deleted": 3, "why": "x" * 999})
        assert await database.fetch("SELECT 1 FROM audit") == []
        outage.healthy = True
        page = await audit.page(AuditQuery(limit=10))
        entries, following = page.entries, page.next
        assert [(one.who, one.action, one.object) for one in entries] == [
            ("ana", "queue.delete", "orders\ufffd")
        ]
        assert entries[0].detail["deleted"] == 3
        assert len(entries[0].detail["why"]) == storage.MAX_TEXT
        assert following is None
        for number in range(8):
            await audit.record("bo", "group.seek", f"q{number}", {})
        page = await audit.page(AuditQuery(limit=3))
        entries, following = page.entries, page.next
        assert [one.object for one in entries] == ["q7", "q6", "q5"]
        page = await audit.page(AuditQuery("SEEK", following, 10))
        entries, following = page.entries, page.next
        assert [one.object for one in entries] == ["q4", "q3"]  # five are kept
        old = datetime.now(UTC) - timedelta(days=storage.KEPT_DAYS + 1)
        await database.fetch("UPDATE audit SET at = $1 WHERE object = 'q3'", old)
        await audit.record("bo", "group.seek", "last", {})
        assert "q3" not in [one.object for one in (await audit.page(AuditQuery(limit=10))).entries]
