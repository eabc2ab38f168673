"""Stopping a broker that others depend on: it says so first, finishes what it began, and clients
use another one.
"""

import asyncio
import os
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from penstock import Client
from penstock.config import load
from penstock.wire.addresses import AddressUnavailable, check_addresses
from tests.conftest import fresh_database
from tests.support.balancer import balancing
from tests.support.broker import ServeProcess
from tests.support.wait import eventually, until


def ready(broker: ServeProcess, query: str = "") -> tuple[int, str]:
    answer = httpx.get(f"{broker.url}/health/ready{query}", headers={"Connection": "close"})
    return answer.status_code, answer.json()["status"]


def test_a_broker_that_stops_first_says_so_and_serves_on_until_balancers_have_noticed(
    tmp_path, database_url
):
    with ServeProcess(tmp_path, database_url=database_url, workers=2, shutdown_delay=5) as broker:
        assert ready(broker) == (200, "ready")
        with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=broker.url) as client:
            url = f"{broker.url}/api/v1/pop/queue/quiet?wait=true&timeout=60000"
            waiting = pool.submit(httpx.get, url, timeout=70)
            waits = f"{broker.url}/api/v1/analytics/queue-parked-replicas?queue=quiet"
            until(lambda: httpx.get(waits).json()["replicas"])
            os.kill(broker.process.pid, signal.SIGTERM)
            until(lambda: ready(broker) == (503, "draining"))
            for _ in range(6):  # both processes are reached
                pushed = client.post("/api/v1/push", json={"items": [{"queue": "q", "payload": 1}]})
                assert pushed.status_code == 201
                assert pushed.headers["connection"] == "close"
                assert ready(broker) == (503, "draining")
            assert httpx.get(f"{broker.url}/health/live").status_code == 200
            assert not waiting.done()
            answer = waiting.result(30)
            assert (answer.status_code, answer.headers["connection"]) == (204, "close")
        assert broker.process.wait(20) == 0


def test_without_its_database_a_broker_is_ready_while_it_can_buffer_unless_the_balancer_wants_more(
    tmp_path,
):
    with ServeProcess(tmp_path, database_url="postgresql://nobody@127.0.0.1:1/none") as broker:
        assert ready(broker) == (200, "ready")
        assert ready(broker, "?database=required") == (503, "unavailable")
        assert httpx.get(f"{broker.url}/health/ready?database=maybe").status_code == 400


@pytest.fixture(scope="module")
def brokers(postgres, tmp_path_factory):
    """Two on one database, one of them for queues only."""
    directory = tmp_path_factory.mktemp("rolling")
    settings = {"database_url": fresh_database(postgres), "shutdown_delay": 1.0}
    one = ServeProcess(directory / "one", **settings)
    two = ServeProcess(directory / "two", **settings, topics__enabled=False)
    two.settings = settings
    with one, two:
        yield one, two


class Rolling:
    """Load through two clients while brokers restart, and what came of it."""

    def __init__(self, clients: dict[str, Client]) -> None:
        self.clients = clients
        self.pushed = 0
        self.taken = {
            f"{way}-{kind}": Counter[int]() for way in clients for kind in ("acks", "auto")
        }
        self.taken["moved"] = Counter()
        self._done = asyncio.Event()
        groups = [group for group in self.taken if group != "moved"]
        self._working = [
            asyncio.create_task(self._take(clients[group.split("-")[0]], group)) for group in groups
        ]
        self._working += [asyncio.create_task(self._move(client)) for client in clients.values()]
        self._pushing = [asyncio.create_task(self._push(client)) for client in clients.values()]

    async def _push(self, client: Client) -> None:
        while not self._done.is_set():
            number, self.pushed = self.pushed, self.pushed + 1
            await client.push("rolling", number, partition=str(number % 7))
            waiting = self.pushed - min(seen.total() for seen in self.taken.values())
            await asyncio.sleep(0.01 if waiting < 200 else 1.0)  # whatever the machine takes

    async def _take(self, client: Client, group: str) -> None:
        acks = group.endswith("acks")
        async for message in client.take(f"rolling@{group}", batch=5, auto_ack=not acks):
            self.taken[group][message.data] += 1
            if acks:
                await client.ack(message)

    async def _move(self, client: Client) -> None:
        async for message in client.take("rolling@moved"):
            async with client.transaction() as tx:
                tx.ack(message).push("moved", message.data)
            self.taken["moved"][message.data] += 1

    async def advance(self, more: int) -> None:
        """Wait until so many more messages are pushed, or a task has ended."""
        before = self.pushed
        await eventually(
            lambda: self.pushed > before + more or any(map(asyncio.Task.done, self._working)), 60
        )
        self.check()

    def check(self) -> None:
        for task in self._working:
            assert not task.done() or task.result()  # raises what ended it

    async def finish(self) -> Counter[int]:
        """Stop pushing, wait until each group has everything, and return all that was pushed."""
        self._done.set()
        await asyncio.gather(*self._pushing)
        everything = Counter(range(self.pushed))

        def all_there() -> bool:
            assert not any(task.done() for task in self._working)
            return all(seen.keys() == everything.keys() for seen in self.taken.values())

        try:
            await eventually(all_there, 60)
        except AssertionError:
            missing = {group: sorted(everything - seen) for group, seen in self.taken.items()}
            raise AssertionError(
                f"of {self.pushed} messages these did not arrive: {missing}"
            ) from None
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        return everything


