"""The scheduler's core: requests in, step plans to the workers, tokens and ends to the detokenizer.

    AddRequest     opens a stream for each choice. The first choice waits for a row and blocks, the
                   others for its prefill. At a takeover only choices that are resumed have streams.
                   Each waits for itself, and goes on behind its output.
    StepOutput     gives each sampled sequence its token. The first token of a request's first
                   choice lets the others fork.
    StopStream     ends a stream after so many tokens.
    AbortRequest   ends what is open of a request, in this or an older incarnation.
    AbortClient    ends what is open of a client's requests that came by this tokenizer. A lost
                   client ends all of its (client_deaths.py).
    WorkerReady    of the last worker: there are blocks now. Admits the requests that came earlier.
    Ping           waits for the next plan, and goes on when that step's output is back.
    PeersGone      loses each of these peers, on another host than theirs. Answered last of all.
    ResetPrefixCache  makes the KV cache forget, and goes on at once. It always can: see KVCache.

Every stream that is opened ends by exactly one StreamEnd; those of a request that comes again with
a newer incarnation are aborted. What arrives for something that is no more (an abort, a stop, a
token of a row given up) is dropped. When a detokenizer is lost, its streams are aborted (of D
detokenizers, stream s is number s % D's): their clients come again. Its next incarnation may hear
that: a scheduler that has just started is told of older deaths late, and may have opened streams
for stragglers by then.

At a flush all tokens and ends go out as one StreamStep for each detokenizer, and steps are planned
and sent until `most_steps_in_flight` are out. So the workers find the next plan when they have
answered one: the scheduler runs ahead of them, and a sequence takes part although its newest token
is not back (sequence.py). What ends a sequence may then be seen late: what steps in flight still
sample for it is dropped, and counted as overshoot. A plan is empty only if a ping waits and no step
is out.
One of several replicas reports its load, too (load.py). Where replicas step together, plans are
sent as waves.py says, and are empty when there is nothing to compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Series
from typing import Any

from ...mq import codec, messages
from ...mq.config import EngineConfig, ModelSpec
from ...mq.kv_groups import longest_chunk
from ..core import PeerAdded, PeerLost, Send
from .client_deaths import ClientDeaths
from .expert_loads import ExpertTotals
from .kv_cache import KVCache
from .load import LoadReports
from .outbox import Outbox
from .packed import Repacker, packed
from .planner import Planner
from .request import Request
from .sequence import Sequence
from .step import Step
from .waves import Waves


class SchedulerCore:
    """Implements actors/core.py's Core: `handle` only takes note, `flush` sends."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        num_workers: int = 1,
        name: str = "scheduler.0",
        coordinator: str = "coordinator.0",
        has_coordinator: bool | None = None,
        num_tokenizers: int = 1,
        num_detokenizers: int = 1,
    ) -> None:
        self.name = name
        self._coordinator = coordinator
        self._reports = LoadReports()
        self._is_alone = (
            config.data_parallel_size == 1 if has_coordinator is None else not has_coordinator
        )
        self._waves = Waves(config.max_steps_in_flight) if config.lockstep else None
        self.kv = KVCache(
            config.block_size,
            config.enable_prefix_caching,
            config.prefix_caching_hash_algo,
            longest_chunk(config),
        )
        self.planner = Planner(config, self.kv)
        self._spec = spec
        self._num_workers = num_workers
        self._detokenizers = [f"detokenizer.{i}" for i in range(num_detokenizers)]
        self._max_steps_in_flight = config.most_steps_in_flight
        self._workers: dict[int, messages.WorkerReady] = {}  # by rank
        self._requests: dict[str, Request] = {}
        self._streams: dict[int, Sequence] = {}
        self._last_stream = -1
        self._in_flight: dict[int, Step] = {}
        self._pack_rows = Repacker()
        self._pings: list[messages.Ping] = []  # that wait for a plan
        self._client_deaths = ClientDeaths(f"tokenizer.{i}" for i in range(num_tokenizers))
        self._num_steps = 0
        self._generation_tokens = 0
        self._overshoot_tokens = 0
        self._step_seconds = 0.0
        self._ttft_seconds = 0.0
        self._num_first_tokens = 0
        self._experts = ExpertTotals()
        self._now = 0.0
        self._source = ""  # of the message that is handled
        self._outbox = Outbox(num_detokenizers)
        self._handlers: dict[type, Any] = {
            messages.StepOutput: self._take_output,
            messages.AddRequest: self._add,
            messages.AbortRequest: self._abort,
            messages.AbortClient: self._client_gone,
            messages.Ping: self._pings.append,
            messages.ResetPrefixCache: self._reset_prefix_cache,
            messages.StopStream: self._stop,
            messages.WorkerReady: self._worker_ready,
            messages.PeersGone: self._peers_gone,
        }
        if self._waves is not None:
            self._handlers[messages.StartWave] = self._waves.start
            self._handlers[messages.AskWave] = self._waves.ask

    def handle(self, source: str, message: Any, now: float) -> Series[Send]:
        self._now, self._source = now, source
        if isinstance(message, PeerLost):
            self._lose(source)
        elif isinstance(message, PeerAdded):
            self._is_alone = self._is_alone and source != self._coordinator
        else:
            self._handlers[type(message)](message)
        return ()

    def flush(self, now: float) -> Series[Send]:
        wanted, waves = bool(self._streams or self._pings), self._waves
        sends = self._plan(now) if (wanted or waves is not None) and self.ready else []
        if waves is not None:
            wanted = bool(self._streams or self._pings)
            sends += [Send(self._coordinator, word) for word in waves.words(wanted)]
        for detokenizer, told in zip(self._detokenizers, self._outbox.drain(), strict=True):
            sends += [Send(detokenizer, message) for message in told]
        if not self._is_alone:
            running = len(self.planner.running)
            waiting = len(self._streams) - running
            load = self._reports.take(waiting, running, self.kv.usage, now)
            sends += [Send(self._coordinator, load)] if load is not None else []
        return sends

    @property
    def ready(self) -> bool:
        return len(self._workers) == self._num_workers

    @property
    def num_unfinished(self) -> int:
        """Streams that are open."""
        return len(self._streams)

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._in_flight)

    def statistics(self) -> dict[str, float]:
        """running to free_blocks are of now; prefix_cache_queries and all after it are totals.

        chunked_prefills counts the chunks that left a part of their prompt for a later step;
        mixed_steps those with both a sequence that computed several tokens and one that computed
        one; overshoot_tokens were sampled behind the end of their sequence: dropped when they came,
        or cut off by a stop string; ttft_seconds is from the arrival of requests to the first token
        of their choices, of which there were first_tokens; step_seconds is what the workers spent
        on steps; waves and dummy_steps are of replicas that step together; the rest is in
        step_sizes.py and expert_loads.py.
        """
        planner, pool = self.planner, self.kv.pool
        running = len(planner.running)
        return {
            "running": running,
            "waiting": len(self._streams) - running,
            "kv_usage": self.kv.usage,
            "num_blocks": pool.num_blocks,
            "free_blocks": pool.num_free,
            "prefix_cache_queries": planner.prefix_queries,
            "prefix_cache_hits": planner.prefix_hits,
            "preemptions": planner.preemptions,
            "forks": planner.num_forks,
            "steps": self._num_steps,
            "mixed_steps": planner.mixed_steps,
            "chunked_prefills": planner.chunked_prefills,
            "scheduled_tokens": planner.scheduled_tokens,
            "prompt_tokens": planner.prompt_tokens,
            "generation_tokens": self._generation_tokens,
            "overshoot_tokens": self._overshoot_tokens,
            "step_seconds": self._step_seconds,
            "ttft_seconds": self._ttft_seconds,
            "first_tokens": self._num_first_tokens,
            **planner.step_sizes.statistics(),
            **self._experts.statistics(),
            **(self._waves.statistics() if self._waves is not None else {}),
        }

    def check(self) -> None:
        """Assert that no block, row or stream is lost. For tests and whenever the engine idles."""
        planner, in_flight = self.planner, self._in_flight.values()
        sequences = self._streams.values()
        self.kv.check(sequences)
        planner.check(in_flight)
        held = [s for request in self._requests.values() for s in request.held]
        early = [] if self.ready else [s for s in sequences if s not in held]
        known = Counter(
            sequence.stream
            for queue in (planner.running, planner.forks, planner.waiting, held, early)
            for sequence in queue
        )
        assert all(times == 1 for times in known.values()), "a sequence is in two queues"
        assert known.keys() == set(self._streams), "a stream is lost, or kept after its end"
        assert known.keys() == {
            stream for request in self._requests.values() for stream in request.open
        }
        assert all(request.open for request in self._requests.values()), "a request has no choice"
        for sequence in (*planner.waiting, *held, *early):
            assert not sequence.block_ids, "it waits, and has blocks"
        assert len(in_flight) <= self._max_steps_in_flight
        if self._waves is not None:
            self._waves.check()

    def _plan(self, now: float) -> list[Send]:
        in_flight, pings, waves = self._in_flight, self._pings, self._waves
        sends = []
        while len(in_flight) < self._max_steps_in_flight and (waves is None or waves.may_send):
            number = self._num_steps
            oldest = next(iter(in_flight), number)
            even_empty = waves is not None or bool(pings and not in_flight)
            has_work = bool(self._streams or pings)
            planned = self.planner.plan(number, oldest, even_empty, now)
            if planned is None:
                break
            step, removed = planned
            if waves is not None:
                step.wave = waves.send(has_work, is_dummy=not step.sequences)
            step.pings += pings
            pings.clear()
            in_flight[number] = step
            self._num_steps += 1
            sends.append(Send("workers", step.plan(removed, self._pack_rows)))
        return sends

    def _add(self, message: messages.AddRequest) -> None:
        self._client_deaths.heard(self._source)
        old = self._requests.get(message.request_id)
        if old is not None:
            if message.incarnation <= old.incarnation:
                return
            self._end_all(old)
        spec = self._spec
        ends = spec.eos_token_ids, spec.max_model_len
        streams = self._new_streams(message.detokenizer)
        request = Request(message, streams, *ends, self._now, self._source)
        self._requests[request.request_id] = request
        self._reports.count(request.client, len(request.open))
        for stream, sequence in request.open.items():
            self._streams[stream] = sequence
            self._outbox.opens.append(
                messages.OpenStream(
                    stream=stream,
                    request_id=request.request_id,
                    incarnation=request.incarnation,
                    choice=sequence.choice,
                    num_prompt_tokens=sequence.num_prompt,
                    params=request.params,
                    output=message.output,
                    resumed=packed(sequence.tokens[sequence.num_prompt :]),
                )
            )
        if self.ready:
            self._admit(request)

    def _new_streams(self, detokenizer: int) -> Iterator[int]:
        """Numbers of this detokenizer, above all given out: who came first is first (order.py)."""
        while True:
            first = self._last_stream + 1
            self._last_stream = first + (detokenizer - first) % len(self._detokenizers)
            yield self._last_stream

    def _admit(self, request: Request) -> None:
        refusal = self._refusal(len(request.prompt))
        if refusal is not None:
            self._end_all(request, "error", refusal)
            return
        for sequence in request.open.values():
            # The last token of a sequence is never computed, so it needs no slot.
            sequence.max_length = min(sequence.max_length, self.kv.num_slots + 1)
        for sequence in request.leading:
            if not (sequence.num_resumed and self._end_if_complete(sequence)):
                self.planner.add(sequence)

    def _end_if_complete(self, sequence: Sequence) -> bool:
        """Whether a choice that is resumed is at its end already. Then its end is said."""
        length, last = len(sequence.tokens), sequence.tokens[-1]
        if last in sequence.stop_ids and length >= sequence.min_length:
            self._end(sequence, "stop", self._stop_reason(last))
        elif length >= sequence.max_length:
            self._end(sequence, "length")
        else:
            return False
        return True

    def _refusal(self, num_tokens: int) -> messages.ErrorInfo | None:
        longest, slots = self._spec.max_model_len, self.kv.num_slots
        if not num_tokens:
            return messages.ErrorInfo("the prompt is empty: it must have at least 1 token")
        if num_tokens + 1 > longest:
            room = f"the context is {longest} tokens long"
        elif num_tokens + 1 > slots:
            blocks = f"{self.kv.pool.num_usable} blocks of {self.kv.block_size}"
            room = f"the KV cache has room for {slots} tokens ({blocks})"
        else:
            return None
        return messages.ErrorInfo(
            f"the prompt has {num_tokens} tokens, and {room}, of which the output needs at least 1",
            code="context_length_exceeded",
        )

    def _abort(self, message: messages.AbortRequest) -> None:
        request = self._requests.get(message.request_id)
        if request is not None and request.incarnation <= message.incarnation:
            self._end_all(request)

    def _abort_client(self, client: int, tokenizer: str = "") -> None:
        """tokenizer: only what came by this one."""
        for request in [r for r in self._requests.values() if r.client == client]:
            if tokenizer in ("", request.tokenizer):
                self._end_all(request)
        self._pings[:] = [
            ping
            for ping in self._pings
            if ping.client != client or tokenizer not in ("", f"tokenizer.{ping.tokenizer}")
        ]

    def _client_gone(self, message: messages.AbortClient) -> None:
        self._client_deaths.aborted(message.client, self._source)
        self._abort_client(message.client, self._source)

    def _lose(self, peer: str) -> None:
        kind, _, number = peer.partition(".")
        if kind == "client":
            self._client_deaths.lost(int(number))
            self._abort_client(int(number))
        elif kind == "tokenizer":  # with whatever AbortClient is still missing
            for client in self._client_deaths.lost_tokenizer(peer):
                self._abort_client(client, peer)
        elif peer == self._coordinator:
            self._reports.forget()
        elif kind == "detokenizer":
            for sequence in list(self._streams.values()):
                if self._detokenizers[sequence.stream % len(self._detokenizers)] == peer:
                    self._end(sequence, "abort")

    def _peers_gone(self, message: messages.PeersGone) -> None:
        for name in message.names:
            self._lose(name)
        self._outbox.gone_heard.append(messages.PeersGoneHeard(message.death))

    def _stop(self, message: messages.StopStream) -> None:
        sequence = self._streams.get(message.stream)
        if sequence is not None:
            assert 0 <= message.num_tokens <= sequence.num_output
            self._overshoot_tokens += sequence.num_output - message.num_tokens
            del sequence.tokens[sequence.num_prompt + message.num_tokens :]
            self._end(sequence, "stop")

    def _end(
        self,
        sequence: Sequence,
        reason: messages.FinishReason,
        stop_reason: int | None = None,
        error: messages.ErrorInfo | None = None,
    ) -> None:
        self._forget(sequence)
        self._outbox.ends.append(
            messages.StreamEnd(
                stream=sequence.stream,
                reason=reason,
                num_tokens=sequence.num_output,
                stop_reason=stop_reason,
                error=error,
            )
        )

    def _end_all(
        self,
        request: Request,
        reason: messages.FinishReason = "abort",
        error: messages.ErrorInfo | None = None,
    ) -> None:
        for sequence in list(request.open.values()):
            self._end(sequence, reason, error=error)

    def _forget(self, sequence: Sequence) -> None:
        request = sequence.request
        sequence.ended = True
        self.planner.remove(sequence)
        if sequence in request.held:
            request.held.remove(sequence)
        del self._streams[sequence.stream]
        del request.open[sequence.stream]
        self._reports.count(request.client, -1)
        if not request.open:
            del self._requests[request.request_id]

    def _reset_prefix_cache(self, message: messages.ResetPrefixCache) -> None:
        self.kv.reset(self._streams.values())
        self._outbox.resets.append(message)

    def _worker_ready(self, message: messages.WorkerReady) -> None:
        assert message.rank not in self._workers, f"worker {message.rank} got ready twice"
        assert message.block_size == self.kv.block_size, (
            "worker and scheduler disagree on block_size"
        )
        self._workers[message.rank] = message
        if self.ready:
            workers = self._workers.values()
            self.kv.open(min(worker.num_blocks for worker in workers), message.groups)
            assert all(worker.groups == message.groups for worker in workers)
            for request in list(self._requests.values()):
                self._admit(request)

    def _take_output(self, output: messages.StepOutput) -> None:
        step = self._in_flight.pop(output.step, None)
        if step is None:
            return
        if self._waves is not None:
            self._waves.hear(output.any_work)
        self._step_seconds += output.seconds
        if output.experts is not None:
            self._experts.take(output.experts)
        self._outbox.pings += step.pings
        kv = self.kv
        for sequence, num_computed in step.chunks:
            if num_computed >= sequence.cache_at:
                kv.register(sequence, num_computed)
        for part in output.prompt_logprobs:
            sequence = step.sequences[part.of]
            if not sequence.ended:  # if it was preempted: its first token may come with this, too
                self._outbox.add_prompt_logprobs(sequence.stream, part)
        rows = codec.ints(output.rows).tolist()
        token_ids = codec.ints(output.token_ids).tolist()
        first = len(self._outbox.token_ids)
        dropped = self._append(step, rows, token_ids)
        self._generation_tokens += len(rows) - len(dropped)
        self._overshoot_tokens += len(dropped)
        if output.logprobs is not None:
            self._outbox.add_logprobs(output.logprobs, rows, dropped, first)

    def _append(self, step: Step, rows: list[int], token_ids: list[int]) -> set[int]:
        """Give each row's sequence its token. Returns the rows whose sequences have ended since.

        The hot loop: what happens to every token happens here.
        """
        outbox = self._outbox
        streams, indices, kept = outbox.streams, outbox.token_index, outbox.token_ids
        sequences = step.sequences
        dropped = set()
        for row, token in zip(rows, token_ids, strict=True):
            sequence = sequences.get(row)
            if sequence is None or sequence.ended:
                dropped.add(row)
                continue
            tokens = sequence.tokens
            length = len(tokens)  # all of them computed by this step
            if length >= sequence.cache_at:
                self.kv.register(sequence, length)
            tokens.append(token)
            index = length - sequence.num_prompt
            streams.append(sequence.stream)
            indices.append(index)
            kept.append(token)
            if index == sequence.num_resumed:
                self._first_token(sequence, index)
            length += 1
            if token in sequence.stop_ids and length >= sequence.min_length:
                self._end(sequence, "stop", self._stop_reason(token))
            elif length >= sequence.max_length:
                self._end(sequence, "length")
        return dropped

    def _first_token(self, sequence: Sequence, index: int) -> None:
        """The first of this incarnation; what was resumed had its own."""
        request = sequence.request
        if not index:
            self._ttft_seconds += self._now - request.arrival
            self._num_first_tokens += 1
            timing = messages.Timing(request.queued, sequence.scheduled, self._now)
            self._outbox.timings.append((sequence.stream, timing))
        if sequence.num_cached > 0:
            self._outbox.cached.append((sequence.stream, sequence.num_cached))
        if request.held:
            held, request.held = request.held, []
            self.planner.fork(sequence, held)

    def _stop_reason(self, token: int) -> int | None:
        return None if token in self._spec.eos_token_ids else token
