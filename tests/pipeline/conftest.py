"""One Spark session and one cluster for all tests of pipelines, and topics to read."""

import asyncio
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import fresh_database
from tests.pipeline.cluster import Cluster, ClusterDriver
from tests.support.broker import BrokerProcess
from tests.support.object_stores import BUCKET, CREDENTIALS, s3_process
from tests.support.postgres import JDBC_DRIVER
from tests.support.served import serving
from tests.support.topics import append


@pytest.hookimpl(tryfirst=True)  # pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a JVM share an xdist worker: those of the session, and those of the cluster."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            if group := next(
                (name for name in ("spark", "cluster") if name in item.fixturenames), ""
            ):
                item.add_marker(pytest.mark.xdist_group(group))
            if item.get_closest_marker("spark"):
                item.add_marker(
                    pytest.mark.timeout(400)
                )  # the first one starts the JVM, and others may be busy too


SETTINGS = {
    "spark.sql.streaming.pollingDelay": "10ms",
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",  # for test_connect
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
    "spark.driver.extraClassPath": str(JDBC_DRIVER),  # for test_jdbc
}


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from penstock.pipeline.session import build

    session = build("penstock-tests", "local[2]", SETTINGS)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="session")
def running_driver(
    cluster: Cluster, s3: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterDriver]:
    log = tmp_path_factory.mktemp("driver") / "log"
    with closing(ClusterDriver(cluster.url, log, s3)) as driver:
        yield driver


@pytest.fixture
def driver(running_driver: ClusterDriver) -> Iterator[ClusterDriver]:
    """Runs programs on the cluster. It knows the S3 endpoint, which the cluster's machines do not."""
    yield running_driver
    running_driver.release()


Append = Callable[..., None]


@pytest.fixture
def write_topic(tmp_path: Path) -> Append:
    """write_topic(name, *batches, **settings): append batches of payloads to a topic in
    `tmp_path`, as a broker does.
    """

    def write(
        name: str, *batches: Sequence[bytes], directory: Path = tmp_path, **settings: Any
    ) -> None:
        append(directory, name, batches, **settings)

    return write


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, str]]:
    """An S3 endpoint: the variables that say how to reach it."""
    with s3_process() as url:
        yield {**CREDENTIALS, "AWS_ENDPOINT_URL": url}


@pytest.fixture
def bucket(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place in a bucket that this process can reach."""
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


class ServedTopics:
    """Topics served over TCP by a thread of this process; `address` is where."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._serve(),), daemon=True
        )

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        async with serving(self.directory, **self._settings) as self.served:
            self.address = self.served.address
            self._ready.set()
            await self._stopping.wait()

    def __enter__(self) -> "ServedTopics":
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *failure: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(20)

    def call(self, make: Callable[[], Any]) -> Any:
        """Run a coroutine function on the server's loop."""
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(20)

    def append(self, topic: str, payloads: Sequence[bytes]) -> None:
        async def run() -> None:
            result = self.served.topics.get(topic) or await self.served.topics.create(topic)
            await result.append(payloads)

        self.call(run)

    def payloads(self, topic: str) -> list[bytes]:
        async def run() -> list[bytes]:
            outcome = self.served.topics.get(topic)
            result: list[bytes] = []
            while outcome is not None and len(result) < outcome.next_offset:
                result += outcome.read(len(result), 100_000, 1 << 24).payloads()
            return result

        return self.call(run)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[ServedTopics]:
    with ServedTopics(tmp_path / "broker") as running:
        yield running


@pytest.fixture(scope="session")
def server(postgres: Any) -> Iterator[BrokerProcess]:
    """A whole broker in a process of its own, for all tests that only need one."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        url = fresh_database(postgres)
        with BrokerProcess(Path(directory), database_url=url) as broker:
            broker.database_url = url
            yield broker


@pytest.fixture
def tcp(server: BrokerProcess) -> str:
    host, port = server.tcp
    return f"{host}:{port}"
