"""What a broker without topics answers where one that has them serves them: who to ask instead."""

from functools import partial

from penstock.wire.auth import Role
from penstock.wire.http.messages import Request, Response, error_response
from penstock.wire.http.routes import ANY, route

NO_TOPICS = (
    "This broker serves queues only (topics.enabled: false). Topics, and what pipelines report,"
    " are with the broker that has the topics: ask that one"
)
_refused = partial(route, ANY, hidden=True, role=Role.PUBLIC)


class NoTopicsApi:
    tag = "topics"

    @_refused("/topics")
    @_refused("/topics/{rest...}")
    @_refused("/api/v1/pipelines")
    @_refused("/api/v1/pipelines/{rest...}")
    @_refused("/api/v1/scrub")
    @_refused("/api/v1/tier")
    @_refused("/api/v1/tier/flush")
    @_refused("/api/v1/analytics/topic-groups")
    def refuse(self, _: Request) -> Response:
        return error_response(501, NO_TOPICS)
