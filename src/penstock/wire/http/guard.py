"""Authenticate HTTP requests before their content is decoded.

With authentication off this module is not used. A request with a known token costs a dictionary
lookup and two comparisons: the cached head keeps its token.

A route names the role it needs. By default GET needs read-only, everything else read-write. Paths
in `skip_paths` need no token, and neither do answers without information (404, 405, preflight).

Server-sent events end when their token expires. A browser's EventSource cannot send headers, so
that route alone also accepts the query parameter `access_token`.
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
    HttpHead,
    Precheck,
    Request,
    RequestRefused,
    Stream,
    StreamResponse,
    finished,
)
from penstock.wire.http.routes import HttpRoute

EVENTS = "text/event-stream"


class TokenGuard:
    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        paths = [path.strip() for path in verifier.settings.skip_paths.split(",")]
        self._open = frozenset(path for path in paths if path)  # need no token
        # paths below these need no token either
        self._below = tuple(path for path in paths if len(path) > 1 and path.endswith("/"))

    def needs_token(self, path: str) -> bool:
        return path not in self._open and not (self._below and path.startswith(self._below))

    def protect(self, route: HttpRoute, call: Handler) -> tuple[Handler, Precheck | None]:
        """Return the guarded `call` and a check of the head; (call, None) for a public route."""
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

        def precheck(head: HttpHead) -> RequestRefused | None:
            try:
                if self.needs_token(head.path):
                    verifier.identify(token_of(head, in_query=events)).require(role)
            except UnknownKey:
                pass  # the whole request will fail with the right error
            except PenstockError as error:
                status = status_of(error).http
                return RequestRefused(status, str(error), CHALLENGE if status == 401 else ())
            return None

        return (_ending(guarded) if events else guarded), precheck

    def _authenticate(
        self, request: Request, token: str, role: Role, call: Handler
    ) -> Answer | Awaitable[Answer]:
        """Handle a new token, an expired one, one with too few rights, or none."""
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


def role_of(route: HttpRoute) -> Role:
    if route.role is not None:
        return route.role
    return Role.READ_ONLY if route.method in ("GET", "HEAD") else Role.READ_WRITE


def token_of(head: HttpHead, *, in_query: bool = False) -> str:
    """Return the bearer token of a request, "" without one. The word `Bearer` is optional."""
    return bearer(head.header("authorization"), head.query if in_query else "")


def _ending(handler: Handler) -> Handler:
    """End the streams of this handler when their token expires."""

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
                pass  # the client asks again and gets 401

        answer.run = until_expiry
        return answer

    async def later(request: Request, answer: Awaitable[Answer]) -> Answer:
        return limit(request, await answer)

    def limited(request: Request) -> Answer | Awaitable[Answer]:
        answer = handler(request)
        return limit(request, answer) if isinstance(answer, Answer) else later(request, answer)

    return limited
