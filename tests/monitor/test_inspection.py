"""What a person looks into: partitions by lag, a message's life, payloads, errors, charts."""

from datetime import UTC, datetime, timedelta

import pytest

from penstock.contract.inspection import ErrorsQuery, HistoryQuery, LifelineEvent, SearchQuery
from penstock.contract.queries import QueuePartitionsQuery
from penstock.errors import InvalidRequest, NotFound
from penstock.monitor import inspection as module
from penstock.monitor.inspection import Inspection, matcher, push_to_ack
from penstock.protocol.queue_options import QueueOptions
from penstock.queues.admin.dead_letters import Which
from penstock.queues.types import Ack
from penstock.wire.http.decoding import query_decoder
from tests.queues.support import complete, pop, push, running
from tests.support.wait import eventually


@pytest.mark.parametrize(
    ("wanted", "payload", "held"),
    [
        ("order.id=7", b'{"order": {"id": 7}}', True),
        ("$.order.id = 7", b'{"order": {"id": 7}}', True),
        ("order.id=8", b'{"order": {"id": 7}}', False),
        ('items[1].sku="b"', b'{"items": [{}, {"sku": "b"}]}', True),
        ("items[2].sku=b", b'{"items": [{}, {"sku": "b"}]}', False),
        ("paid=true", b'{"paid": true}', True),
        ("a=1", b"[" * 5000 + b"]" * 5000, False),
        ("a=1", b"\xff\xfe", False),
        ("GATE", b'{"why": "gateway"}', True),
        ("gone", b'{"why": "gateway"}', False),
    ],
)
def test_a_search_is_a_path_with_a_value_or_text(wanted, payload, held):
    assert matcher(wanted)(payload) is held


def test_a_search_without_a_path_says_what_to_write():
    with pytest.raises(InvalidRequest, match=r"order\.id=7"):
        matcher("=7")


async def test_partitions_come_by_lag_and_messages_by_content(database_url, monkeypatch):
    monkeypatch.setattr(module, "ROWS_PER_STEP", 4)

    async with running(database_url) as queues:
        for name, count in (("a", 2), ("b", 7), ("c", 4)):
            await push(queues, "q", *({"n": n, "in": name} for n in range(count)), partition=name)
        await complete(queues, await pop(queues, "q", 7, partition="b", group="g"))
        await pop(queues, "q", 3, partition="c", group="g")
        look = Inspection(queues)
        page = await look.partitions("q", QueuePartitionsQuery("g"))
        partitions, total = page.partitions, page.total
        assert [(one.name, one.waiting, one.leased) for one in partitions] == [
            ("c", 4, 3),
            ("a", 2, 0),
            ("b", 0, 0),
        ]
        assert (total, partitions[2].oldest) == (3, None)
        assert partitions[0].oldest is not None
        filtered = await look.partitions("q", QueuePartitionsQuery("g", "A"))
        assert [one.name for one in filtered.partitions] == ["a"]
        hits = await look.search("q", SearchQuery(search="in=a", limit=8))
        assert (hits.searched, hits.complete) == (8, False)
        more = await look.search("q", SearchQuery(search="in=a", limit=8, cursor=hits.next))
        assert more.complete
        assert [hit.partition for hit in hits.messages + more.messages] == ["a", "a"]
        inside = await look.search("q", SearchQuery(search="n=1", partition="c"))
        (hit,) = inside.messages
        same = await look.by_transaction("q", hit.transaction_id)
        assert [one.partition_id for one in same.messages] == [hit.partition_id]
        assert (await look.by_transaction("q", "nobody")).messages == []


async def test_the_life_of_a_message_and_the_errors_of_a_queue(database_url):
    async with running(database_url) as queues:
        look = Inspection(queues)
        await queues.admin.configure("q", QueueOptions(retry_limit=0))
        await push(queues, "q", 1, 2)
        taken = (await pop(queues, "q", 1, group="g")).messages[0]
        ids = taken.partition_id, taken.transaction_id
        assert [(e.kind, e.group) for e in (await look.lifeline(*ids)).events] == [
            ("pushed", ""),
            ("leased", "g"),
        ]
        lease = taken.transaction_id, taken.partition_id, taken.lease_id
        await queues.ack([Ack(*lease, "failed", "gateway timeout", "g", "worker-3")])

        async def failed() -> LifelineEvent | None:
            events = (await look.lifeline(*ids)).events
            return next((event for event in events if event.kind == "failed"), None)

        noted = await eventually(failed)
        assert (noted.who, noted.why, noted.group) == ("worker-3", "gateway timeout", "g")
        assert noted.at is not None
        dead = (await look.lifeline(*ids)).events[-1]
        assert (dead.kind, dead.why, dead.attempts) == ("dead letter", "gateway timeout", 1)
        found = await look.errors(ErrorsQuery("q", "g", "GATEWAY"))
        (group,) = found.errors
        assert (group.error, group.count, sum(group.history)) == ("gateway timeout", 1, 1)
        assert found.total == 1
        assert (await look.errors(ErrorsQuery("q", "g", "other"))).errors == []
        await queues.dead.requeue(Which(queue="q"))
        events = (await look.lifeline(*ids)).events
        assert [e.kind for e in events] == ["pushed", "failed", "requeued", "waiting"]
        assert '"error" : "gateway timeout"' in events[2].why
        await complete(queues, await pop(queues, "q", 2, group="g"))
        kinds = [event.kind for event in (await look.lifeline(*ids)).events]
        assert kinds == ["pushed", "failed", "requeued", "completed"]
        with pytest.raises(NotFound):
            await look.lifeline(taken.partition_id, "nobody")
        await queues.upkeep.roll_up()
        assert (await push_to_ack(queues)).total == 2
        await queues.database.fetch("UPDATE history SET minute = minute - interval '1 minute'")
        series = await look.history(HistoryQuery("1h", "q"))
        assert len(series.times) == len(series.series["pushed"]) == 60
        assert series.series["pushed"][0] is None, "there was no such queue an hour ago"
        assert round(sum(rate or 0 for rate in series.series["pushed"]) * 60) == 2
        assert round(sum(rate or 0 for rate in series.series["completed"]) * 60) == 2
        assert set((await look.history(HistoryQuery("1h", "other"))).series["pushed"]) <= {
            None,
            0.0,
        }


def test_the_range_of_a_history_is_one_of_three():
    with pytest.raises(InvalidRequest, match="1y"):
        query_decoder(HistoryQuery)("range=1y")


async def test_rolled_up_minutes_add_up_over_all_queues_and_topics(database_url):
    async with running(database_url) as queues:
        minute = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=5)
        nothing = await queues.analytics.totals(minute)
        assert (nothing.upto, nothing.minutes) == (None, [])
        await queues.database.fetch(
            """INSERT INTO analytics (minute, kind, name, group_name, pushed, acked) VALUES
               ($1, 'queue', 'a', '', 5, 0), ($1, 'queue', 'b', '', 2, 0),
               ($1, 'group', 'a', 'g', 0, 4), ($1, 'topic', 't', '', 9, 0),
               ($1, 'topic', 't', 'g', 0, 8), ($1 - interval '1 hour', 'queue', 'a', '', 1, 0)""",
            minute,
        )
        await queues.database.fetch(
            "INSERT INTO rollups (scope, upto) VALUES ('queues', $1)", minute
        )
        totals = await queues.analytics.totals(minute)
        assert (totals.upto, totals.minutes) == (minute, [minute])
        assert (totals.pushed, totals.delivered, totals.produced) == ([7], [4], [9])
