"""Embeddings of prompts: how a client asks for them, and what Python callers get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..mq import codec
from ..mq.errors import InvalidRequestError, RequestFailedError
from ..mq.messages import Chunk, OutputSpec, Prompt
from ..mq.sampling_params import SamplingParams
from .client import EngineClient
from .handle import RequestHandle
from .mailbox import Mailbox

_POOLED = OutputSpec(client=0, form="pooled")
_NOTHING = SamplingParams(max_tokens=1, seed=0)  # is sampled


@dataclasses.dataclass(slots=True)
class EmbeddingOutput:
    """One vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclasses.dataclass(slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt. `prompt` is the text, where the user gave one."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


@dataclasses.dataclass(slots=True)
class Embedded:
    """One prompt's vector, float32 [dimension], and its tokens as the tokenizer made them (i32)."""

    request_id: str
    vector: NDArray[np.float32]
    num_tokens: int
    prompt_token_ids: bytes

    def output(self, prompt: str | None, request_id: str | None = None) -> EmbeddingRequestOutput:
        return EmbeddingRequestOutput(
            request_id or self.request_id,
            prompt,
            codec.ints(self.prompt_token_ids).tolist(),
            EmbeddingOutput(self.vector.tolist()),
        )


async def embed(
    client: EngineClient,
    prompts: Sequence[Prompt],
    priorities: Sequence[int] | None = None,
    on_each: Callable[[Embedded], None] = lambda _: None,
    keep_prompt_tokens: int = 0,
) -> list[Embedded]:
    """All vectors in order. As many requests as the engine takes are in it at any time, the most
    urgent first. on_each: called with each as it comes. keep_prompt_tokens: as in Generate.

    Raises the first error of any, and then aborts the others.
    """
    urgency = priorities or [0] * len(prompts)
    by_urgency = sorted(range(len(prompts)), key=urgency.__getitem__)
    mailbox = Mailbox()
    places: dict[str, int] = {}
    handles: dict[str, RequestHandle] = {}
    done: dict[int, Embedded] = {}
    try:
        while len(done) < len(prompts):
            while len(places) < len(prompts) and client.room:
                place = by_urgency[len(places)]
                handle = client.submit(
                    prompts[place],
                    _NOTHING,
                    _POOLED,
                    mailbox=mailbox,
                    priority=urgency[place],
                    keep_prompt_tokens=keep_prompt_tokens,
                )
                places[handle.request_id], handles[handle.request_id] = place, handle
            if not handles:
                # Full of what other calls have left behind to be acknowledged.
                await client.wait_idle()
            for chunk in await mailbox.take():
                embedded = _embedded(handles.pop(chunk.request_id), chunk)
                done[places[chunk.request_id]] = embedded
                on_each(embedded)
    finally:
        for handle in handles.values():
            handle.discard()
    return [done[place] for place in range(len(prompts))]


def _embedded(handle: RequestHandle, chunk: Chunk) -> Embedded:
    if not chunk.pooled or chunk.finish is None:
        raise RequestFailedError(f"request {handle.request_id} was aborted")
    return Embedded(
        handle.request_id,
        codec.floats(chunk.pooled),
        chunk.finish.num_prompt_tokens,
        handle.prompt_token_ids,
    )


def cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """The cosine of the angle between two vectors; 0 where one has no length."""
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else 0.0


def pair_up(count_1: int, count_2: int, names: tuple[str, str]) -> list[tuple[int, int]]:
    """Which of the first texts is compared with which of the second: 1 with N, or N with N."""
    if count_1 == 1:
        return [(0, i) for i in range(count_2)]
    if count_1 == count_2:
        return [(i, i) for i in range(count_2)]
    raise InvalidRequestError(
        f"{names[0]} must be one text, or as many as {names[1]}: got {count_1} and {count_2}",
        param=names[0],
    )
