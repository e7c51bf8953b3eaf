"""`LLM`: a model in an engine of this process's own, for scripts: prompts in, results out."""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..mq.config import DEFAULT_MODEL
from ..mq.errors import EngineDeadError, InvalidRequestError
from ..mq.sampling_params import SamplingParams
from ..mq.supervision import Status
from .async_llm import AsyncLLM
from .beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from .cli.progress import StartProgress
from .client import EngineClient
from .embedding import EmbeddingRequestOutput, cosine, embed, pair_up
from .loop_thread import LoopThread
from .mailbox import Mailbox
from .outputs import RequestBuilder, RequestOutput
from .prompts import ReadPrompt, UserPrompt, chat_prompt, is_one_prompt, read_prompt

Messages = list[dict[str, Any]]


class LLM:
    """Starts its engine at once, on a thread of its own. It ends at `shutdown`, at the end of a
    `with` block, when nothing refers to this object any more, or at the interpreter's exit.

    model, options: as in `EngineConfig`, by name: dtype, max_model_len, max_num_seqs, ...
    Raises ConfigError that names the option at fault, or EngineDeadError with what died.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        with StartProgress() as progress:
            self._engine = AsyncLLM(model, on_progress=progress.update, **options)
            self._engine.resolve()
            self._thread = LoopThread()
            self._end = weakref.finalize(self, _shut_down, self._thread, self._engine, os.getpid())
            try:
                self._thread.run(self._engine.start())
            except BaseException:
                self._end()
                raise

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for, ours where it says nothing."""
        return self._engine.get_default_sampling_params()

    def generate(
        self,
        prompts: UserPrompt | Sequence[UserPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """One result for each prompt, in their order.

        prompts: text, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these.
        sampling_params: for all prompts, or one for each.
        use_tqdm: show a progress bar.
        priority: of all prompts, or one for each: the lower, the more urgent. For engines with
            scheduling_policy="priority".
        Raises InvalidRequestError when any of them can't be served, and then aborts the others.
        """
        given = [prompts] if is_one_prompt(prompts) else prompts
        jobs = [read_prompt(prompt, self._engine.spec.vocab_size) for prompt in given]
        return self._run(jobs, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several."""
        several = bool(messages) and isinstance(messages[0], list)
        conversations = messages if several else [messages]
        jobs = [
            ReadPrompt(
                chat_prompt(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template=chat_template,
                    template_kwargs=chat_template_kwargs,
                )
            )
            for conversation in conversations
        ]
        return self._run(jobs, sampling_params, use_tqdm, priority)

    def beam_search(
        self, prompts: UserPrompt | Sequence[UserPrompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences that beam search finds for each prompt, all prompts together.

        prompts: as in `generate`. beam_search.py says what is searched and how it is ranked.
        Raises InvalidRequestError when any of them can't be served.
        """
        given = [prompts] if is_one_prompt(prompts) else prompts
        jobs = [read_prompt(prompt, self._engine.spec.vocab_size) for prompt in given]
        ask = functools.partial(self._run, show_progress=False, priority=0)
        return beam_search(jobs, params, self._engine.spec, ask)

    def embed(
        self,
        prompts: UserPrompt | Sequence[UserPrompt],
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[EmbeddingRequestOutput]:
        """The embeddings of prompts, in their order, by an embedding model. As `generate` else."""
        given = [prompts] if is_one_prompt(prompts) else prompts
        jobs = [read_prompt(prompt, self._engine.spec.vocab_size) for prompt in given]
        priorities = _priority_of_each(priority, len(jobs))
        self._check_alive()
        with GenerateProgress(len(jobs), use_tqdm, "Embedding") as progress:
            embedded = self._thread.run(
                embed(
                    self._engine.client,
                    [job.prompt for job in jobs],
                    priorities,
                    lambda one: progress.advance(one.num_tokens),
                )
            )
        return [one.output(job.text) for one, job in zip(embedded, jobs, strict=True)]

    def score(
        self,
        text_1: UserPrompt | Sequence[UserPrompt],
        text_2: UserPrompt | Sequence[UserPrompt],
        use_tqdm: bool = True,
    ) -> list[float]:
        """How alike texts are: the cosine of their embeddings, from -1 to 1.

        One text is compared with each of text_2; as many as there are in text_2, each with its own.
        """
        first, second = ([t] if is_one_prompt(t) else list(t) for t in (text_1, text_2))
        pairs = pair_up(len(first), len(second), ("text_1", "text_2"))
        outputs = self.embed([*first, *second], use_tqdm)
        vectors = [np.array(output.outputs.embedding, dtype=np.float32) for output in outputs]
        return [cosine(vectors[a], vectors[len(first) + b]) for a, b in pairs]

    def stream(
        self,
        prompt: UserPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Generator[RequestOutput, None, None]:
        """The output of one prompt so far, each time there is more. Closing it aborts the rest."""
        yield from self._thread.iterate(
            self._engine.generate(prompt, sampling_params, priority=priority)
        )

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Generator[RequestOutput, None, None]:
        """As `stream`, for a conversation."""
        yield from self._thread.iterate(
            self._engine.chat(messages, sampling_params, priority=priority)
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all KV blocks computed so far: no request sent after this finds any of them.

        Requests that run go on. Always True, as no block's use stands in the way.
        """
        self._check_alive()
        return self._thread.run(self._engine.reset_prefix_cache())

    def start_profile(self) -> None:
        """Let the workers record what they do, until `stop_profile`; with torch_profiler_dir.

        Raises InvalidRequestError where that isn't set or they record already.
        """
        self._check_alive()
        self._thread.run(self._engine.start_profile())

    def stop_profile(self) -> str:
        """End the recording, write its traces, and print and return where they are, with a table of
        each: how long the device was idle, and which kernels took its time.
        """
        self._check_alive()
        report = self._thread.run(self._engine.stop_profile())
        print(report, flush=True)
        return report

    def status(self) -> Status:
        """The engine's processes, channels and statistics, as they are now."""
        self._check_alive()
        return self._thread.run(self._engine.status())

    def shutdown(self) -> None:
        """End the engine. Idempotent."""
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _check_alive(self) -> None:
        if not self._end.alive:
            raise EngineDeadError("this LLM has been shut down")

    def _run(
        self,
        jobs: list[ReadPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
        priority: int | Sequence[int],
    ) -> list[RequestOutput]:
        each = _one_for_each(params or self.get_default_sampling_params(), len(jobs))
        priorities = _priority_of_each(priority, len(jobs))
        self._check_alive()
        with GenerateProgress(len(jobs), show_progress) as progress:
            return self._thread.run(
                run_batch(self._engine.client, jobs, each, priorities, progress)
            )


async def run_batch(
    client: EngineClient,
    jobs: list[ReadPrompt],
    params: list[SamplingParams],
    priorities: list[int],
    progress: GenerateProgress,
) -> list[RequestOutput]:
    """All results in order. As many requests as the engine takes are in it at any time, the most
    urgent first.
    """
    by_urgency = sorted(range(len(jobs)), key=priorities.__getitem__)
    mailbox = Mailbox()
    builders: dict[str, RequestBuilder] = {}
    places: dict[str, int] = {}
    outputs: dict[int, RequestOutput] = {}
    try:
        while len(outputs) < len(jobs):
            while len(places) < len(jobs) and client.room:
                place = by_urgency[len(places)]
                job = jobs[place]
                handle = client.submit(
                    job.prompt, params[place], mailbox=mailbox, priority=priorities[place]
                )
                places[handle.request_id] = place
                builders[handle.request_id] = RequestBuilder(handle, job.text)
            if not builders:
                # Full of what other calls have left behind to be acknowledged.
                await client.wait_idle()
            for chunk in await mailbox.take():
                name = chunk.request_id
                builder = builders[name]
                builder.add(chunk)
                progress.add_tokens(len(chunk.token_ids) // 4)
                if builder.finished:
                    outputs[places[name]] = builder.output()
                    del builders[name]
                    progress.advance()
    finally:
        for builder in builders.values():
            builder.handle.discard()
    return [outputs[place] for place in range(len(jobs))]


class GenerateProgress:
    """How many prompts are done and how fast tokens come, as a bar on stderr."""

    def __init__(self, total: int, show: bool, doing: str = "Generating") -> None:
        self._num_tokens = 0
        self._start = time.monotonic()
        self._bar = Progress(
            TextColumn(doing),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not show,
        )
        self._task = self._bar.add_task("", total=total, speed="")

    def add_tokens(self, count: int) -> None:
        self._num_tokens += count

    def advance(self, num_tokens: int = 0) -> None:
        self._num_tokens += num_tokens
        speed = self._num_tokens / max(time.monotonic() - self._start, 1e-9)
        self._bar.update(self._task, advance=1, speed=f"{speed:.0f} tok/s")

    def __enter__(self) -> GenerateProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()


def _one_for_each(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    each = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(each) != count:
        raise InvalidRequestError(
            f"sampling_params must be one, or one for each of the {count} prompts, got {len(each)}",
            param="sampling_params",
        )
    for one in each:
        if not isinstance(one, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, got {type(one).__name__}",
                param="sampling_params",
            )
    return each


def _priority_of_each(priority: int | Sequence[int], count: int) -> list[int]:
    each = [priority] * count if isinstance(priority, int) else list(priority)
    if len(each) != count:
        raise InvalidRequestError(
            f"priority must be one, or one for each of the {count} prompts, got {len(each)}",
            param="priority",
        )
    for one in each:
        if type(one) is not int:
            raise InvalidRequestError(
                f"priority must be an integer, got {repr(one)[:80]}", param="priority"
            )
    return each


def _shut_down(thread: LoopThread, engine: AsyncLLM, pid: int) -> None:
    # A fork has this object but neither the thread nor the engine.
    if os.getpid() == pid:
        thread.run(engine.shutdown())
        thread.stop()
