"""The queue API against its own OpenAPI document, with requests that schemathesis makes up."""

import pytest
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.support.broker import BrokerProcess
from tests.support.openapi import check_document


@pytest.mark.timeout(600)  # making up the requests takes the time, not the broker
def test_every_queue_operation_keeps_to_its_document(tmp_path, database_url, soak):
    def skip(method: str, path: str) -> bool:
        return not path.startswith("/api/v1/") or path.startswith("/api/v1/system")

    def adjust(case) -> None:
        if "/pop" in case.path and case.query and case.query.keys() & {"wait", "timeout"}:
            case.query["timeout"] = 10

    with BrokerProcess(tmp_path, database_url=database_url) as broker:
        # What JSON Schema cannot say (a time, a UUID, exactly one of three fields) is refused with
        # 400.
        unsayable = [positive_data_acceptance]
        count = 60 if soak else 2
        assert (
            check_document(broker.url, count, skip=skip, adjust=adjust, excluded_checks=unsayable)
            > 200
        )
        assert broker.process.poll() is None
        assert [line for line in broker.log.splitlines() if '"level":"error"' in line] == []
