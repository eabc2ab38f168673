"""examples/spark_to_table.py, in the session that all tests of pipelines share."""

import runpy
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "spark_to_table.py"


@pytest.mark.spark
def test_a_queue_becomes_a_table(
    spark: Any, postgres: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    url = fresh_database(postgres)
    monkeypatch.setenv("DATABASE_URL", url)
    main = runpy.run_path(str(EXAMPLE))["main"]
    with BrokerProcess(tmp_path / "data", database_url=url) as broker:
        items = [{"queue": "orders", "payload": {"id": n, "total": n / 2}} for n in range(10)]
        httpx.post(f"{broker.url}/api/v1/push", json={"items": items}).raise_for_status()
        main(tmp_path)
    assert capsys.readouterr().out == "{'orders': 10, 'total': 22.5}\n"
