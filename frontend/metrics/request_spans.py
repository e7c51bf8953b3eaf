"""What befell each request, as a span of a trace. It knows no OpenTelemetry: see span_exporter.py.

Names of spans and attributes are vLLM's, which are those of OpenTelemetry's conventions for
generative AI as far as these go. Times inside the engine are the scheduler's, as in recorder.py; a
request that was taken over after a death has none of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from ...mq.messages import Chunk, Finish
from ..client import Observer
from ..handle import RequestHandle

NAME = "llm_request"

Attribute = str | int | float | list[str]


class RequestSpan(msgspec.Struct, frozen=True, kw_only=True):
    """start, end: nanoseconds since 1970. context: W3C headers of its client. error: empty if it
    went well."""

    start: int
    end: int
    attributes: dict[str, Attribute]
    context: dict[str, str]
    error: str = ""


class RequestSpans:
    """An EngineClient's `observer` in front of another: makes a span of each request that closes.

    context: the W3C headers of whoever submits now. export: takes a span, and must not block.
    """

    def __init__(
        self,
        inner: Observer,
        context: Callable[[], dict[str, str]],
        export: Callable[[RequestSpan], None],
    ) -> None:
        self.received: Callable[[RequestHandle, Chunk, float], None] = inner.received
        self._inner = inner
        self._context = context
        self._export = export
        self._contexts: dict[str, dict[str, str]] = {}  # by request

    def opened(self, handle: RequestHandle) -> None:
        """A request has come into the ledger, in the task of whoever asks."""
        self._inner.opened(handle)
        self._contexts[handle.request_id] = self._context()

    def closed(self, handle: RequestHandle) -> None:
        """A request has left the ledger."""
        self._inner.closed(handle)
        context = self._contexts.pop(handle.request_id)
        self._export(span_of(handle, context, time.monotonic(), time.time_ns()))


def span_of(
    handle: RequestHandle, context: dict[str, str], now: float, wall_ns: int
) -> RequestSpan:
    """The span of a request that has ended just now: by the monotonic clock, and by the wall's."""
    finishes = [finish for finish in handle.finishes if finish is not None]
    seconds = now - handle.request.arrival
    return RequestSpan(
        start=wall_ns - round(seconds * 1e9),
        end=wall_ns,
        attributes={
            **_asked(handle),
            **_used(handle, finishes),
            **_latencies(handle, finishes, now),
            "gen_ai.latency.e2e": seconds,
        },
        context=context,
        error=_error(handle, finishes),
    )


def _asked(handle: RequestHandle) -> dict[str, Attribute]:
    request, params = handle.request, handle.request.params
    attributes: dict[str, Attribute] = {
        "gen_ai.request.id": request.output.response_id or request.request_id,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if request.output.model:
        attributes["gen_ai.response.model"] = request.output.model
    return attributes


def _used(handle: RequestHandle, finishes: list[Finish]) -> dict[str, Attribute]:
    return {
        "gen_ai.usage.prompt_tokens": len(handle.prompt_token_ids) // 4,
        "gen_ai.usage.completion_tokens": sum(len(emitted) // 4 for emitted in handle.emitted),
        "gen_ai.usage.num_sequences": len(handle.finishes),
        "gen_ai.response.finish_reasons": [finish.reason for finish in finishes],
    }


def _latencies(handle: RequestHandle, finishes: list[Finish], now: float) -> dict[str, Attribute]:
    timings = [finish.timing for finish in finishes if finish.timing is not None]
    if not timings or handle.request.incarnation:
        return {}
    queued = min(timing.queued for timing in timings)
    scheduled = min(timing.scheduled for timing in timings)
    first = min(timing.first_token for timing in timings)
    return {
        "gen_ai.latency.time_in_queue": scheduled - queued,
        "gen_ai.latency.time_to_first_token": first - handle.request.arrival,
        "gen_ai.latency.time_in_model_prefill": first - scheduled,
        "gen_ai.latency.time_in_model_decode": now - first,
        "gen_ai.latency.time_in_model_inference": now - scheduled,
    }


def _error(handle: RequestHandle, finishes: list[Finish]) -> str:
    for finish in finishes:
        if finish.reason == "error":
            return finish.error.message if finish.error else "failed inside the engine"
    if len(finishes) == len(handle.finishes):
        return ""
    if handle.accepted:
        return "ended with its engine"
    return "refused by the tokenizer, or ended before it was accepted"
