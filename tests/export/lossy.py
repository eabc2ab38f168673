"""A network that loses answers, between a route and a real broker."""

import asyncio
import contextlib

from tests.support.broker import BrokerProcess

BEFORE, AFTER = 7, 5  # every n-th POST is cut before it gets there, or when the answer comes back


class LossyProxy:
    """Passes requests on to a broker and cuts some connections."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker, self._posts, self.lost = broker, 0, 0

    async def __aenter__(self) -> "LossyProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                request, is_post = await self._message(reader)
                self._posts += is_post
                if is_post and self._posts % BEFORE == 0:
                    break
                port = self._broker.ports["http"]  # known while the broker is down, too
                there, there_too = await asyncio.open_connection("127.0.0.1", port)
                try:
                    there_too.write(request)
                    answer, _ = await self._message(there)
                finally:
                    there_too.close()
                if is_post and self._posts % AFTER == 0:
                    self.lost += 1
                    break
                writer.write(answer)
        writer.transport.abort()

    @staticmethod
    async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [
            line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
        ]
        body = await reader.readexactly(int(lengths[0].partition(b":")[2]) if lengths else 0)
        return head + body, head.startswith(b"POST")
