"""Exactly-once sinks ask here before they push: what was written under an identity keeps its
content.
"""

from penstock.protocol.sink_claims import Claim, Claimed, Commit
from penstock.queues.sinks import Sinks
from penstock.wire.http.messages import EMPTY, Request, Response, json_response
from penstock.wire.http.routes import route


class SinksApi:
    tag = "pipelines"

    def __init__(self, sinks: Sinks) -> None:
        self._sinks = sinks

    @route(
        "POST",
        "/api/v1/sinks/claim",
        body=Claim,
        answer=Claimed,
        summary="Ask whether a task of an exactly-once sink may write its rows; used by pipelines",
    )
    async def claim(self, request: Request) -> Response:
        return json_response(await self._sinks.claim(request.data))

    @route(
        "POST",
        "/api/v1/sinks/commit",
        body=Commit,
        status=204,
        summary="Mark a sink's batch as complete: further tasks of it are rejected; used by "
        "pipelines",
    )
    async def commit(self, request: Request) -> Response:
        await self._sinks.commit(request.data)
        return EMPTY
