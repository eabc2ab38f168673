"""What README.md, docs/reference/pipelines.md, docs/how-to/exactly-once-with-spark.md,
docs/how-to/tables-with-spark.md and docs/start/tutorial.md tell people to type, typed: only
addresses, names and directories are other
ones. The tutorial's other steps are in tests/docs.
"""

import re
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.net.topic_link import TopicLink
from penstock.pipeline import watch
from penstock.pipeline.pipeline_file import parse
from penstock.pipeline.runner import Runner
from penstock.protocol import frames
from tests.docs.blocks import blocks, prints
from tests.pipeline.support import batch_rows, patiently
from tests.support.wait import until

ROOT = Path(__file__).parents[2]


def snippet(file: str, word: str, replaced: dict[str, str]) -> str:
    """The Python block of a page that has this word in it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(), re.DOTALL)
    (result,) = [block for block in blocks if word in block]
    for old, new in replaced.items():
        assert old in result
        result = result.replace(old, new)
    return result


@pytest.mark.spark
def test_the_readme_counts_a_topic_with_spark(spark, server, tcp, capsys) -> None:
    with TopicLink(tcp, 20) as link:
        topic = f"numbers-{uuid.uuid4().hex[:8]}"
        link.append(frames.produce_batch(topic, [b"%d" % i for i in range(1, 1501)]))
    code = snippet(
        "README.md", "penstock.pipeline", {"127.0.0.1:12345": tcp, '"readings"': f'"{topic}"'}
    )
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.split() == ["1000"]


@pytest.mark.spark
@pytest.mark.parametrize(
    ("page", "checkpoint"),
    [
        ("docs/reference/pipelines.md", "/var/lib/shop/copier"),
        ("docs/how-to/exactly-once-with-spark.md", "checkpoints/copier"),
    ],
)
def test_the_guides_copy_a_topic_as_a_stream(
    page, checkpoint, spark, server, tcp, tmp_path
) -> None:
    tag = uuid.uuid4().hex[:8]  # names of directories may come again
    source, copy = f"orders-{tag}", f"orders-copy-{tag}"
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch(source, [b"a", b"b"]))
    text = "".join(
        block.text
        for block in blocks(ROOT / page)
        if block.language == "python" and block.about == "tests/pipeline/test_docs.py"
    )
    for old, new in {
        "127.0.0.1:12345": tcp,
        checkpoint: str(tmp_path / "checkpoint"),
        '"orders"': f'"{source}"',
        '"orders-copy"': f'"{copy}"',
        '"copier"': f'"copier-{tag}"',  # one per sink
    }.items():
        assert old in text
        text = text.replace(old, new)
    code = compile(text, page, "exec")

    def run() -> str:
        before = {query.id for query in spark.streams.active}
        exec(code, {})
        (query,) = [query for query in spark.streams.active if query.id not in before]
        try:
            query.processAllAvailable()
        finally:
            query.stop()
        return str(query.id)

    listener = watch(spark, server.url)
    try:
        number = patiently(run)
        assert [row["payload"] for row in batch_rows(broker=tcp, topic=copy)] == [b"a", b"b"]

        def report() -> dict[str, Any]:  # of a query without a name
            answer: dict[str, Any] = httpx.get(
                f"{server.url}/api/v1/pipelines/query-{number}"
            ).json()
            return answer

        until(lambda: report().get("state") == "finished", timeout=60)
        assert report()["position"].startswith(f"topic {source}: ")
        assert report()["position"].endswith("up to date")
        assert (report()["rows"], report()["lag"]) == (2, 0)
    finally:
        spark.streams.removeListener(listener)


@pytest.mark.spark
def test_the_tutorial_ends_with_a_pipeline(spark, server, tcp, tmp_path) -> None:
    page = [
        block for block in blocks(ROOT / "docs/start/tutorial.md") if block.adjacent or block.kind
    ]
    (file,) = [block.text for block in page if block.language == "yaml"]
    expected = page[-1].text.removeprefix("...\n")  # how the run went
    replaced = {
        "127.0.0.1:12345": tcp,
        "http://127.0.0.1:6632": server.url,
        "./checkpoints": str(tmp_path),
        "topic: numbers": "topic: tutorial-numbers",
        "topic: big-numbers": "topic: tutorial-big-numbers",
    }
    for old, new in replaced.items():
        assert old in file
        file = file.replace(old, new)
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch("tutorial-numbers", [b"%d" % n for n in range(1, 8)]))
    for _ in range(2):  # and once more: nothing is written twice
        patiently(lambda: Runner(parse(file), "local[2]").run(spark))
        rows = batch_rows(broker=tcp, topic="tutorial-big-numbers")
        assert prints(expected, "\n".join(row["payload"].decode() for row in rows))


TABLES = "docs/how-to/tables-with-spark.md"


@pytest.mark.spark
def test_the_guide_to_tables_enriches_upserts_and_writes_to_postgresql(
    spark, server, tcp, tmp_path, database_url
) -> None:
    from contextlib import closing

    from deltalake import DeltaTable

    from penstock.client import SyncClient
    from penstock.pipeline.sinks.postgres import PostgresSession

    tag = uuid.uuid4().hex[:8]
    page = blocks(ROOT / TABLES)
    enrich, upsert, postgres = (one.text for one in page if one.language == "yaml")
    (create,) = (one.text for one in page if one.language == "sql")

    def run(text: str) -> None:
        text = text.replace("/var/lib/shop", str(tmp_path))
        text = re.sub(r"(topic: )([a-z-]+)", rf"\1\2-{tag}", text)
        text = text.replace("postgresql://shop@db/shop", database_url)
        text += f"broker: {tcp}\nurl: {server.url}\n"
        patiently(lambda: Runner(parse(text), "local[2]").run(spark))

    with SyncClient(topics=tcp) as client:
        client.topic(f"customers-{tag}").create(format="kafka")
        changes = [("a", b'{"name": "Ada", "country": "UK"}'), ("b", b"{}"), ("b", None)]
        for key, value in changes:
            client.topic(f"customers-{tag}").produce(value, key=key.encode())
        for number in range(4):
            order = b'{"id": %d, "customer": "%s", "country": "UK", "amount": 1.5}'
            client.topic(f"orders-{tag}").produce(order % (number, b"ab"[number % 2 :][:1]))
    run(upsert)
    rows = DeltaTable(str(tmp_path / "customers")).to_pyarrow_table().to_pylist()
    assert rows == [{"id": "a", "name": "Ada", "country": "UK"}]
    run(enrich)
    named = [row["payload"] for row in batch_rows(broker=tcp, topic=f"named-orders-{tag}")]
    assert sorted(named)[:2] == [
        b'{"id":0,"amount":1.50,"name":"Ada"}',
        b'{"id":1,"amount":1.50}',
    ]
    with closing(PostgresSession(database_url)) as session:
        session.run(create)
        session.commit()
        run(postgres)
        sums = session.run("SELECT country, total::text, orders FROM country_sums")
    assert sums == [("UK", "6.00", 4)]
