"""Tables that Spark reaches over JDBC: as sources beside a stream and alone, and as a sink."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock.pipeline.pipeline_file import parse
from penstock.pipeline.runner import Runner
from penstock.pipeline.sinks.table import TableSink
from tests.pipeline.test_table_sinks import ENRICHED, rows_of
from tests.support.postgres import JDBC_DRIVER, Postgres

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(not JDBC_DRIVER.exists(), reason="install libpostgresql-jdbc-java"),
]


@pytest.fixture(scope="module")
def shop() -> Iterator[Postgres]:
    """A PostgreSQL that listens on a port."""
    with Postgres("shop") as server:
        yield server


@pytest.fixture
def customers(shop: Postgres) -> str:
    """The name of a new table."""
    name = f"customers_{uuid.uuid4().hex[:8]}"
    shop.sql(f"CREATE TABLE {name} (customer text PRIMARY KEY, name text)")
    shop.sql(f"INSERT INTO {name} VALUES ('a', 'name 0')")
    return name


def url_of(shop: Postgres) -> str:
    return f"jdbc:postgresql://{shop.address}/postgres?user=postgres"


@pytest.mark.parametrize(("refresh", "names"), [(1, [0, 1, 2]), (0, [0, 0, 0]), (2, [0, 0, 2])])
def test_a_stream_is_joined_with_a_table_over_jdbc(
    spark: Any,
    tmp_path: Path,
    write_topic: Any,
    shop: Postgres,
    customers: str,
    monkeypatch: pytest.MonkeyPatch,
    refresh: int,
    names: list[int],
) -> None:
    write_topic("orders", [b'{"id": %d, "customer": "a"}' % i for i in range(3)])
    real = TableSink.__call__

    def changing(self: TableSink, batch: Any, number: int) -> None:
        real(self, batch, number)
        shop.sql(f"UPDATE {customers} SET name = 'name {number + 1}'")

    monkeypatch.setattr(TableSink, "__call__", changing)
    source = f'jdbc: "{url_of(shop)}", options: {{dbtable: {customers}}}'
    text = ENRICHED.format(directory=tmp_path, customers=source, refresh=refresh)
    Runner(parse(text)).run(spark)
    joined = [row["name"] for row in rows_of(tmp_path / "out", "id")]
    assert joined == [f"name {number}" for number in names]


COPY = """
name: copy
source:
  jdbc: "{url}"
  options: {{query: "SELECT customer, upper(name) AS name FROM {customers}"}}
steps:
  - {{name: copied, sql: "SELECT customer || '2' AS customer, name FROM source"}}
sink: {{format: jdbc, options: {{url: "{url}", dbtable: {customers}}}}}
trigger: batch
"""


def test_a_query_over_jdbc_is_read_alone_and_written_over_jdbc(
    spark: Any, shop: Postgres, customers: str
) -> None:
    Runner(parse(COPY.format(url=url_of(shop), customers=customers))).run(spark)
    assert shop.sql(f"SELECT name FROM {customers} WHERE customer = 'a2'") == "NAME 0"
    assert shop.sql(f"SELECT count(*) FROM {customers}") == 2


def test_a_table_that_cannot_be_read_over_jdbc_is_named(spark: Any, shop: Postgres) -> None:
    text = COPY.format(url=url_of(shop), customers="nowhere")
    with pytest.raises(PenstockError, match=r"nowhere"):
        Runner(parse(text)).run(spark)
