"""A real `penstock serve` process to test against: started on free ports, killed or stopped at
will.
"""

from pathlib import Path
from typing import Any, Self

from penstock.testing import ThrowawayBroker
from tests.support import guard
from tests.support.wait import DATABASE_TIMEOUT


class BrokerProcess(ThrowawayBroker):
    """The broker of `penstock.testing`, which does not outlive a test run that is killed and is
    patient with a busy database.

    Without a database URL it runs its embedded PostgreSQL, and `data_dir` must be reachable by
    other users (the fixture `scratch`).
    """

    def __init__(
        self, data_dir: Path, *, database_url: str | None = None, env: Any = None, **settings: Any
    ) -> None:
        if database_url:
            settings.setdefault("database__acquire_timeout", DATABASE_TIMEOUT)
        super().__init__(data_dir, database_url=database_url, env=env, **settings)

    def start(self, *, wait: bool = True) -> Self:
        super().start(wait=False)
        assert self.process is not None
        guard.watch(self.process.pid)
        guard.watch_postgres(self.data_dir / ".penstock" / "postgres")
        if wait:
            self.wait_until_started()
        return self

    @property
    def tcp(self) -> tuple[str, int]:
        host, _, port = self.addresses["TCP"].rpartition("//")[2].rpartition(":")
        return host, int(port)

    @property
    def kafka(self) -> str:
        """host:port, as Kafka's clients want it."""
        return self.addresses["Kafka"]

    @property
    def websocket(self) -> str:
        return self.addresses["WebSocket"]
