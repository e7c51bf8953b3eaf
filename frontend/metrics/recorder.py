"""What befalls the requests of one client, gathered from its ledger.

Of a stream, each chunk is noted when it comes in: that gives the time to its first token and those
between its tokens, as near to what its user sees as this process is. An answer that isn't streamed
comes in large chunks whose times say nothing of its tokens, so its first token has the scheduler's
time, and its gaps are not in the histogram. Everything else is counted when a request is closed.
Times inside the engine (queue, prefill, decode) are those of the scheduler; a request that was
taken over after a death was computed twice and is left out of them.
"""

from __future__ import annotations

import time
from collections import Counter

from ...mq.messages import Chunk, Finish, Timing
from ..handle import RequestHandle
from .histogram import Histogram

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(d * 10**e for e in range(6) for d in (1, 2, 5))
CHOICES = (1, 2, 5, 10, 20, 50, 100)


class Recorder:
    """An EngineClient's `observer`.

    finished: choices that have ended, by finish_reason. "error" has those of requests that the
    engine had accepted and did not bring to their end, too.
    """

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.between_tokens = Histogram(TOKEN_SECONDS)
        self.per_token = Histogram(TOKEN_SECONDS)
        self.end_to_end = Histogram(REQUEST_SECONDS)
        self.queue = Histogram(REQUEST_SECONDS)
        self.prefill = Histogram(REQUEST_SECONDS)
        self.decode = Histogram(REQUEST_SECONDS)
        self.inference = Histogram(REQUEST_SECONDS)
        self.prompt_tokens = Histogram(TOKENS)
        self.generation_tokens = Histogram(TOKENS)
        self.n = Histogram(CHOICES)
        self.max_tokens = Histogram(TOKENS)
        self._last: dict[str, list[float]] = {}  # by request: when each choice was heard of last

    def opened(self, handle: RequestHandle) -> None:
        """All of a request is counted when something comes of it."""

    def received(self, handle: RequestHandle, chunk: Chunk, now: float) -> None:
        """A chunk has gone into the ledger. The hot path: nothing is done here that can wait."""
        last = self._last.get(chunk.request_id)
        if last is None:
            last = self._begin(handle, chunk, now)
        choice = chunk.choice
        before = last[choice]
        last[choice] = now
        if before and chunk.token_ids and handle.streamed:
            self.between_tokens.observe(now - before)

    def closed(self, handle: RequestHandle) -> None:
        """A request has left the ledger."""
        now = time.monotonic()
        last = self._last.pop(handle.request_id, None) or [now] * len(handle.finishes)
        finishes = [finish for finish in handle.finishes if finish is not None]
        if handle.accepted:
            self.finished["error"] += len(handle.finishes) - len(finishes)
        for finish, end in zip(handle.finishes, last, strict=True):
            if finish is not None:
                self._count_choice(handle, finish, end or now)
        if finishes and len(finishes) == len(handle.finishes):
            self._count_request(handle, finishes, now)

    def _begin(self, handle: RequestHandle, chunk: Chunk, now: float) -> list[float]:
        last = self._last[chunk.request_id] = [0.0] * len(handle.finishes)
        if handle.streamed and chunk.token_ids:
            self.first_token.observe(now - handle.request.arrival)
        return last

    def _count_choice(self, handle: RequestHandle, finish: Finish, end: float) -> None:
        self.finished[finish.reason] += 1
        self.generation_tokens.observe(finish.num_output_tokens)
        timing = finish.timing
        if timing is None or handle.request.incarnation:
            return
        decode = end - timing.first_token
        self.queue.observe(timing.scheduled - timing.queued)
        self.prefill.observe(timing.first_token - timing.scheduled)
        self.decode.observe(decode)
        self.inference.observe(end - timing.scheduled)
        if finish.num_output_tokens > 1:
            self.per_token.observe(decode / (finish.num_output_tokens - 1))

    def _count_request(self, handle: RequestHandle, finishes: list[Finish], now: float) -> None:
        request = handle.request
        self.end_to_end.observe(now - request.arrival)
        self.prompt_tokens.observe(finishes[0].num_prompt_tokens)
        self.n.observe(request.params.n)
        if request.params.max_tokens is not None:
            self.max_tokens.observe(request.params.max_tokens)
        timings: list[Timing] = [f.timing for f in finishes if f.timing is not None]
        if timings and not handle.streamed:
            first = min(timing.first_token for timing in timings)
            self.first_token.observe(first - request.arrival)
