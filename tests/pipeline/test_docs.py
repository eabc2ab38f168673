"""What README and docs/reference/pipelines.md tell people to type, typed: only addresses and
directories are other ones.
"""

import re
import uuid
from pathlib import Path

import pytest

from penstock.net.topic_link import TopicLink
from penstock.protocol import frames
from tests.pipeline.support import batch_rows, patiently

ROOT = Path(__file__).parents[2]


def snippet(file: str, word: str, replaced: dict[str, str]) -> str:
    """The Python block of a page that has this word in it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(), re.DOTALL)
    (found,) = [block for block in blocks if word in block]
    for old, new in replaced.items():
        assert old in found
        found = found.replace(old, new)
    return found


@pytest.mark.spark
def test_the_readme_counts_a_topic_with_spark(spark, server, tcp, capsys) -> None:
    with TopicLink(tcp, 20) as link:
        topic = f"numbers-{uuid.uuid4().hex[:8]}"
        link.append(frames.produce_batch(topic, [b"%d" % i for i in range(1, 1501)]))
    code = snippet(
        "README.md", "penstock.pipeline", {"127.0.0.1:12345": tcp, '"numbers"': f'"{topic}"'}
    )
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.split() == ["1000"]


@pytest.mark.spark
def test_the_guide_copies_a_topic_as_a_stream(spark, server, tcp, tmp_path) -> None:
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch("orders", [b"a", b"b"]))
    replaced = {"127.0.0.1:12345": tcp, "/var/lib/shop/copier": str(tmp_path / "checkpoint")}
    code = compile(
        snippet("docs/reference/pipelines.md", "orders-copy", replaced), "pipelines.md", "exec"
    )

    def run() -> None:
        before = {query.id for query in spark.streams.active}
        exec(code, {})
        (query,) = [query for query in spark.streams.active if query.id not in before]
        try:
            query.processAllAvailable()
        finally:
            query.stop()

    patiently(run)
    assert [row["payload"] for row in batch_rows(broker=tcp, topic="orders-copy")] == [b"a", b"b"]
