"""The way of spans to an OpenTelemetry collector: OTLP over HTTP. Needs the extra otel.

Spans wait in a bounded queue for a thread of OpenTelemetry's own; a full queue drops them, and so
does a collector that doesn't answer. Nobody waits for it but, for a moment, the end of the server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from ...mq.errors import ConfigError
from .request_spans import NAME, RequestSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

FLUSH_SECONDS = 2.0  # that the end of the server waits for what has not been sent
_COMPLAIN_SECONDS = 60.0
_SERVICE = "ringcast"

_log = logging.getLogger("ringcast.traces")


def check(endpoint: str | None) -> None:
    """Raises ConfigError if spans are to be exported and the packages for it aren't there."""
    if endpoint is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint = {endpoint!r}: needs OpenTelemetry, which isn't installed "
            f"({error.name}): pip install 'ringcast[otel]'"
        ) from None


class SpanExporter:
    """Sends spans to a collector.

    exporter: one of OpenTelemetry's SDK; by default that for `endpoint`. Other settings are the
    SDK's own variables (OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER, ...).
    """

    def __init__(self, endpoint: str, exporter: Any = None) -> None:
        check(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        logging.getLogger("opentelemetry").addHandler(_Complaints(endpoint))
        logging.getLogger("opentelemetry").propagate = False
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint))
        )
        self._tracer = self._provider.get_tracer(_SERVICE)
        propagator: Any = TraceContextTextMapPropagator()
        self._extract = propagator.extract
        self._kind = SpanKind.SERVER
        self._status, self._error = Status, StatusCode.ERROR

    def export(self, span: RequestSpan) -> None:
        """Put a span into the queue, below its client's, whose choice of sampling holds."""
        started = self._tracer.start_span(
            NAME,
            context=self._extract(span.context),
            kind=self._kind,
            attributes=span.attributes,
            start_time=span.start,
        )
        if span.error:
            started.set_status(self._status(self._error, span.error))
        started.end(span.end)

    async def close(self) -> None:
        """Send what waits, as far as that goes within FLUSH_SECONDS."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        # A daemon, so that a collector which doesn't answer can't keep the process.
        threading.Thread(target=shut_down, name="opentelemetry shutdown", daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), FLUSH_SECONDS)
        except TimeoutError:
            _log.warning("the last spans were dropped: the collector doesn't answer")


class _Complaints(logging.Handler):
    """Says once a minute what OpenTelemetry says with each batch that it can't send."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(logging.WARNING)
        self._endpoint = endpoint
        self._next = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + _COMPLAIN_SECONDS
            _log.warning("spans for %s: %s", self._endpoint, record.getMessage())


def _resource() -> Resource:
    from opentelemetry.sdk.resources import Resource

    named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    return Resource.create({} if named else {"service.name": _SERVICE})
