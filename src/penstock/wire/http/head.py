"""Parse the head of a request, request line and headers, once per distinct byte sequence.

Clients on a kept-alive connection send the same head again and again. So the unit of parsing is the
whole head: llhttp (through httptools) parses it the first time, the router looks up its route, and
the result is cached under the exact bytes. The next request with these bytes costs one dictionary
lookup. A cached head was accepted by llhttp byte for byte, so the cache cannot change how a request
is read.

Framing is strict, because a disagreement about it is request smuggling. llhttp 9 refuses by
default: Content-Length together with Transfer-Encoding, repeated Content-Length, signs and lists in
it, bare CR or LF, folded lines, blanks before the colon, control characters. This module adds:
exactly one Host in HTTP/1.1, versions 1.0 and 1.1 only, no Transfer-Encoding but `chunked`, and no
fragment in the target.

Decisions that depend on the head alone are cached with it: the route, whether a web page may send
this (`origins`), and whether the route accepts the type and coding of the body.
"""

from collections.abc import Callable

import httptools

from penstock.wire.http.messages import CHUNKED, HttpHead, RequestRefused

_LARGEST_CACHED = 2048  # bytes
_GENERATION = 2048  # heads
_READ = frozenset(  # the headers that this module reads
    b"accept-encoding content-encoding content-length content-type expect host origin"
    b" sec-fetch-site transfer-encoding".split()
)


class HeadCache:
    """Heads by their bytes, in two generations; a head that a whole generation did not use is
    dropped.

    A head is cached from the second time on. Heads that are all different (a request id, an offset
    in the query) leave nothing behind for the garbage collector to walk over.
    """

    __slots__ = ("_route", "old", "seen", "young")

    def __init__(self, route: Callable[[HttpHead], None]) -> None:
        self._route = route  # sets endpoint and params
        self.seen: set[bytes] = set()  # seen once
        self.young: dict[bytes, HttpHead] = {}  # used in this generation
        self.old: dict[bytes, HttpHead] = {}  # used in the last one

    def get(self, raw: bytes) -> HttpHead:
        head = self.young.get(raw) or self.old.get(raw)
        if head is None:
            head = parse(raw)
            self._route(head)
            if raw not in self.seen:
                if len(self.seen) >= _GENERATION:
                    self.seen.clear()
                if len(raw) <= _LARGEST_CACHED:
                    self.seen.add(raw)
                return head
            self.seen.discard(raw)
        if len(self.young) >= _GENERATION:
            self.old, self.young = self.young, {}
        self.young[raw] = head
        return head


class _Collector:
    """Receives llhttp's callbacks for one head."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.parser = httptools.HttpRequestParser(self)
        self.complete = 0
        self.keep_alive = False
        self.method = self.version = ""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete += 1
        self.keep_alive = self.parser.should_keep_alive()
        self.version = self.parser.get_http_version()
        self.method = self.parser.get_method().decode("ascii")


class Partial:
    """A head that is still arriving: llhttp gets each piece once and refuses bad input early."""

    __slots__ = ("_collector", "_fed", "since")

    def __init__(self, since: float) -> None:
        self.since = since  # when its first bytes arrived
        self._collector = _Collector()
        self._fed = 0  # bytes that llhttp has seen

    def feed(self, head: bytes) -> None:
        """Parse what is new; `head` is everything that has arrived of it."""
        if head == b"\r":
            return  # may be half an empty line
        _feed(self._collector, head[self._fed :])
        self._fed = len(head)
        if self._collector.complete:
            raise RequestRefused(
                400, "Malformed request: the headers must end with an empty line (CR LF)"
            )


def _feed(collector: _Collector, data: bytes) -> None:
    try:
        collector.parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # upgrades are not supported: serve it as a plain request
    except httptools.HttpParserError as error:
        raise RequestRefused(400, f"Malformed request: {error}") from None


def parse(raw: bytes) -> HttpHead:
    """Parse the bytes of one head, its empty line included."""
    collector = _Collector()
    try:
        _feed(collector, raw)
    finally:
        # It refers to the collector: break the cycle, so that both are freed at once.
        del collector.parser
    if collector.complete != 1:
        raise RequestRefused(400, "Malformed request: incomplete headers")
    if collector.version not in ("1.1", "1.0"):
        raise RequestRefused(505, f"HTTP version {collector.version} is not supported, 1.1 is")
    try:
        target = collector.url.decode("ascii")
    except UnicodeDecodeError:
        raise RequestRefused(
            400, "Malformed request: the target must be ASCII, percent-encode the rest"
        ) from None
    if "#" in target:
        raise RequestRefused(400, "Malformed request: the target must not contain a fragment (#)")
    head = HttpHead(collector.method, target, origin_form(target), collector.headers)
    head.keep_alive = collector.keep_alive
    head.http10 = collector.version == "1.0"
    _read_headers(head)
    head.plain = head.keep_alive and not head.http10 and head.method != "HEAD"
    return head


def _read_headers(head: HttpHead) -> None:
    hosts = 0
    for name, value in head.headers:
        if name not in _READ:
            continue
        if name == b"content-length":
            head.length = int(value)
        elif name == b"transfer-encoding":
            if head.http10:
                raise RequestRefused(400, "Malformed request: Transfer-Encoding in HTTP/1.0")
            if value.lower() != b"chunked":
                raise RequestRefused(
                    501,
                    f"Transfer-Encoding {value.decode('latin-1')!r} is not supported, 'chunked' is",
                )
            head.length = CHUNKED
        elif name == b"host":
            hosts += 1
            head.host = value
        elif name == b"content-type":
            head.media = value
        elif name == b"content-encoding":
            head.coding = value if head.coding is None else head.coding + b"," + value
        elif name == b"origin" or name == b"sec-fetch-site":
            head.from_browser = True
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise RequestRefused(
                    417,
                    f"Expectation {value.decode('latin-1')!r} is not supported, '100-continue' is",
                )
            head.expects_continue = not head.http10
        elif name == b"accept-encoding":
            head.accepts_gzip = head.accepts_gzip or _names_gzip(value.decode("latin-1"))
    if hosts > 1 or (hosts == 0 and not head.http10):
        raise RequestRefused(
            400, f"Malformed request: {'several Host headers' if hosts else 'no Host header'}"
        )


def _names_gzip(accept_encoding: str) -> bool:
    for item in accept_encoding.lower().split(","):
        coding, *parameters = (part.strip() for part in item.split(";"))
        if coding == "gzip":
            return not any(
                part.replace(" ", "") in ("q=0", "q=0.0", "q=0.00", "q=0.000")
                for part in parameters
            )
    return False


def origin_form(target: str) -> str:
    """Return path and query of the target; a proxy's absolute form loses scheme and authority."""
    if target.startswith("/") or "://" not in target:
        return target
    rest = target.split("://", 1)[1]
    cut = min(
        (place for place in (rest.find("/"), rest.find("?")) if place >= 0), default=len(rest)
    )
    path = rest[cut:]
    return path if path.startswith("/") else "/" + path
