"""`penstock.testing`, used by a project of its own."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock import SyncClient
from penstock.testing import ThrowawayBroker, fork_server
from tests.conftest import fresh_database
from tests.support.wait import until


@pytest.fixture(autouse=True, scope="module")
def stopped_fork_server() -> Iterator[None]:
    yield
    fork_server().close()


PROJECT = {
    "conftest.py": 'pytest_plugins = ["penstock.testing"]\n',
    "test_orders.py": """
        import asyncio
        from penstock import Client

        seen = set()

        def test_plain(penstock_client, penstock_name, penstock_url):
            queue = penstock_name("orders")
            penstock_client.push(queue, {"id": 7})
            assert [m.data for m in penstock_client.take(queue, auto_ack=True, idle=0)] == [{"id": 7}]
            penstock_client.topic(queue).produce(b"one")
            seen.add((penstock_url, queue))

        def test_async_and_names_of_its_own(penstock_url, penstock_name):
            queue = penstock_name("orders")
            assert queue == penstock_name("orders")

            async def body():
                async with Client(penstock_url) as client:
                    assert await client.pop(queue) == []

            asyncio.run(body())
            seen.add((penstock_url, queue))
            assert len({url for url, _ in seen}) == 1, "one broker for the session"
            assert len({queue for _, queue in seen}) == 2
            print("directory", penstock_url)
    """,
}


def test_a_project_gets_one_broker_and_each_test_its_own_names(postgres, tmp_path: Path):
    for name, text in PROJECT.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env={
            **os.environ,
            "PENSTOCK_TEST_DATABASE_URL": fresh_database(postgres),
            "TMPDIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert re.search(r"2 passed", run.stdout), run.stdout + run.stderr
    assert not list(tmp_path.glob("penstock-test-*")), "thrown away"


def test_the_tests_of_the_page_about_testing_pass(scratch: Path):
    page = Path(__file__).parents[2] / "docs/how-to/testing.md"
    for block in re.findall(r"```python\n(# (test_\w+\.py)\n.*?)```", page.read_text(), re.S):
        (scratch / block[1]).write_text(block[0])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(scratch)]
    run = subprocess.run(
        command,
        cwd=scratch,
        env={**os.environ, "TMPDIR": str(scratch)},  # brokers of other tests use this process's
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert "2 passed" in run.stdout, run.stdout + run.stderr
    assert not list(scratch.glob("penstock-test-*")), "nothing survives"


def test_nothing_survives_in_a_directory_that_is_closed_to_postgresql(scratch: Path):
    """As root the database then lies in /var/lib/penstock."""
    closed = scratch / "closed"
    closed.mkdir(mode=0o700)
    program = "from penstock.testing import ThrowawayBroker\nwith ThrowawayBroker(): print('up')"
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(closed)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert run.stdout == "up\n", run.stderr
    assert not list(closed.iterdir())
    outside = re.search(r"its data is in (\S+)", run.stderr)
    assert (outside is not None) == (os.geteuid() == 0)
    assert outside is None or not Path(outside[1]).exists()


def test_a_broker_that_cannot_start_says_why():
    with (
        pytest.raises(RuntimeError, match=r"did not start:\n(.|\n)*no_such_key"),
        ThrowawayBroker(no_such_key="1"),
    ):
        pass


def test_further_brokers_start_fast_and_share_nothing():
    brokers = [ThrowawayBroker().__enter__() for _ in range(3)]
    try:
        ids = set()
        for broker in brokers:
            with SyncClient(broker.url) as client:
                assert client.admin.queues() == []
                assert client.topics() == []
                ids.add(client.push("orders", {}).message_id)
                client.topic("orders").produce(b"one")
        assert len(ids) == len(brokers), "each database has its own ids"
        spent = [psutil.Process(broker.process.pid).cpu_times() for broker in brokers]
        assert min(times.user + times.system for times in spent) < 0.5
    finally:
        for broker in brokers:
            broker.__exit__()


STARTED = """
    import time
    from penstock.testing import ThrowawayBroker, fork_server

    broker = ThrowawayBroker().start()
    print(fork_server().directory, broker.process.pid, flush=True)
    time.sleep(600)
"""


def test_nothing_survives_tests_that_are_killed():
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STARTED)],
        stdout=subprocess.PIPE,
        text=True,
    ) as tests:
        assert tests.stdout is not None
        directory, broker = tests.stdout.readline().split()
        postgres = int((Path(directory) / "postgres/data/postmaster.pid").read_text().split()[0])
        tests.send_signal(signal.SIGKILL)
    until(lambda: not Path(directory).exists(), 30)
    running = {one.pid for one in psutil.process_iter() if one.status() != psutil.STATUS_ZOMBIE}
    assert not running & {int(broker), postgres}
