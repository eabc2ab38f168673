"""The spans of this process, kept in memory by the SDK's exporter."""

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.client import tracing


class Spans:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")
        patch.setattr(tracing, "tracer", lambda: self.tracer)

    def __call__(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def trace_of(self, name: str) -> int:
        (span,) = self(name)
        assert span.context is not None
        return span.context.trace_id
