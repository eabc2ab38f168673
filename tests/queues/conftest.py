"""Tests of the engine begin with a schema: how it gets there is not what is tested here."""

import pytest

from penstock.database.embedded import EmbeddedPostgres
from tests.conftest import fresh_database


@pytest.fixture
def database_url(postgres: EmbeddedPostgres) -> str:
    return fresh_database(postgres, migrated=True)
