"""A step that has been launched on a device, until its tokens have been read."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ...mq import codec
from ...mq.messages import ExpertLoads, PromptLogprobs, StepOutput, TokenLogprobs
from .batch import Ints, Slot, Step
from .expert_watch import Report
from .prompt_logprobs import PendingTable
from .sampler_logprobs import PendingLogprobs

_NAP_SECONDS = 20e-6  # a device rings no bell


class GpuPending:
    """Between `begin` and `end` the step is enqueued on the current stream.

    step: whose tokens are answered. tell: who else hears of them, as soon as they are here.

    seconds of its StepOutput: on a device from its first operation's turn to its last one's end. Of
    a stage after the first this has in it what it waits for the one before.
    """

    def __init__(
        self,
        number: int,
        slot: Slot,
        step: Step | None,
        tell: Callable[[Ints, Ints], None],
        any_work: bool = False,
    ) -> None:
        """any_work: what StepOutput says."""
        self._number, self._slot, self._step, self._any_work = number, slot, step, any_work
        self._tell = tell
        self._tokens: Ints | None = None
        self._seconds = 0.0
        self.logprobs: PendingLogprobs | None = None
        self.prompts: list[PendingTable] = []
        self.experts: Report | None = None
        self._loads: ExpertLoads | None = None
        self._tables: tuple[TokenLogprobs | None, list[PromptLogprobs]] = (None, [])

    def begin(self) -> None:
        self._start = time.perf_counter()
        if self._slot.began is not None:
            self._slot.began.record()

    def end(self) -> None:
        if self._slot.ended is not None:
            self._slot.ended.record()
        self._seconds = time.perf_counter() - self._start

    def done(self) -> bool:
        return self._tokens is not None or self._slot.ended is None or self._slot.ended.query()

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.perf_counter() + timeout
        while not self.done():
            left = _NAP_SECONDS if end is None else end - time.perf_counter()
            if left <= 0:
                return False
            time.sleep(min(left, _NAP_SECONDS))
        return True

    def settle(self) -> None:
        """Wait, and take everything out of the slot, which another step gets then."""
        if self._tokens is not None:
            return
        self.wait()
        slot = self._slot
        if slot.began is not None and slot.ended is not None:
            self._seconds = slot.began.elapsed_time(slot.ended) / 1000
        count = 0 if self._step is None else len(self._step.sampled)
        self._tables = (
            self.logprobs.read() if self.logprobs is not None else None,
            [table.read() for table in self.prompts],
        )
        self._loads = None if self.experts is None else self.experts()
        self._tokens = np.array(slot.outputs[:count].numpy())
        if self._step is not None:
            self._tell(self._step.sampled, self._tokens)

    def read(self) -> StepOutput:
        self.settle()
        assert self._tokens is not None
        rows = b"" if self._step is None else codec.pack(self._step.sampled)
        logprobs, prompts = self._tables
        tokens = codec.pack(self._tokens)
        return StepOutput(
            self._number,
            rows,
            tokens,
            logprobs,
            self._seconds,
            prompts,
            any_work=self._any_work,
            experts=self._loads,
        )
