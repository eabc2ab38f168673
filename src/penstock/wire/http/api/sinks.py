"""Exactly-once sinks ask here before they push: what was written under an identity keeps its
content.
"""

from penstock.protocol.sink_claims import Claim, Claimed, Commit
from penstock.queues.engine import Queues
from penstock.wire.http.messages import EMPTY, Request, Response, json_response
from penstock.wire.http.routes import Route

TAG = "pipelines"


def routes(queues: Queues) -> list[Route]:
    async def claim(request: Request) -> Response:
        return json_response(await queues.sinks.claim(request.data))

    async def commit(request: Request) -> Response:
        await queues.sinks.commit(request.data)
        return EMPTY

    return [
        Route(
            "POST",
            "/api/v1/sinks/claim",
            claim,
            body=Claim,
            answer=Claimed,
            summary="A task of an exactly-once sink asks whether it may push rows of this content",
            tag=TAG,
        ),
        Route(
            "POST",
            "/api/v1/sinks/commit",
            commit,
            body=Commit,
            status=204,
            summary="All tasks of a sink's batch have pushed: it takes no others",
            tag=TAG,
        ),
    ]
