"""Show the position of a queue source as a consumer group of the broker.

The checkpoint is authoritative. Moving the cursors of a group costs time for each partition with
new messages, and a batch over a hundred thousand partitions should not wait for it. So a thread
moves the cursors to the newest position, some partitions per step. The first pass of a run covers
all partitions, in case an earlier run was stopped before its last pass ended.
"""

import logging
import threading

from penstock.errors import PenstockError
from penstock.pipeline.sources.postgres import Postgres

log = logging.getLogger("penstock.pipeline")

PARTITIONS_PER_STEP = 1000


class Mirror:
    """Moves the group to the last position given to `move`, in the background."""

    def __init__(self, postgres: Postgres, queue: str, group: str) -> None:
        self._postgres, self._queue, self._group = postgres, queue, group
        self._shown: int | None = None  # the horizon that the cursors are at
        self._wanted: int | None = None
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="penstock-mirror", daemon=True)
        self._thread.start()

    def move(self, horizon: int) -> None:
        """Show this position soon; a later call replaces it."""
        with self._changed:
            self._wanted = horizon
            self._changed.notify()

    def stop(self, timeout: float = 10.0) -> None:
        """Show the last position, then end."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._wanted == self._shown and not self._stopping:
                    self._changed.wait()
                horizon = self._wanted
                if horizon is None or horizon == self._shown:
                    return
            try:
                self.show(horizon)
            except PenstockError as error:
                log.warning(
                    "group %s of queue %s could not be moved: %s", self._group, self._queue, error
                )
                with self._changed:
                    if self._stopping:
                        return
                    self._changed.wait(1.0)

    def show(self, horizon: int) -> None:
        start = "NULL" if self._shown is None else f"'{self._shown}'"
        after = 0
        while True:
            span = f"{start}::xid8, '{horizon}'::xid8"
            query = f"SELECT queue_mirror($1, $2, {span}, {after}, {PARTITIONS_PER_STEP})"
            ((reached,),) = self._postgres.rows(query, (self._queue, self._group))
            if reached == -1:
                self._postgres.rows(
                    "SELECT queue_subscribe(q.id, $2, NULL, 'all', NULL) FROM queues q "
                    "WHERE q.name = $1 AND q.deleted_at IS NULL",
                    (self._queue, self._group),
                )
            elif reached is None:
                break
            else:
                after = reached
        self._shown = horizon
