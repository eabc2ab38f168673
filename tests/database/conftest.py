"""These tests look at how a broker makes its schema: their databases are empty."""

import pytest


@pytest.fixture
def database_url(empty_database_url: str) -> str:
    return empty_database_url
