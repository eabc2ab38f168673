"""Other rows under an identity that was used: refused before anything of the batch is written,
whoever asks for it.
"""

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from penstock.net.topic_link import TopicLink
from penstock.pipeline.failure import cause
from penstock.protocol import frames
from tests.pipeline.support import batch_rows, patiently
from tests.pipeline.test_queue_source import options as queue_options
from tests.pipeline.test_queue_source import rows_of

pytestmark = pytest.mark.spark
TASKS = 4
RECORDS = 200


class Flow:
    """A topic that is streamed into a topic and a queue, by the same steps."""

    def __init__(self, spark: Any, server: Any, tcp: str, directory: Path) -> None:
        self.spark, self.server, self.tcp, self.directory = spark, server, tcp, directory
        self.tag = uuid.uuid4().hex[:8]
        self.order = ""

    def append(self, first: int, end: int) -> None:
        with TopicLink(self.tcp, 20) as link:
            link.append(
                frames.produce_batch(f"in-{self.tag}", [b"%d" % i for i in range(first, end)])
            )

    def sink(self, kind: str) -> dict[str, str]:
        own = {"appId": f"{kind}-{self.tag}", "orderBy": self.order}
        if kind == "topic":
            return {**own, "topic": f"out-{self.tag}", "broker": self.tcp}
        return {**own, "queue": f"out-{self.tag}", "url": self.server.url}

    def run(
        self, kind: str, *steps: str, where: str = "true", checkpoint: str = "", **source: str
    ) -> str | None:
        """Run to the end; what it failed with, if it did."""
        given = {
            "topic": f"in-{self.tag}",
            "broker": self.tcp,
            "group": f"{kind}-{self.tag}",
            **source,
        }
        frame = (
            self.spark.readStream.format("penstock")
            .options(**given)
            .load()
            .where(where)
            .selectExpr(*steps)
        )
        writer = (
            frame.writeStream.format("penstock")
            .options(**self.sink(kind))
            .option("checkpointLocation", str(self.directory / (checkpoint or kind)))
            .trigger(availableNow=True)
        )
        try:
            assert patiently(lambda: writer.start().awaitTermination(300))
        except StreamingQueryException as error:
            return cause(error)
        return None

    def written(self, kind: str) -> list[str]:
        if kind == "topic":
            with TopicLink(self.tcp, 20) as link:
                if f"out-{self.tag}" not in link.names():
                    return []
            return sorted(
                row["payload"].decode()
                for row in batch_rows(broker=self.tcp, topic=f"out-{self.tag}")
            )
        from penstock.pipeline.sources.queue import QueueReader

        reader = QueueReader(
            queue_options(self.server.database_url, f"out-{self.tag}", streaming=False)
        )
        return sorted(row["payload"] for row in rows_of(reader, reader.partitions()))


@pytest.fixture
def flow(spark, server, tcp, tmp_path) -> Flow:
    return Flow(spark, server, tcp, tmp_path)


@pytest.mark.parametrize("kind", ["topic", "queue"])
def test_a_failed_batch_goes_on_with_the_same_rows_and_with_no_others(
    flow: Flow, kind: str, soak: bool
) -> None:
    flow.append(0, RECORDS)
    cut = {"minPartitions": str(TASKS)}
    value = "CAST(payload AS STRING)"
    last = RECORDS - 1
    failed = flow.run(
        kind, f"IF(offset = {last}, raise_error('broken step'), {value}) AS payload", **cut
    )
    assert failed is not None
    assert "broken step" in failed
    before = flow.written(kind)
    assert 0 < len(before) < RECORDS
    # As many rows as before, other content; and fewer rows, where tasks that had written nothing
    # could write now.
    variants = {
        "topic": (f"concat('9', {value}) AS payload", "true"),
        "queue": (f"{value} AS payload", "offset % 2 = 0"),
    }
    for changed, where in variants.values() if soak else [variants[kind]]:
        refused = flow.run(kind, changed, where=where, **cut)
        assert refused is not None
        assert "batch 0 of" in refused
        assert "before with other rows" in refused
        assert "Run the batch with the steps it was begun with" in refused
        assert flow.written(kind) == before
    assert (
        flow.run(kind, f"{value} AS payload", **cut) is None
    )  # mended, and the same where it had worked
    expected = sorted(str(i) for i in range(RECORDS))
    assert flow.written(kind) == expected
    described = TopicLink(flow.tcp, 20)
    asked = frames.request(
        frames.Command.GROUP_FETCH, frames.name(f"in-{flow.tag}"), frames.name(f"{kind}-{flow.tag}")
    )
    committed, lag = frames.Body(described.ask(asked)).take(frames.FETCHED_ANSWER)
    described.close()
    assert (committed, lag) == (RECORDS, 0)  # after a run of one batch


