"""A queue's options: one table in code, and all that repeats it says the same."""

import re
from pathlib import Path

import asyncpg
import pytest

from penstock.client.client import QueueSettings
from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Queues
from penstock.queues.options import OPTIONS, options_of
from penstock.wire.http.api.queues import ConfigureApi
from penstock.wire.http.openapi import document
from penstock.wire.http.routes import routes_of
from tests.queues.support import running

ROOT = Path(__file__).parents[2]


async def test_the_defaults_of_the_table_queues_are_those_of_the_options(database_url: str) -> None:
    async with running(database_url) as queues:
        await queues.admin.configure("q")
        connection = await asyncpg.connect(
            database_url, server_settings={"search_path": "penstock"}
        )
        row = await connection.fetchrow(
            "INSERT INTO queues (name, uuid) VALUES ('plain', gen_random_uuid()) RETURNING *"
        )
        await connection.close()
        assert options_of(row) == QueueOptions()
        assert (await queues.admin.describe("q")).options == QueueOptions()


def test_the_page_has_a_row_for_every_option() -> None:
    page = (ROOT / "docs/reference/queues.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    assert rows == [(one.name, str(one.default).lower(), one.meaning) for one in OPTIONS]


def test_the_client_names_every_option_for_type_checkers() -> None:
    assert list(QueueSettings.__annotations__) == [one.field for one in OPTIONS]


async def test_the_openapi_document_names_every_option(database_url: str) -> None:
    async with running(database_url) as queues:
        schemas = document(routes_of(ConfigureApi(queues)))["components"]["schemas"]
        properties = schemas["QueueOptions"]["properties"]
        assert {name: about["default"] for name, about in properties.items()} == {
            one.name: one.default for one in OPTIONS
        }
        assert {name: about["description"] for name, about in properties.items()} == {
            one.name: one.meaning for one in OPTIONS
        }


async def test_some_options_are_changed_and_the_others_stay(queues: Queues) -> None:
    await queues.admin.configure("q", QueueOptions(lease_time=60, ordering="none"), "ns", "task")
    changed = await queues.admin.change("q", QueueOptions(retry_limit=7, ttl=9), {"retry_limit"})
    assert (changed.lease_time, changed.retry_limit, changed.ordering) == (60, 7, "none")
    await queues.admin.change("q", QueueOptions(ordering="partition"), {"ordering"})
    info = await queues.admin.describe("q")
    assert (info.options.ordering, info.options.retry_limit, info.options.ttl) == (
        "partition",
        7,
        0,
    )
    assert info.namespace == "ns"
    for wrong, field in (
        (QueueOptions(lease_time=-1), "lease_time"),
        (QueueOptions(encryption_enabled=True), "encryption_enabled"),
    ):
        with pytest.raises(InvalidRequest):
            await queues.admin.change("q", wrong, {field})
    with pytest.raises(NotFound):
        await queues.admin.change("nobody", QueueOptions(ttl=1), {"ttl"})
