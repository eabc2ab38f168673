"""One OpenTelemetry trace, from a request through the queue to the worker.

The client does it by itself where `opentelemetry-api` is installed. Here the spans are printed; a
program sends them to its collector instead.
"""

import asyncio

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock import Client, Message

spans = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("shop")


async def main() -> None:
    async with Client.from_env() as client:

        @client.consumer("traced-orders@billing")
        async def bill(message: Message) -> None:
            with tracer.start_as_current_span(f"bill order {message.data['id']}"):
                client.stop()

        with tracer.start_as_current_span("POST /orders"):
            await client.push("traced-orders", {"id": 7})
        await client.run()

    finished = spans.get_finished_spans()
    (request,) = [span for span in finished if span.name == "POST /orders"]
    print("one trace:")
    for span in sorted(finished, key=lambda span: span.start_time or 0):
        if span.context.trace_id == request.context.trace_id:
            print(" ", span.name)


if __name__ == "__main__":
    asyncio.run(main())
