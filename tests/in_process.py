"""An engine in one process for tests: the real scheduler core and a real runner, a step at a time,
no channels. The scheduler runs ahead as far as it may: a step is executed after all plans have been
made that may be made before its output.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringcast.actors.scheduler.core import SchedulerCore
from ringcast.actors.text.logprob_rows import StepLogprobs
from ringcast.executor.runner import ModelRunner, make_runner
from ringcast.frontend.hub import resolve_model
from ringcast.mq import codec, messages
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.sampling_params import MAX_LOGPROBS, SamplingParams


class Together:
    """Replicas that step together. runner: of all their ranks (ranks.py)."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, runner: Any) -> None:
        replicas = range(config.data_parallel_size)
        self.runner = runner
        self.engines = [InProcessEngine(config, spec, runner) for _ in replicas]

    def run(self) -> None:
        """Until all have ended. Asserts that all send equally many plans."""
        while self.step():
            pass
        assert not any(engine.scheduler.num_unfinished for engine in self.engines)

    def step(self) -> bool:
        """Returns whether there was one."""
        for engine in self.engines:
            engine.plan()
        wanted = {wave for engine in self.engines for wave in engine.wanted}
        for engine in self.engines:
            for wave in sorted(wanted):
                engine.scheduler.handle("coordinator.0", messages.StartWave(wave), 0.0)
            engine.wanted.clear()
            engine.plan()
        plans = [engine._plans.popleft() for engine in self.engines if engine._plans]
        if plans:
            outputs = self.runner.execute_together(plans)
            for engine, output in zip(self.engines, outputs, strict=True):
                engine.take(output)
        return bool(plans)


def tiny_engine(folder: Path, **options: Any) -> InProcessEngine:
    """One with the random weights of the tiny model in `folder`, in float32, with small blocks."""
    defaults = {
        "model": str(folder),
        "load_format": "dummy",
        "max_model_len": 64,
        "dtype": "float32",
        "block_size": 4,
        "max_num_seqs": 16,
        "num_threads": 1,
        "num_gpu_blocks_override": 400,
    }
    config = EngineConfig(**(defaults | options))
    return InProcessEngine(config, resolve_model(config))


class InProcessEngine:
    """Runs requests to their end.

    `tokens[request_id][choice]` are the output tokens, `ends` the StreamEnd of each; of a request
    that was taken over, those of its last incarnation. `logprobs[request_id][choice]` are, for each
    token, those of itself and of the likeliest ones, by token id, where they were asked for;
    `prompt_logprobs[request_id]` are their parts as they came. `wanted` are the waves that the
    coordinator is asked for.
    """

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, runner: ModelRunner | None = None
    ) -> None:
        self.scheduler = SchedulerCore(config, spec)
        self.runner = runner or make_runner(config, spec)
        self.tokens: dict[str, dict[int, list[int]]] = {}
        self.ends: dict[tuple[str, int], messages.StreamEnd] = {}
        self.logprobs: dict[str, dict[int, list[dict[int, float]]]] = {}
        self.prompt_logprobs: dict[str, list[messages.PromptLogprobs]] = {}
        self.wanted: list[int] = []
        self._plans: deque[messages.StepPlan] = deque()  # not yet executed
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
        incarnation: int = 0,
        resume: dict[int, list[int]] | None = None,
    ) -> None:
        """resume: at a takeover, the output so far of each choice that goes on."""
        request = messages.AddRequest(
            request_id,
            incarnation,
            codec.pack(prompt),
            params,
            messages.OutputSpec(0),
            arrival=float(self._now()),
            bad_words=[codec.pack(word) for word in bad_words],
            resume=[
                messages.Resume(choice, codec.pack(tokens))
                for choice, tokens in (resume or {}).items()
            ],
        )
        self._dispatch(self.scheduler.handle("tokenizer.0", request, self._now()))

    def abort(self, request_id: str, incarnation: int = 0) -> None:
        message = messages.AbortRequest(request_id, incarnation)
        self._dispatch(self.scheduler.handle("tokenizer.0", message, self._now()))

    def step(self) -> None:
        self.plan()
        if self._plans:
            self.take(self.runner.execute(self._plans.popleft()))

    def plan(self) -> None:
        self._plans += self._dispatch(self.scheduler.flush(self._now()))

    def take(self, output: messages.StepOutput) -> None:
        self._dispatch(self.scheduler.handle("worker.0", output, self._now()))

    def run(self) -> None:
        while self.scheduler.num_unfinished or self._plans:
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
                case messages.WantWave(wave=wave):
                    self.wanted.append(wave)
                case messages.OpenStream():
                    self._open(send.message)
                case messages.StreamStep():
                    self._read(send.message)
        return plans

    def _open(self, opened: messages.OpenStream) -> None:
        key = (opened.request_id, opened.choice)
        self._streams = {stream: known for stream, known in self._streams.items() if known != key}
        self._streams[opened.stream] = key
        self.tokens.setdefault(opened.request_id, {})[opened.choice] = codec.ints(
            opened.resumed
        ).tolist()
        self.ends.pop(key, None)

    def _read(self, step: messages.StreamStep) -> None:
        for part in step.prompt_logprobs:
            request_id, choice = self._streams[part.of]
            assert (choice, self.tokens[request_id][0]) == (0, [])
            self.prompt_logprobs.setdefault(request_id, []).append(part)
        arrays = (
            codec.longs(step.streams),
            codec.ints(step.token_index),
            codec.ints(step.token_ids),
        )
        logprobs = StepLogprobs(step.logprobs) if step.logprobs is not None else None
        columns = zip(*(array.tolist() for array in arrays), strict=True)
        for at, (stream, index, token) in enumerate(columns):
            if stream not in self._streams:  # of an older incarnation
                continue
            request_id, choice = self._streams[stream]
            tokens = self.tokens[request_id][choice]
            assert len(tokens) == index
            tokens.append(token)
            row = logprobs and logprobs.row(at, index, MAX_LOGPROBS, lambda _: b"")
            if row:
                table = dict(zip(row.token_ids, row.logprobs, strict=True))
                table.pop(-1, None)  # of columns that the request didn't ask for
                self.logprobs.setdefault(request_id, {}).setdefault(choice, []).append(table)
        for end in step.ends:
            key = self._streams.get(end.stream)
            if key is not None:
                assert key not in self.ends
                self.ends[key] = end