async def test_brokers_restarted_one_after_the_other_lose_nothing_and_clients_see_no_error(
    brokers, soak
):
    """A rolling restart under load, through a balancer and with two addresses: each message
    exactly once.
    """
    urls = [broker.url for broker in brokers]
    async with balancing(urls) as balancer:
        await eventually(lambda: len(balancer.ready) == 2)
        async with Client(balancer.url) as one, Client(urls) as two:
            # An answer that is lost costs its lease, and that outlives the test.
            await one.configure("rolling", lease_time=3600, retry_limit=5)
            rolling = Rolling({"balancer": one, "addresses": two})
            for broker in [*brokers] * (3 if soak else 1):
                assert await asyncio.to_thread(broker.stop, 60) == 0
                await rolling.advance(20)
                await asyncio.to_thread(broker.start)
                await eventually(lambda: len(balancer.ready) == 2, 30)
                rolling.check()
            everything = await rolling.finish()
            taking = two.take("moved@check", batch=500, idle=0, auto_ack=True)
            assert Counter([message.data async for message in taking]) == everything
        assert rolling.taken == dict.fromkeys(rolling.taken, everything)
        assert min(balancer.accepted.values()) > 0


def test_a_broker_for_queues_only_refuses_topics_clearly_and_shares_its_directory(brokers):
    _, broker = brokers
    with ServeProcess(broker.data_dir, **broker.settings, topics__enabled=False) as other:
        assert set(broker.addresses) == {"HTTP"}
        for method, path in (
            *(
                ("GET", "/topics"),
                ("POST", "/topics/t/produce"),
                ("GET", "/topics/t/stream"),
                ("DELETE", "/topics/t"),
            ),
            *(
                ("GET", "/api/v1/pipelines"),
                ("POST", "/api/v1/pipelines/p"),
                ("POST", "/api/v1/scrub"),
            ),
        ):
            answer = httpx.request(method, broker.url + path)
            assert answer.status_code == 501, path
            assert "queues only (topics.enabled: false)" in answer.json()["error"]
        assert not any(
            path.startswith("/topics")
            for path in httpx.get(f"{broker.url}/openapi.json").json()["paths"]
        )
        away = {"type": "http", "url": "http://127.0.0.1:1/"}
        for definition in (
            {"source": {"topic": "t"}, "destination": away},
            {"source": {"queue": "q"}, "destination": {"type": "topic", "topic": "t"}},
        ):
            refused = httpx.post(f"{broker.url}/api/v1/routes", json={"name": "r", **definition})
            assert refused.status_code == 400, refused.text
            assert "runs on the broker that has the topics" in refused.json()["error"]
        definition = {"name": "r", "source": {"queue": "q"}, "destination": away}
        made = httpx.post(f"{broker.url}/api/v1/routes", json=definition)
        assert made.status_code == 201, made.text
        httpx.post(f"{broker.url}/api/v1/push", json={"items": [{"queue": "shared", "payload": 1}]})
        popped = httpx.get(f"{other.url}/api/v1/pop/queue/shared?autoAck=true")
        assert popped.json()["messages"][0]["data"] == 1
    assert [path.name for path in broker.data_dir.iterdir()] == [".penstock"]


def test_a_broker_for_queues_only_needs_no_ports_for_topics():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = {"http_server.port": 0, "tcp_server.port": port, "websocket_server.port": port}
        with pytest.raises(AddressUnavailable):
            check_addresses(load(None, {}, flags).config)
        check_addresses(load(None, {}, {**flags, "topics.enabled": False}).config)


def test_the_service_manager_hears_of_start_life_and_stop(database_url, scratch: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(scratch / "notify"))
        manager.settimeout(60)
        heard: list[str] = []

        def hear(message: str) -> None:
            while message not in heard:
                heard.append(manager.recv(1000).decode())

        env = {"NOTIFY_SOCKET": str(scratch / "notify"), "WATCHDOG_USEC": "200000"}
        with ServeProcess(scratch / "data", database_url=database_url, env=env) as broker:
            hear("READY=1")
            assert heard == ["READY=1"]
            hear("WATCHDOG=1")
            os.kill(broker.process.pid, signal.SIGHUP)  # `systemctl reload`, without certificates
            heard.clear()
            hear("WATCHDOG=1")
            hear("WATCHDOG=1")
            assert broker.stop() == 0
            hear("STOPPING=1")


def test_a_broker_is_ready_when_all_its_workers_are(tmp_path: Path, database_url: str) -> None:
    broker = ServeProcess(tmp_path, database_url=database_url, workers=3)
    broker.start(wait=False)
    try:
        url = f"http://127.0.0.1:{broker.ports['http']}/health/ready"

        def is_ready() -> bool:
            try:
                return httpx.get(url).status_code == 200
            except httpx.TransportError:
                return False

        until(is_ready)
        assert broker.process is not None
        owner = psutil.Process(broker.process.pid)
        listening = [
            process.pid
            for process in (owner, *owner.children())
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr.port == broker.ports["http"]
        ]
        assert len(listening) == 3
    finally:
        broker.stop()
