"""The scheduler of a pooling model, whose requests have a vector as their output and no tokens.

A request is one sequence, computed whole in one step, without a KV cache. So it runs in one step
only: it enters with it, in order (order.py), as far as rows and the token budget go, and has ended
when that step's output is back. What it shares with other requests' ways (aborts, takeovers, pings,
the loss of others) is core.py's.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...mq import codec, messages
from ...mq.config import EngineConfig, ModelSpec
from .core import SchedulerCore
from .planner import Planner
from .request import Request
from .step import Step


class PoolingPlanner(Planner):
    """Nobody is preempted, and nobody passes the first one: the budget has room for any prompt."""

    def plan(
        self, number: int, oldest: int, even_empty: bool = False, now: float = 0.0
    ) -> tuple[Step, list[int]] | None:
        self._now = now
        step, budget = Step(number), self._budget
        while self._free_rows and (sequence := self.waiting.first()) is not None:
            count = len(sequence.tokens)
            if count > budget:
                break
            self.waiting.take(sequence)
            self._count_entry(sequence)
            self._enter(step, sequence)
            # Not step.compute: no token of it has its KV after that.
            step.sequences[sequence.row] = sequence
            step.num_tokens.append(count)
            step.num_prefills += 1
            budget -= count
        if not step.sequences and not even_empty:
            return None
        self._count(step)
        removed, self._removed = self._removed, []
        return step, removed

    def check(self, in_flight: Iterable[Step]) -> None:
        """Assert that rows are sound, and that all that run are in these steps."""
        rows = [*self._free_rows, *(sequence.row for sequence in self.running)]
        assert sorted(rows) == list(range(self._num_rows)), "a row is lost, or given out twice"
        steps = list(in_flight)
        computed = {s for step in steps for s in step.sequences.values() if not s.ended}
        assert computed == set(self.running), "a sequence runs in no step"
        assert all(sum(step.num_tokens) <= self._budget for step in steps), "over the budget"


class PoolingCore(SchedulerCore):
    """num_blocks and all that is said of the prefix cache are those of an empty KV cache."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        num_workers: int = 1,
        name: str = "scheduler.0",
        has_coordinator: bool | None = None,
        num_tokenizers: int = 1,
        num_detokenizers: int = 1,
    ) -> None:
        super().__init__(
            config,
            spec,
            num_workers,
            name,
            has_coordinator=has_coordinator,
            num_tokenizers=num_tokenizers,
            num_detokenizers=num_detokenizers,
        )
        assert spec.pooling is not None
        assert config.max_num_batched_tokens >= spec.max_model_len, "a prompt may not fit a step"
        self._vector_bytes = 4 * spec.pooling.dimension
        self.kv.caching = False
        self.planner = PoolingPlanner(config, self.kv)

    def _admit(self, request: Request) -> None:
        """The tokenizer has refused what is empty or too long."""
        for sequence in request.leading:
            self.planner.add(sequence)

    def _take_output(self, output: messages.StepOutput) -> None:
        step = self._in_flight.pop(output.step, None)
        if step is None:
            return
        self._step_seconds += output.seconds
        self._outbox.pings += step.pings
        size = self._vector_bytes
        for i, row in enumerate(codec.ints(output.rows).tolist()):
            sequence = step.sequences[row]
            if sequence.ended:
                continue
            vector = output.pooled[i * size : (i + 1) * size]
            self._outbox.pooled.append((sequence.stream, vector))
            self._first_token(sequence, 0)
            self._end(sequence, "stop")