def test_a_checkpoint_that_was_copied_is_continued_once(flow: Flow) -> None:
    flow.append(0, 20)
    cut = {"maxRecordsPerPartition": "20"}
    assert flow.run("topic", "payload", **cut) is None
    shutil.copytree(flow.directory / "topic", flow.directory / "copy")
    shutil.copytree(flow.directory / "topic", flow.directory / "older")
    flow.append(20, 40)
    assert flow.run("topic", "payload", **cut) is None
    assert (
        flow.run("topic", "payload", checkpoint="copy", **cut) is None
    )  # the same batch: nothing is added
    assert len(flow.written("topic")) == 40
    flow.append(40, 60)
    refused = flow.run("topic", "payload", checkpoint="older", **cut)  # its batch is 20 to 60
    assert refused is not None
    assert "batch 1 of" in refused
    assert flow.run("topic", "payload", **cut) is None
    refused = flow.run("topic", "payload", checkpoint="older", **cut)
    assert refused is not None
    assert "behind batch 2" in refused
    assert "copied or restored" in refused
    assert flow.written("topic") == sorted(str(i) for i in range(60))


@pytest.mark.parametrize("kind", ["topic", "queue"])
def test_a_write_with_a_used_app_id_adds_nothing_and_takes_no_other_rows(
    flow: Flow, kind: str
) -> None:
    def write(first: int, end: int, tasks: int = 1) -> None:
        frame = flow.spark.range(first, end, 1, tasks).selectExpr("CAST(id AS STRING) AS payload")
        frame.write.format("penstock").mode("append").options(**flow.sink(kind)).save()

    def refused(*given: int) -> str:
        with pytest.raises(Exception, match="other rows") as raised:
            write(*given)
        return cause(raised.value)

    write(0, 10)
    write(0, 10)
    assert "Give it an appId of its own" in refused(10, 20)
    assert "other rows" in refused(0, 9)
    assert "other rows" in refused(0, 20, 2)
    assert flow.written(kind) == sorted(str(i) for i in range(10))


def test_a_replay_is_what_it_was_when_it_was_begun(flow: Flow) -> None:
    from penstock.errors import Conflict
    from penstock.pipeline.jobs.replay import ReplayOptions, replay

    flow.append(0, 40)
    to = {"to_queue": f"out-{flow.tag}", "url": flow.server.url}

    def run(say: Callable[[str], None] = lambda _: None, **more: Any) -> int:
        given = {
            "topic": f"in-{flow.tag}",
            "id": "r",
            "broker": flow.tcp,
            "where": "offset % 2 = 0",
            **to,
            **more,
        }
        return replay(flow.spark, ReplayOptions(execute=True, **given), say).rows

    said: list[str] = []

    def killed(text: str) -> None:
        said.append(text)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(rate=15.0, say=killed)  # ranges of 15 offsets
    assert said == ["8 of 20 records"]
    flow.append(40, 100)
    for _ in range(2):  # it goes on, and then adds nothing
        assert run() == 20
        assert flow.written("queue") == sorted(str(i) for i in range(0, 40, 2))
    with pytest.raises(Conflict, match=r"began with another --where.*another --id"):
        run(where="offset % 3 = 0")
    assert len(flow.written("queue")) == 20


def test_a_replay_keeps_to_its_rate(flow: Flow) -> None:
    from penstock.pipeline.jobs.replay import ReplayOptions, replay

    flow.append(0, 80)
    out = f"out-{flow.tag}"
    replay(
        flow.spark,
        ReplayOptions(
            topic=f"in-{flow.tag}", id="r", to_topic=out, broker=flow.tcp, rate=20.0, execute=True
        ),
    )
    rows = batch_rows(broker=flow.tcp, topic=out)
    assert [int(row["payload"]) for row in rows] == list(range(80))
    times = [row["timestamp"].timestamp() for row in rows]
    assert times[-1] - times[0] > 2.0  # four times 20, where all came at once
    assert max(times.count(at) for at in times) <= 20
