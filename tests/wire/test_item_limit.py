"""Requests with too many items are refused, also where counting them before decoding fails."""

import httpx

from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess

ACK = {"transactionId": "t", "partitionId": "00000000-0000-8000-8008-000000000000"}


def test_too_many_acknowledgments_are_refused_whatever_stands_before_them(postgres, tmp_path):
    body = {"items": "no list", "acknowledgments": [ACK] * 10_001}
    with BrokerProcess(tmp_path, database_url=fresh_database(postgres)) as broker:
        for path in ("ack/batch", "pop/queue/none"):
            answer = httpx.post(f"{broker.url}/api/v1/{path}", json=body)
            assert answer.status_code == 413, path
            assert "at most 10000 (queues.max_items)" in answer.json()["error"]
