"""`penstock schedule` against a real broker."""

import json
import uuid
from typing import Any

import httpx
import pytest

from penstock.cli.queue import commands as queue_commands
from penstock.cli.schedule import commands
from tests.cli.conftest import Shell

pytestmark = pytest.mark.xdist_group("cli")


def test_schedules_from_creation_to_deletion(broker):
    queue = f"q-{uuid.uuid4().hex[:12]}"

    def run(*words: str, code: int = 0) -> Any:
        shown = Shell(broker, commands).run(*words, code=code).stdout
        return json.loads(shown) if "--json" in words else shown

    create = ("create", queue, "--queue", queue, "--payload", '{"kind":  "daily"}')
    nightly = ("--cron", "0 3 * * *", "--tz", "Europe/Rome", "--header", "tenant=a=b")
    made = run(*create, *nightly, "--json")
    assert made == httpx.get(f"{broker.url}/api/v1/schedules/{queue}").json()
    assert (made["payload"], made["headers"]) == ({"kind": "daily"}, {"tenant": "a=b"})
    assert (made["catchUp"], made["partition"], len(made["nextRuns"])) == ("one", "Default", 5)
    ran = run("run", queue, "--json")
    assert (ran["result"], ran["manual"]) == ("queued", True)
    (message,) = Shell(broker, queue_commands).lines("pop", queue, "-n", "5", "--ack")
    assert (message["data"], message["headers"]) == ({"kind": "daily"}, {"tenant": "a=b"})
    assert message["transactionId"] == ran["transactionId"]
    run("pause", queue)
    assert [one["nextRuns"] for one in run("list", "--json") if one["name"] == queue] == [[]]
    run("resume", queue)
    assert ran["transactionId"] in run("list", queue)
    for wrong in (
        ("--cron", "0 3 * *"),
        ("--cron", "@daily", "--tz", "Mars/Olympus"),
    ):
        run(*create, *wrong, code=1)
    run(*create, "--cron", "@daily", "--payload", "{", code=2)
    run("delete", queue, code=2)
    run("delete", queue, "--yes")
    run("run", queue, code=1)
