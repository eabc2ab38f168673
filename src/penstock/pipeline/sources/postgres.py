"""Query PostgreSQL from Spark, as Arrow, through ADBC: binary COPY, and no Python object per row.

If the server is away (restart, failover), queries are repeated for `databaseTimeout` seconds: all
of them are safe to repeat. If a large answer breaks off in the middle, its reader handles that.
"""

import atexit
import copy
import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from penstock.errors import InvalidRequest, NotFound, Unavailable
from penstock.net.retry import Backoff
from penstock.pipeline.options import ReachOptions
from penstock.protocol.replication import STANDBY_LAG

log = logging.getLogger("penstock.pipeline")

PRIMARY = "primary"
# Errors of a server that stops, starts, fails over or has no free connection, and of a standby
# whose replay conflicts with a query (40001): they pass.
AWAY = {"57P01", "57P02", "57P03", "53300", "25006", "08000", "08003", "08006", "08001", "08004"}
AWAY |= {"40001"}

# The same in words, where libpq has no code for it, and what it says of settings that would be
# wrong again.
LOST = re.compile(
    "Failed to connect|server closed the connection|terminating connection|could not receive data"
)
WRONG = re.compile("authentication failed|does not exist|no pg_hba.conf entry|invalid|password")

# The tables' schema, and before it the functions of the newest release that works on them.
SEARCH_PATH = """
  SELECT set_config('search_path', coalesce((
    SELECT quote_ident(nspname) || ', ' FROM pg_namespace
     WHERE starts_with(nspname, left($1::text, 46) || '_fn_') ORDER BY oid DESC LIMIT 1), '')
    || quote_ident($1::text), false)"""


class Away(Unavailable):
    """PostgreSQL does not answer now, and may later."""


class Postgres:
    """The address of the broker's database. Picklable.

    Without the option `database` it is the database of the broker on this machine, according to the
    environment, penstock.yaml, or the broker that runs in ./penstock-data.
    """

    def __init__(self, options: ReachOptions, read_url: str = "") -> None:
        self.patience = options.database_timeout
        self.schema = options.database_schema or "penstock"
        self.url = options.database
        self._read_url = read_url
        if self.url:
            return
        # executors are given a URL and need no configuration
        from penstock.config.database_url import database_here

        try:
            self.url, schema, standby = database_here()
        except NotFound as error:
            raise InvalidRequest(
                f"queues are read from PostgreSQL, and its address is not known: {error}. Or give "
                "the option 'database', or set DATABASE_URL: `penstock database url`, on the "
                "broker's machine, prints it"
            ) from error
        self.schema = options.database_schema or schema
        self._read_url = self._read_url or standby

    def standby(self) -> "Postgres | None":
        """Return the standby that `readDatabase` or the configuration here names
        (`database.read_url`); None without one, or for the word `primary`. Writes and leases never
        go there.
        """
        if self._read_url in ("", PRIMARY):
            return None
        standby = copy.copy(self)
        standby.url = self._read_url
        return standby

    def behind_seconds(self) -> float:
        """Return how old a standby's rows may be."""
        return float(self.rows(STANDBY_LAG)[0][0] or 0.0)

    def connect(self, *, autocommit: bool = False) -> Any:
        """Return a new connection. Raise Away if the server may answer later, or Unavailable."""
        from adbc_driver_postgresql import dbapi

        try:
            connection = dbapi.connect(self.url, autocommit=autocommit)
            with connection.cursor() as cursor:
                cursor.execute(SEARCH_PATH, (self.schema,))
                cursor.fetchall()
        except dbapi.Error as error:
            raise failure("PostgreSQL cannot be reached", error) from error
        return connection

    @contextmanager
    def _ask(
        self, query: str, parameters: tuple[Any, ...] = (), *, copy: bool = True
    ) -> Iterator[Any]:
        """Yield a cursor with the query's answer. The connection is kept if nothing fails."""
        patience = Patience(self.patience)
        while True:
            try:
                connection, cursor = self._execute(query, parameters, copy=copy)
                break
            except Away as error:
                patience.wait(error)
        patience.end()
        try:
            yield cursor
        except BaseException:
            cursor.close()
            connection.close()
            raise
        cursor.close()
        _IDLE.setdefault((self.url, self.schema), []).append(connection)

    def _execute(self, query: str, parameters: tuple[Any, ...], *, copy: bool) -> tuple[Any, Any]:
        from adbc_driver_postgresql import dbapi

        idle = _IDLE.setdefault((self.url, self.schema), [])
        while True:
            try:
                # not checked first: another thread may have been faster
                connection, kept = idle.pop(), True
            except IndexError:
                connection, kept = self.connect(autocommit=True), False
            cursor = connection.cursor()
            if not copy:
                cursor.adbc_statement.set_options(**{"adbc.postgresql.use_copy": "false"})
            try:
                cursor.execute(query, parameters)
                return connection, cursor
            except dbapi.Error as error:
                cursor.close()
                connection.close()
                if kept:  # PostgreSQL may have been restarted since it was last used
                    continue
                raise failure("PostgreSQL refused", error) from error

    def rows(self, query: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return a small answer, as tuples."""
        with self._ask(query, parameters) as cursor:
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    def estimate(self, query: str) -> float:
        """Return how many rows PostgreSQL expects of a query."""
        with self._ask(f"EXPLAIN (FORMAT JSON) {query}", copy=False) as cursor:
            return float(json.loads(cursor.fetchone()[0])[0]["Plan"]["Plan Rows"])

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """Yield a large answer in batches, as they arrive."""
        from adbc_driver_postgresql import dbapi

        try:
            with self._ask(query) as cursor:
                yield from cursor.fetch_record_batch()
        # pyarrow raises the last two when it reads from a broken stream
        except (dbapi.Error, pa.ArrowException, OSError) as error:
            raise failure("PostgreSQL failed while a range was read", error) from error


class Patience:
    """Waits between attempts until time is up, and logs when it begins and when it is over."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began: float | None = None
        self._backoff = Backoff(first=0.1)

    def wait(self, reason: Exception) -> None:
        """Wait until the next attempt, or raise `reason` if there is none."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
            if self._seconds > 0:
                log.warning(
                    "%s; trying again for up to %g s (option databaseTimeout)",
                    reason,
                    self._seconds,
                )
        delay = self._backoff.delay()
        if now + delay > self._began + self._seconds:
            raise Unavailable(
                f"{reason}; it was away for {now - self._began:.0f} s. Raise the option "
                f"databaseTimeout ({self._seconds:g} s) to wait longer"
            ) from reason
        time.sleep(delay)

    def end(self) -> None:
        if self._began is not None:
            log.warning("PostgreSQL answers again after %.1f s", time.monotonic() - self._began)
            self._began = None
            self._backoff.reset()


def failure(what: str, error: Exception) -> Unavailable:
    """Return the driver's error without its details: Away if the server did not answer, Unavailable
    if it reported an error.
    """
    text = str(error).strip()
    away = bool(LOST.search(text)) and not WRONG.search(text)
    if state := getattr(error, "sqlstate", None):
        away = state in AWAY
    first_line = text.splitlines()[0] if text else type(error).__name__
    return (Away if away else Unavailable)(f"{what}: {first_line}")


# Connections of this process: ADBC is slow to open one.
_IDLE: dict[tuple[str, str], list[Any]] = {}


@atexit.register
def _close_idle() -> None:
    while _IDLE:
        for connection in _IDLE.popitem()[1]:
            connection.close()
