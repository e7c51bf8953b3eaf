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

from ...mq.messages import Chunk, Finish, Timing
from ...mq.tallies import Tallies
from ..handle import RequestHandle
from .records import Records


class Recorder(Records):
    """An EngineClient's `observer`. tallies: where its numbers are, beside those of others."""

    def __init__(self, tallies: Tallies | None = None) -> None:
        self._tallies = tallies or Tallies.local()
        super().__init__(self._tallies.metrics)
        self._last: dict[str, list[float]] = {}  # by request: when each choice was heard of last

    def of_all(self) -> Records:
        """The sums over all clients; of the others as far as they have flushed."""
        self.flush()
        return Records(self._tallies.metrics_of_all())

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
            self.finish("error", len(handle.finishes) - len(finishes))
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
        self.finish(finish.reason)
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
