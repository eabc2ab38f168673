"""One migrated database for all tests of the outbox: each has queues of its own."""

import uuid

import pytest

from penstock.database.embedded import EmbeddedPostgres
from tests.outbox.support import database_with_effects


@pytest.fixture(scope="package")
def database_url(postgres: EmbeddedPostgres) -> str:
    return database_with_effects(postgres)


@pytest.fixture
def queue() -> str:
    return f"q{uuid.uuid4().hex[:12]}"
