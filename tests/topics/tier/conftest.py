"""One S3 server for all tests of the tier, with a proxy before it that fails as they say."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.topics.tier import tier as tier_module
from tests.support.object_stores import (
    BUCKET,
    CREDENTIALS,
    Faults,
    azure_server,
    faulty_proxy,
    s3_server,
)
from tests.topics.tier.support import unique


@pytest.fixture(scope="package")
def s3() -> Iterator[tuple[str, Faults]]:
    with s3_server() as server, faulty_proxy(server) as (url, faults):
        yield url, faults


@pytest.fixture
def faults(s3: tuple[str, Faults], monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    url, faults = s3
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        tier_module, "REQUEST_LIMITS", tier_module.REQUEST_LIMITS._replace(attempts=1, seconds=20.0)
    )
    faults.seen.clear()
    yield faults
    faults.never()


@pytest.fixture(scope="package")
def azure() -> Iterator[dict[str, str]]:
    installed = Path(sys.prefix, "azurite", "node_modules", ".bin")
    azurite = shutil.which("azurite-blob", path=f"{installed}:{os.environ['PATH']}")
    if azurite is None:
        pytest.skip("needs Azurite: tools/test-programs installs it with npm")
    with azure_server(azurite) as env:
        yield env


@pytest.fixture(params=["s3", "file", "az"])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/store"
    if request.param == "az":
        for name, value in request.getfixturevalue("azure").items():
            monkeypatch.setenv(name, value)
        return f"az://{BUCKET}/{unique(tmp_path)}"
    request.getfixturevalue("faults")
    return f"s3://{BUCKET}/{unique(tmp_path)}"


@pytest.fixture
def s3_address(faults: Faults, tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{unique(tmp_path)}"
