"""The table of requests in the reference."""

import re
from pathlib import Path

from penstock.wire.kafka.requests import APIS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "protocols.md"


def test_the_reference_lists_every_request_and_its_versions():
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+)-(\d+) \|$", PAGE.read_text(), re.MULTILINE)
    written = {int(key): (name, int(low), int(high)) for name, key, low, high in rows}
    assert written == {key: (api.name, api.low, api.high) for key, api in APIS.items()}
