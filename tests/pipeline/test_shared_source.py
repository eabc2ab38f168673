"""Shared topics as Spark reads them: its tasks ask PostgreSQL and the object store, and no broker.

The broker that wrote the records has stopped when they are read.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidRequest, NotFound
from penstock.object_store import ObjectStore
from penstock.pipeline.sources.topic import DataLoss, TopicReader, TopicStreamReader
from penstock.protocol.kafka_batch import NewRecord
from penstock.topics.shared.catalog import SharedTopics
from tests.conftest import fresh_database
from tests.pipeline.support import Driver, batch_rows, patiently, rows_of, topic_options
from tests.topics.shared.conftest import shared_topics

COLUMNS = ["topic", "partition", "offset", "key", "headers", "payload"]
RECORDS = 300


class Database:
    """A database with shared topics whose broker runs only while something is written."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.tier = f"file://{directory}"
        self.reach = {"database": url, "sharedTier": self.tier}

    def run(self, write: Callable[[SharedTopics], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            async with self.broker() as topics:
                await write(topics)

        asyncio.run(run())

    @asynccontextmanager
    async def broker(self) -> AsyncIterator[SharedTopics]:
        settings = {"tier_delay": 0.0, "tier_interval": 3600.0, "tier_grace": 0.0}
        async with shared_topics(self.url, ObjectStore(self.tier), **settings) as topics:
            yield topics

    def append(self, topic: str, payloads: Sequence[bytes]) -> None:
        async def write(topics: SharedTopics) -> None:
            await (await topics.create(topic, 1)).append(payloads)

        self.run(write)


@pytest.fixture(scope="module")
def module_database(postgres: Any, tmp_path_factory: pytest.TempPathFactory) -> Database:
    """The topic `t`: 300 records with keys in two partitions, the first 200 of them moved to the
    store."""
    database = Database(
        fresh_database(postgres, migrated=True), tmp_path_factory.mktemp("shared-tier")
    )

    async def write(topics: SharedTopics) -> None:
        await topics.create("t", 2)
        for first in range(0, RECORDS, 20):
            if first == 200:
                assert await topics.mover.step()
            for number in range(2):
                log = topics.get(f"t/{number}" if number else "t")
                assert log is not None
                await log.append_records(
                    [
                        NewRecord(b"%d-%d" % (number, i), b"k%d" % i, timestamp=1000 + i)
                        for i in range(first, first + 20)
                    ]
                )

    database.run(write)
    return database


def test_ranges_come_from_the_database_and_the_store(module_database: Database) -> None:
    reader = TopicReader(
        topic_options(COLUMNS, topic="t", maxRecordsPerPartition=70, **module_database.reach)
    )
    tasks = reader.partitions()
    assert len(tasks) == 10
    rows = rows_of(reader, tasks)
    assert [(row["partition"], row["offset"], row["key"], row["payload"]) for row in rows] == [
        (number, i, b"k%d" % i, b"%d-%d" % (number, i))
        for number in range(2)
        for i in range(RECORDS)
    ]
    assert batch_rows(topicPattern=".*", **module_database.reach)[-1]["payload"] == b"1-299"
    some = batch_rows(
        topic="t/1",
        startingOffsetsByTimestamp='{"t/1": 1117}',
        endingOffsets='{"t/1": 203}',
        **module_database.reach,
    )
    assert [row["offset"] for row in some] == list(range(117, 203))
    assert some[0]["timestamp"].timestamp() == pytest.approx(1.117)


def test_what_is_missing_is_named(module_database: Database) -> None:
    with pytest.raises(InvalidRequest, match=r"offsets 0 to 199 are in object storage.*sharedTier"):
        batch_rows(topic="t", database=module_database.url)
    with pytest.raises(NotFound, match=r"shared topic 'nothing' does not exist.*'broker'"):
        batch_rows(topic="nothing", **module_database.reach)
    with pytest.raises(InvalidRequest, match=r"'broker'.*'database'.*'directory'"):
        batch_rows(topic="t")


def test_a_stream_resumes_and_refuses_a_topic_created_again(
    module_database: Database, tmp_path: Path
) -> None:
    database = module_database
    database.append("s", [b"%d" % i for i in range(50)])
    driver = Driver(tmp_path / "offsets", topic="s", maxOffsetsPerTrigger=20, **database.reach)
    batches = driver.run()
    assert [len(batch) for batch in batches] == [20, 20, 10]
    database.append("s", [b"later"])
    assert [row["payload"] for (row,) in driver.run()] == [b"later"]

    async def create_again(topics: SharedTopics) -> None:
        await topics.delete("s")
        await (await topics.create("s", 1)).append([b"other"])

    reader = TopicStreamReader(topic_options(topic="s", **database.reach))
    tasks = reader.partitions(reader.initialOffset(), reader.reportLatestOffset())
    database.run(create_again)
    with pytest.raises(DataLoss, match="deleted and created again"):
        driver.run()
    with pytest.raises(DataLoss, match="deleted and created again"):
        rows_of(reader, tasks)


def test_records_that_aged_out_or_were_lost_are_reported(module_database: Database) -> None:
    database = module_database
    database.append("aging", [b"a"] * 10)

    async def drop(topics: SharedTopics) -> None:
        log = await topics.find("aging")
        assert log is not None
        await log.append([b"b"] * 10)
        await log.drop_before(10)

    reader = TopicReader(topic_options(topic="aging", **database.reach))
    tasks = reader.partitions()
    database.run(drop)
    with pytest.raises(DataLoss, match="offsets 0 to 9 were to be read and have aged out"):
        rows_of(reader, tasks)
    patient = TopicReader(topic_options(topic="aging", failOnDataLoss=False, **database.reach))
    [task] = tasks
    [part] = task.ranges
    part.end = 1000  # as before a failover to a standby that did not have them
    assert [row["payload"] for row in rows_of(patient, tasks)] == [b"b"] * 10
    part.start = 10
    with pytest.raises(DataLoss, match="ends at offset 20: a failover lost"):
        rows_of(reader, tasks)


@pytest.mark.spark
def test_spark_reads_a_shared_topic_in_batches_and_as_a_stream(
    spark: Any, module_database: Database, tmp_path: Path
) -> None:
    source = {"topic": "t", "maxRecordsPerPartition": "100", **module_database.reach}
    frame = spark.read.format("penstock").options(**source).load()
    assert frame.rdd.getNumPartitions() == 6
    rows = sorted(bytes(row.payload) for row in frame.collect())
    expected = sorted(b"%d-%d" % (number, i) for number in range(2) for i in range(RECORDS))
    assert rows == expected

    def stream() -> None:
        query = (
            spark.readStream.format("penstock")
            .options(**source, maxOffsetsPerTrigger="250")
            .load()
            .writeStream.format("parquet")
            .option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    patiently(stream)
    written = spark.read.parquet(str(tmp_path / "out")).collect()
    assert sorted(bytes(row.payload) for row in written) == expected
