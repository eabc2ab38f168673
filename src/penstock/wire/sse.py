"""Server-sent events: `GET /topics/{topic}/stream` as a subscriber of the topic's feed.

The feed writes records to the socket itself. The task of the request sleeps until the socket is
full, waits for room, and resumes the feed. A timer writes a comment every fifteen seconds.
"""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.topics.topic_log import TopicLog
from penstock.wire.feed import FeedChunk, Feeds
from penstock.wire.http.messages import Stream, StreamResponse

KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = (("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))


# waits for the topic; returns it and the first offset
Begin = Callable[[], Awaitable[tuple[TopicLog, int]]]


class EventStream:
    """One client of `/stream`."""

    __slots__ = ("_full", "_over", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._full: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = False  # the topic was deleted

    async def run(self, feeds: Feeds, begin: Begin) -> None:
        stop = feeds.keep_alive.add(self)
        try:
            await self._follow(feeds, *await begin())
        finally:
            stop()

    async def _follow(self, feeds: Feeds, topic: TopicLog, position: int) -> None:
        subscription = feeds.subscribe(topic, self, position)
        try:
            while True:
                await self._full
                if self._over:
                    return
                await self._stream.drained()
                self._full = asyncio.get_running_loop().create_future()
                subscription.resume()
        finally:
            subscription.close()

    def deliver(self, chunk: FeedChunk) -> bool:
        more = self._stream.write_now(chunk.sse)
        if not more:
            self._wake()
        return more

    def ended(self) -> None:
        self._over = True
        self._wake()

    def keep_alive(self) -> None:
        if not self._full.done():
            self._stream.write_now(KEEP_ALIVE)

    def _wake(self) -> None:
        if not self._full.done():
            self._full.set_result(None)


def stream_response(feeds: Feeds, begin: Begin) -> StreamResponse:
    async def run(stream: Stream) -> None:
        await EventStream(stream).run(feeds, begin)

    return StreamResponse(run, content_type="text/event-stream", headers=HEADERS, live=True)
