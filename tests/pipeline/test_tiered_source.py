"""Topics whose older segments lie in an object store, read by Spark: from the store itself."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import LocalRetention
from penstock.net.topic_link import TopicLink
from penstock.pipeline.sources.topic import TopicReader, TopicStreamReader
from tests.pipeline.conftest import ServedTopics
from tests.pipeline.support import batch_rows, rows_of, topic_options

PAYLOADS = [b"%05d" % n + b"x" * 80 for n in range(400)]
LIVE = [b"live"] * 3


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[tuple[ServedTopics, str]]:
    """A broker whose topic is in the tier but for its newest records, and the tier's address."""
    address = f"file://{tmp_path}/tier"
    settings = {
        "tier": address,
        "tier_delay": 0.0,
        "segment_bytes": 4000,
        "local_retention": LocalRetention(bytes=1),
    }
    with ServedTopics(tmp_path / "broker", **settings) as broker:
        for first in range(0, len(PAYLOADS), 20):
            broker.append("t", PAYLOADS[first : first + 20])

        async def copy() -> None:
            topic, tier = broker.served.topics.require("t"), broker.served.topics.tier
            await topic.seal()
            assert tier is not None
            assert await tier.synchronize(), tier.problem
            assert not topic.segments[0].local

        broker.call(copy)
        broker.append("t", LIVE)
        yield broker, address


def test_what_is_in_the_tier_is_not_asked_of_the_broker(
    tiered: tuple[ServedTopics, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, address = tiered
    asked = []
    fetch = TopicLink.fetch

    def noted(link: TopicLink, topic: str, start: int, size: int, **options: Any) -> Any:
        asked.append(start)
        return fetch(link, topic, start, size, **options)

    monkeypatch.setattr(TopicLink, "fetch", noted)
    reach = {"broker": broker.address, "topic": "t", "maxRecordsPerPartition": "150"}
    rows = batch_rows(tier=address, **reach)
    assert [row["offset"] for row in rows] == list(range(len(PAYLOADS) + len(LIVE)))
    assert [row["payload"] for row in rows] == PAYLOADS + LIVE
    assert asked == [len(PAYLOADS)], "only the live tail came from the broker"
    assert batch_rows(**reach) == rows


def test_files_beside_the_broker_serve_what_is_local_only(
    tiered: tuple[ServedTopics, str],
) -> None:
    broker, _ = tiered
    reach = {"broker": broker.address, "directory": str(broker.directory), "topic": "t"}
    assert [row["payload"] for row in batch_rows(**reach)] == PAYLOADS + LIVE


@pytest.mark.spark
def test_spark_has_one_frame_of_tier_and_live_tail(
    spark: Any, tiered: tuple[ServedTopics, str], tmp_path: Path
) -> None:
    broker, address = tiered
    source = {"broker": broker.address, "tier": address, "topic": "t"}
    frame = spark.read.format("penstock").options(**source).load()
    rows = frame.orderBy("offset").collect()
    assert [bytes(row.payload) for row in rows] == PAYLOADS + LIVE


def test_offsets_that_a_start_from_the_tier_left_out_are_no_work(
    tiered: tuple[ServedTopics, str], tmp_path: Path
) -> None:
    _, address = tiered
    hour_ago = time.time() - 3600
    os.utime(tmp_path / "tier/state.json", (hour_ago, hour_ago))
    with ServedTopics(tmp_path / "adopted", tier=address, adopt=True) as broker:
        broker.append("t", [b"new"])
        options = topic_options(broker=broker.address, topic="t", tier=address)
        reader = TopicReader(options)
        tasks = reader.partitions()
        assert len(tasks) <= 3
        rows = rows_of(reader, tasks)
        assert [row["payload"] for row in rows] == [*PAYLOADS, b"new"]
        assert rows[-1]["offset"] > 3_600_000_000
        stream = TopicStreamReader(
            topic_options(broker=broker.address, topic="t", maxOffsetsPerTrigger=300)
        )
        at, batches = stream.initialOffset(), []
        while (following := stream.latestOffset(at, stream.getDefaultReadLimit())) != at:
            batches.append(rows_of(stream, stream.partitions(at, following)))
            at = following
            assert len(batches) < 5
        assert [row["payload"] for batch in batches for row in batch] == [*PAYLOADS, b"new"]
