"""Spans on their way to a collector; a real exporter, and a collector that is a socket."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from ringcast.frontend.metrics import span_exporter
from ringcast.frontend.metrics.request_spans import RequestSpan
from ringcast.frontend.metrics.span_exporter import SpanExporter
from ringcast.mq.errors import ConfigError

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SPAN = RequestSpan(
    start=10**18,
    end=10**18 + 5,
    attributes={"gen_ai.request.id": "cmpl-1", "gen_ai.usage.prompt_tokens": 3},
    context={},
)


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """What an exporter does to OpenTelemetry's loggers is undone."""
    logger = logging.getLogger("opentelemetry")
    before = logger.handlers.copy(), logger.propagate
    yield
    logger.handlers[:], logger.propagate = before


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(
        ConfigError, match=r"otlp_traces_endpoint = 'http://c/v1'.*ringcast\[otel\]"
    ):
        SpanExporter("http://c/v1")
    span_exporter.check(None)


async def test_what_a_collector_gets() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    async def collect(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        exporter = SpanExporter(f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces")
        exporter.export(SPAN)
        exporter.export(
            RequestSpan(
                start=SPAN.start,
                end=SPAN.end,
                attributes={},
                context={"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "x=y"},
                error="broken",
            )
        )
        unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        exporter.export(RequestSpan(start=1, end=2, attributes={}, context=unsampled))
        await exporter.close()
    finally:
        await runner.cleanup()
    (body,) = bodies
    asked = ExportTraceServiceRequest.FromString(
        gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
    )
    (resource,) = asked.resource_spans
    names = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert names["service.name"] == "ringcast"
    first, second = resource.scope_spans[0].spans
    assert (first.name, first.kind) == ("llm_request", 2)
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (10**18, 10**18 + 5)
    assert {a.key for a in first.attributes} == set(SPAN.attributes)
    assert (first.parent_span_id, first.status.code) == (b"", 0)
    assert (second.trace_id.hex(), second.parent_span_id.hex()) == (TRACE, PARENT)
    assert (second.status.code, second.status.message) == (2, "broken")


async def test_a_dead_collector_holds_up_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
    for name, value in (
        ("EXPORTER_OTLP_TIMEOUT", "0.5"),
        ("BSP_MAX_QUEUE_SIZE", "64"),
        ("BSP_MAX_EXPORT_BATCH_SIZE", "64"),
    ):
        monkeypatch.setenv(f"OTEL_{name}", value)
    monkeypatch.setattr(span_exporter, "FLUSH_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        exporter = SpanExporter(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces")
        start = time.monotonic()
        for _ in range(1000):  # more than the queue holds
            exporter.export(SPAN)
        await exporter.close()
        assert time.monotonic() - start < 5
        assert "the last spans were dropped" in caplog.text
        await threads_end()
    assert len([r for r in caplog.records if r.name == "ringcast.traces"]) <= 2


async def threads_end() -> None:
    """OpenTelemetry's threads give up once their time is over."""
    import threading

    others: list[Any] = [t for t in threading.enumerate() if t.name != "MainThread"]
    while any(thread.is_alive() for thread in others):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
