"""Exactly-once sinks ask here before they push: what was written under an identity keeps its
content.
"""

from penstock.protocol.sink_claims import Claim, Claimed, Commit
from penstock.queues.sinks import Sinks
from penstock.wire.http.routes import route


class SinksApi:
    tag = "pipelines"

    def __init__(self, sinks: Sinks) -> None:
        self._sinks = sinks

    @route("POST", "/api/v1/sinks/claim")
    async def claim(self, body: Claim) -> Claimed:
        """Ask whether a task of an exactly-once sink may write its rows; used by pipelines."""
        return await self._sinks.claim(body)

    @route("POST", "/api/v1/sinks/commit")
    async def commit(self, body: Commit) -> None:
        """Mark a sink's batch as complete: further tasks of it are rejected; used by pipelines."""
        await self._sinks.commit(body)
