"""What exactly-once sinks have written to queues, in PostgreSQL: any broker on the same database
finds it.
"""

from msgspec.structs import astuple

from penstock.database import Database, struct_of
from penstock.protocol.sink_claims import Claim, Claimed, Commit
from penstock.queues.catalog import check_text

KEPT_DAYS = 30  # a sink that has not written for this long is forgotten


class Sinks:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim(self, claim: Claim) -> Claimed:
        for name in ("target", "app", "checksum", "run", "note"):
            check_text(name, getattr(claim, name))
        (row,) = await self._database.fetch(
            "SELECT * FROM sink_claim($1, $2, $3, $4, $5, $6, $7)", *astuple(claim)
        )
        return struct_of(Claimed, row)

    async def commit(self, done: Commit) -> None:
        check_text("target", done.target)
        check_text("app", done.app)
        await self._database.fetch(
            """INSERT INTO sink_tasks (target, app, batch, task, queue_id, checksum, run, note)
               SELECT s.target, s.app, s.batch, -1, s.queue_id, '', '', '' FROM sink_tasks s
                WHERE s.target = $1 AND s.app = $2 AND s.batch = $3 LIMIT 1
               ON CONFLICT DO NOTHING""",
            *astuple(done),
        )

    async def forget_old(self) -> None:
        await self._database.fetch(
            """DELETE FROM sink_tasks s USING
                   (SELECT target, app FROM sink_tasks GROUP BY target, app
                    HAVING max(claimed_at) < now() - make_interval(days => $1)) old
                WHERE s.target = old.target AND s.app = old.app""",
            KEPT_DAYS,
        )
