"""The guard in front of HTTP routes when authentication is on.

It wraps an endpoint before anything of a request is decoded. With authentication off there is no
guard, and endpoints are what they were. A request with a token we know costs a dictionary lookup
and two comparisons: the head, which is cached by its bytes, keeps the token that was in it.

Which role a route needs is said by the route; by default looking (GET) needs read-only, everything
else read-write. Paths in `skip_paths` need nothing, and neither do answers that say nothing (404,
405, preflight).

Server-sent events end when their token does. A browser's EventSource cannot send headers, so that
route alone also takes the token as the query parameter `access_token`.
"""

import asyncio
import math
import time
from collections.abc import Awaitable

from penstock.errors import Forbidden, PenstockError
from penstock.protocol.status import status_of
from penstock.wire.auth import Identity, Role, Verifier
from penstock.wire.auth.verifier import UnknownKey, bearer
from penstock.wire.http.messages import (
    CHALLENGE,
    Answer,
    Handler,
    Head,
    Precheck,
    Refused,
    Request,
    Stream,
    StreamResponse,
    finished,
)
from penstock.wire.http.routes import Route

EVENTS = "text/event-stream"


class TokenGuard:
    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        paths = [path.strip() for path in verifier.settings.skip_paths.split(",")]
        self._open = frozenset(path for path in paths if path)  # need no token
        # nor does what is below these
        self._below = tuple(path for path in paths if len(path) > 1 and path.endswith("/"))

    def needs_token(self, path: str) -> bool:
        return path not in self._open and not (self._below and path.startswith(self._below))

    def protect(self, route: Route, call: Handler) -> tuple[Handler, Precheck | None]:
        """`call` behind the guard, and a check of the head; (call, None) when it is public."""
        role = role_of(route)
        if role is Role.PUBLIC or (not route.parameters and not self.needs_token(route.path)):
            return call, None
        verifier, authenticate = self._verifier, self._authenticate
        identities = verifier.identities
        events = route.answer_type == EVENTS

        def guarded(request: Request) -> Answer | Awaitable[Answer]:
            head = request.head
            token = head.token
            if token is None:
                token = head.token = token_of(head, in_query=events)
            identity = identities.get(token)
            if identity is None or identity.expires <= time.time() or identity.role < role:
                return authenticate(request, token, role, call)
            head.identity = identity
            return call(request)

        def precheck(head: Head) -> Refused | None:
            try:
                if self.needs_token(head.path):
                    verifier.identify(token_of(head, in_query=events)).require(role)
            except UnknownKey:
                pass  # the whole request will find out
            except PenstockError as error:
                status = status_of(error).http
                return Refused(status, str(error), CHALLENGE if status == 401 else ())
            return None

        return (_ending(guarded) if events else guarded), precheck

    def _authenticate(
        self, request: Request, token: str, role: Role, call: Handler
    ) -> Answer | Awaitable[Answer]:
        """A token seen for the first time, one that has expired or allows too little, or none."""
        if not self.needs_token(request.head.path):
            return call(request)
        try:
            identity = self._verifier.identify(token)
        except UnknownKey:
            return self._learn_and_call(request, token, role, call)
        self._authorize(request, identity, role)
        return call(request)

    async def _learn_and_call(
        self, request: Request, token: str, role: Role, call: Handler
    ) -> Answer:
        self._authorize(request, await self._verifier.learn(token), role)
        return await finished(call(request))

    def _authorize(self, request: Request, identity: Identity, role: Role) -> None:
        try:
            identity.require(role)
        except Forbidden:
            self._verifier.count("role")
            raise
        request.head.identity = identity


def role_of(route: Route) -> Role:
    if route.role is not None:
        return route.role
    return Role.READ_ONLY if route.method in ("GET", "HEAD") else Role.READ_WRITE


def token_of(head: Head, *, in_query: bool = False) -> str:
    """The bearer token of a request, "" without one. The word `Bearer` may be missing."""
    return bearer(head.header("authorization"), head.query if in_query else "")


def _ending(handler: Handler) -> Handler:
    """Streams of this handler end when the token they were asked for with does."""

    def limit(request: Request, answer: Answer) -> Answer:
        identity = request.head.identity
        if identity is None or not isinstance(answer, StreamResponse):
            return answer
        run, remaining = answer.run, max(0.0, identity.expires - time.time())

        async def until_expiry(stream: Stream) -> None:
            try:
                async with asyncio.timeout(None if remaining == math.inf else remaining):
                    await run(stream)
            except TimeoutError:
                pass  # the client asks again and gets the error of an expired token

        answer.run = until_expiry
        return answer

    async def later(request: Request, answer: Awaitable[Answer]) -> Answer:
        return limit(request, await answer)

    def limited(request: Request) -> Answer | Awaitable[Answer]:
        answer = handler(request)
        return limit(request, answer) if isinstance(answer, Answer) else later(request, answer)

    return limited
