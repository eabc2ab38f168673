"""A PostgreSQL primary and its synchronous standby for a test, to be killed, frozen, promoted and
rejoined.

Both run from the binaries that come with the project and listen on 127.0.0.1, so that one URL can
name both.
"""

import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

import asyncpg

from penstock.database import embedded
from penstock.database.embedded import EmbeddedPostgres
from tests.support import guard
from tests.support.buffers import crash, freeze, thaw
from tests.support.ports import free_port
from tests.support.wait import until

# Processes are killed here, not machines: what was written is in the kernel and survives.
SETTINGS = {
    "fsync": "off",
    "listen_addresses": "127.0.0.1",
    "shared_buffers": "32MB",
    "max_wal_size": "512MB",
}
JDBC_DRIVER = Path("/usr/share/java/postgresql.jar")  # Debian: libpostgresql-jdbc-java
TRUST = "local all all trust\nhost all all 127.0.0.1/32 trust\nhost replication all 127.0.0.1/32 trust\n"


class Postgres:
    """One server on a port of its own. All calls block."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-pair-"))
        self.directory.chmod(0o755)
        self.port = free_port()
        self.server = EmbeddedPostgres(
            self.directory, SETTINGS | {"port": str(self.port)}, access=TRUST
        )
        self.frozen: list[int] = []
        guard.watch_postgres(self.directory)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        self.remove()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{self.address}/postgres?sslmode=disable"

    def start(self) -> None:
        self.server.start()

    def kill(self) -> None:
        crash(self.server)

    def freeze(self) -> None:
        """Stop every process of it without closing anything."""
        self.frozen += freeze(self.server)

    def thaw(self) -> None:
        thaw(self.frozen)
        self.frozen.clear()

    def promote(self) -> None:
        assert self.sql("SELECT pg_promote(true, 60)")

    def follow(self, primary: "Postgres") -> None:
        """Start over as a standby of `primary`; what is here is thrown away."""
        self.thaw()
        if self.server.pid() is not None:
            self.kill()
        shutil.rmtree(self.server.data, ignore_errors=True)
        owner = primary.server.data.stat()
        if os.geteuid() == 0:
            os.chown(self.directory, owner.st_uid, owner.st_gid)
        conninfo = f"host=127.0.0.1 port={primary.port} user=postgres application_name={self.name}"
        command = [
            str(embedded.BINARIES / "pg_basebackup"),
            "-d",
            conninfo,
            "-D",
            str(self.server.data),
        ]
        subprocess.run(
            [*command, "-R", "-X", "stream", "-c", "fast", "--no-sync"],
            check=True,
            capture_output=True,
            cwd="/",
            **({"user": owner.st_uid, "group": owner.st_gid} if os.geteuid() == 0 else {}),
        )
        with (self.server.data / "postgresql.auto.conf").open(
            "a"
        ) as file:  # or nobody would answer once it is promoted
            file.write("synchronous_standby_names = ''\n")
        self.server.start()

    def synchronous(self, standbys: str) -> None:
        """Which standbys every commit waits for: `*`, or none."""
        self.sql(f"ALTER SYSTEM SET synchronous_standby_names = '{standbys}'")
        self.sql("SELECT pg_reload_conf()")
        if standbys:
            state = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
            until(lambda: self.sql(state) == 1, 30, "the standby is synchronous")

    def sql(self, statement: str) -> Any:
        """The first value of its answer. Works while commits wait for a standby."""

        async def ask() -> Any:
            connection = await asyncpg.connect(
                host="127.0.0.1",
                port=self.port,
                user="postgres",
                database="postgres",
                ssl=False,
                timeout=10,
                server_settings={"synchronous_commit": "local"},
            )
            try:
                return await connection.fetchval(statement, timeout=60)
            finally:
                connection.terminate()

        return asyncio.run(ask())

    def remove(self) -> None:
        self.thaw()
        if self.server.pid() is not None:
            self.server.stop("immediate")
        shutil.rmtree(self.directory, ignore_errors=True)


class Pair:
    """A primary and a standby that every commit waits for."""

    def __init__(self, *, replicated: bool = True) -> None:
        self.primary, self.standby = Postgres("one"), Postgres("two")
        self._replicated = replicated  # from the start

    def __enter__(self) -> Self:
        try:
            self.primary.start()
            if self._replicated:
                self.rejoin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        self.primary.remove()
        self.standby.remove()

    def url(self, *order: Postgres) -> str:
        """Names both, in this order; else the primary first."""
        hosts = ",".join(one.address for one in order or (self.primary, self.standby))
        return f"postgresql://postgres@{hosts}/postgres?sslmode=disable"

    def promote(self) -> None:
        """Promote the standby, whatever became of the primary. They change names here."""
        self.standby.promote()
        self.primary, self.standby = self.standby, self.primary

    def rejoin(self) -> None:
        """Make the other one a synchronous standby of the primary (again)."""
        self.standby.follow(self.primary)
        self.primary.synchronous("*")

    def cut_off(self) -> None:
        """Let the standby get nothing from now on."""
        self.standby.sql("ALTER SYSTEM SET primary_conninfo = ''")
        self.standby.sql("SELECT pg_reload_conf()")
        replicas = "SELECT count(*) FROM pg_stat_replication"
        until(lambda: self.primary.sql(replicas) == 0, 120, "the standby is cut off")

    def restore(self) -> None:
        """What a test before may have left frozen, stopped or apart is a pair again."""
        self.primary.thaw()
        self.standby.thaw()
        if self.primary.server.pid() is None:
            self.primary.start()
        state = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        if self.primary.sql(state) != 1:
            self.rejoin()
