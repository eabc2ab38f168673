"""What a job asks of a broker over HTTP: JSON there, JSON back, patiently.

Only for requests that may be made twice. `repeated` tells that the last one was: its first answer
may have been lost.
"""

import json
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote

from penstock.errors import (
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    PenstockError,
    StorageFull,
    Unauthorized,
    Unavailable,
)
from penstock.net.tls import open_url
from penstock.pipeline.options import bearer

ERRORS: dict[int, type[PenstockError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    503: Unavailable,
    507: StorageFull,
}
PAUSE, LONGEST_PAUSE = 0.1, 2.0


class Broker:
    def __init__(self, url: str, token: str | None = None, patience: float = 60.0) -> None:
        """Without a token the environment's PENSTOCK_TOKEN is used, if there is one."""
        self._url = url.rstrip("/")
        self.token = token
        self._headers = {"Content-Type": "application/json", **bearer(token)}
        self._patience = patience
        self.repeated = False

    def topic(self, *names: str) -> str:
        """The path of a topic, or of what is below it."""
        return "/".join(["/topics", *(quote(name, safe="") for name in names)])

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 60.0) -> Any:
        data = None if body is None else json.dumps(body).encode()
        deadline, pause = time.monotonic() + self._patience, PAUSE
        self.repeated = False
        while True:
            try:
                request = urllib.request.Request(
                    self._url + path, data, self._headers, method=method
                )
                with open_url(request, timeout=timeout) as answer:
                    return json.loads(answer.read() or b"null")
            except urllib.error.HTTPError as error:
                failure = _error(error)
                if not isinstance(failure, Unavailable):
                    raise failure from None
            except OSError as error:
                failure = Unavailable(f"the broker at {self._url} does not answer: {error}")
            if time.monotonic() + pause > deadline:
                raise failure
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            self.repeated = True


def _error(error: urllib.error.HTTPError) -> PenstockError:
    try:
        text = str(json.loads(error.read())["error"])
    except (ValueError, LookupError, TypeError, OSError):
        text = str(error)
    return ERRORS.get(error.code, PenstockError)(text)
