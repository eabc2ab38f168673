"""Spans that survive a backend that is away.

The spans go to the broker, and a route delivers them. Here the backend is a small server that
starts after the spans were sent. In a real setup it is a collector, and the route is in the
configuration of the broker.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from os import environ

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from penstock import Client

BROKER = environ.get("PENSTOCK_URL", "http://127.0.0.1:6632")
BACKEND_PORT = int(environ.get("BACKEND_PORT", "4318"))
SPANS = 1000


def work() -> None:
    """Record spans and hand them to the broker."""
    exporter = OTLPSpanExporter(f"{BROKER}/api/v1/routes/example-spans/v1/traces")
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("shop")
    for number in range(SPANS):
        with tracer.start_as_current_span(f"order {number}"):
            pass
    provider.shutdown()


@asynccontextmanager
async def backend() -> AsyncIterator[list[bytes]]:
    """What an OTLP backend does: read a request, answer 200. Yields the bodies."""
    bodies: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := (await reader.readuntil(b"\r\n\r\n")).decode("latin-1"):
            length = next(
                int(line.partition(":")[2])
                for line in head.splitlines()
                if line.lower().startswith("content-length:")
            )
            bodies.append(await reader.readexactly(length))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", BACKEND_PORT)
    yield bodies
    server.close()


async def queued(client: Client) -> int:
    queue = (await client.routes.get("example-spans")).queue
    return queue.records if queue is not None else 0


async def main() -> None:
    async with Client.from_env() as client:
        await client.routes.create(
            "example-spans",
            destination={"type": "otlp", "url": f"http://127.0.0.1:{BACKEND_PORT}"},
            queue={"retry_interval": "1s", "circuit_breaker": {"reset_timeout": "1s"}},
        )
        await asyncio.to_thread(work)
        waiting = await queued(client)
        print(f"the backend is away, requests in the queue: {waiting}")
        async with backend() as bodies:
            while await queued(client):
                await asyncio.sleep(0.1)
        found = b"".join(bodies)
        arrived = sum(b"order %d" % number in found for number in range(SPANS))
        print(f"the backend is back, spans delivered: {arrived}")
        await client.routes.delete("example-spans")


if __name__ == "__main__":
    asyncio.run(main())
