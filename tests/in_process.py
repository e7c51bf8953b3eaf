"""An engine in one process for tests: the real scheduler core and a real runner, a step at a time,
no channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ringcast.actors.scheduler.core import SchedulerCore
from ringcast.executor.runner import make_runner
from ringcast.mq import codec, messages
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.sampling_params import SamplingParams


class InProcessEngine:
    """Runs requests to their end.

    `tokens[request_id][choice]` are the output tokens, `ends` the StreamEnd of each,
    `prompt_logprobs[request_id]` their parts as they came.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self.scheduler = SchedulerCore(config, spec)
        self.runner = make_runner(config, spec)
        self.tokens: dict[str, dict[int, list[int]]] = {}
        self.ends: dict[tuple[str, int], messages.StreamEnd] = {}
        self.prompt_logprobs: dict[str, list[messages.PromptLogprobs]] = {}
        self._streams: dict[int, tuple[str, int]] = {}
        self._clock = itertools.count()
        self._dispatch(
            self.scheduler.handle("worker.0", self.runner.load(lambda *_: None), self._now())
        )

    def add(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        request = messages.AddRequest(
            request_id,
            0,
            codec.pack(prompt),
            params,
            messages.OutputSpec(0),
            arrival=float(self._now()),
            bad_words=[codec.pack(word) for word in bad_words],
        )
        self._dispatch(self.scheduler.handle("tokenizer.0", request, self._now()))

    def abort(self, request_id: str) -> None:
        self._dispatch(
            self.scheduler.handle("tokenizer.0", messages.AbortRequest(request_id, 0), self._now())
        )

    def step(self) -> None:
        plans = self._dispatch(self.scheduler.flush(self._now()))
        for plan in plans:
            self._dispatch(
                self.scheduler.handle("worker.0", self.runner.execute(plan), self._now())
            )

    def run(self) -> None:
        while self.scheduler.num_unfinished:
            self.step()
        self._dispatch(self.scheduler.flush(self._now()))

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        """Output tokens (choice 0) of all prompts, batched together."""
        names = [f"request-{next(self._clock)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self.add(name, prompt, params)
        self.run()
        return [self.tokens[name][0] for name in names]

    def _now(self) -> float:
        return float(next(self._clock))

    def _dispatch(self, effects: object) -> list[messages.StepPlan]:
        plans = []
        for send in effects:  # type: ignore[attr-defined]
            match send.message:
                case messages.StepPlan():
                    plans.append(send.message)
                case messages.OpenStream(stream=stream, request_id=request_id, choice=choice):
                    self._streams[stream] = (request_id, choice)
                    self.tokens.setdefault(request_id, {})[choice] = []
                case messages.StreamStep():
                    self._read(send.message)
        return plans

    def _read(self, step: messages.StreamStep) -> None:
        for part in step.prompt_logprobs:
            request_id, choice = self._streams[part.of]
            assert (choice, self.tokens[request_id][0]) == (0, [])
            self.prompt_logprobs.setdefault(request_id, []).append(part)
        arrays = (
            codec.ints(step.streams),
            codec.ints(step.token_index),
            codec.ints(step.token_ids),
        )
        for stream, index, token in zip(*(array.tolist() for array in arrays), strict=True):
            request_id, choice = self._streams[stream]
            tokens = self.tokens[request_id][choice]
            assert len(tokens) == index
            tokens.append(token)
        for end in step.ends:
            key = self._streams[end.stream]
            assert key not in self.ends
            self.ends[key] = end
