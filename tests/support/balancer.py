"""A load balancer in miniature: TCP connections, spread over the brokers that are ready."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Balancer:
    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(urls)
        self._next = 0
        self.ready: set[str] = set()
        self.accepted: dict[str, int] = dict.fromkeys(urls, 0)  # connections passed on
        self._pipes: set[asyncio.Task[None]] = set()
        self.url = ""

    async def check(self, interval: float) -> None:
        """As balancers do: a broker counts while its last probe was answered with 200."""
        while True:
            for url in self._urls:
                (self.ready.add if await _is_ready(url) else self.ready.discard)(url)
            await asyncio.sleep(interval)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._next += 1
        order = sorted(self.ready)
        for turn in range(len(order)):
            url = order[(self._next + turn) % len(order)]
            try:
                inward, outward = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
            except OSError:
                continue
            self.accepted[url] += 1
            for source, sink in ((reader, outward), (inward, writer)):
                pipe = asyncio.create_task(_copy(source, sink))
                self._pipes.add(pipe)
                pipe.add_done_callback(self._pipes.discard)
            return
        writer.close()

    async def close(self) -> None:
        for pipe in list(self._pipes):
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)


@asynccontextmanager
async def balancing(urls: Sequence[str], interval: float = 0.1) -> AsyncIterator[Balancer]:
    balancer = Balancer(urls)
    checking = asyncio.create_task(balancer.check(interval))
    server = await asyncio.start_server(balancer.serve, "127.0.0.1", 0)
    balancer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield balancer
    finally:
        server.close()
        await balancer.close()
        if checking.done():
            checking.result()  # raises what ended it
        checking.cancel()


async def _is_ready(url: str) -> bool:
    try:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
            try:
                writer.write(b"GET /health/ready HTTP/1.0\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    except ConnectionError:
        pass  # the other end has gone, and so does this one
    finally:
        sink.close()
