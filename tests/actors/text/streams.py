"""A detokenizer core, and what it has sent, for tests of streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringcast.actors.text.detokenizer_core import DetokenizerCore
from ringcast.actors.text.text_tokenizer import TextTokenizer
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.messages import (
    Chunk,
    Chunks,
    OpenStream,
    OutputSpec,
    PromptLogprobs,
    StopStream,
    StreamEnd,
    StreamStep,
    TokenLogprobs,
)
from ringcast.mq.sampling_params import SamplingParams

Entry = tuple[int, int, int]  # stream, token index, token id


def packed_streams(streams: Sequence[int]) -> bytes:
    """StreamStep's field."""
    return np.array(streams, np.int64).tobytes()


class Streams:
    """A core, and what it has sent."""

    def __init__(self, spec: ModelSpec, tokenizer: TextTokenizer) -> None:
        self.core = DetokenizerCore(spec, tokenizer)
        self.tokenizer = tokenizer
        self.chunks: dict[str, list[Chunk]] = {}
        self.stops: list[StopStream] = []

    def open(
        self, stream: int, client: int = 0, choice: int = 0, incarnation: int = 0, **options: Any
    ) -> None:
        names = ("form", "delta", "null_usage", "index_offset", "tokens_as_ids", "continuous_usage")
        output = {name: options.pop(name) for name in names if name in options}
        output.setdefault("delta", True)
        params = SamplingParams(**options)
        spec = OutputSpec(client, response_id="id", model="tiny", created=1, **output)
        opened = OpenStream(stream, f"r{stream}", incarnation, choice, 5, params, spec)
        assert list(self.core.handle("scheduler.0", opened, 0.0)) == []

    def step(
        self,
        entries: Sequence[Entry],
        ends: Sequence[StreamEnd] = (),
        logprobs: TokenLogprobs | None = None,
        cached: Sequence[tuple[int, int]] = (),
        prompt_logprobs: Sequence[PromptLogprobs] = (),
    ) -> None:
        streams = packed_streams([entry[0] for entry in entries])
        index, ids = (codec.pack([entry[i] for entry in entries]) for i in (1, 2))
        more = list(ends), logprobs, list(cached), list(prompt_logprobs)
        step = StreamStep(streams, index, ids, *more)
        assert list(self.core.handle("scheduler.0", step, 0.0)) == []

    def flush(self) -> None:
        clients = []
        for send in self.core.flush(0.0):
            if isinstance(send.message, StopStream):
                assert send.to == "scheduler.0"
                self.stops.append(send.message)
                continue
            assert isinstance(send.message, Chunks)
            clients.append(send.to)
            for chunk in send.message.chunks:
                self.chunks.setdefault(chunk.request_id, []).append(chunk)
        assert len(clients) == len(set(clients))

    def say(self, stream: int, text: str, first: int = 0, cuts: Sequence[int] = ()) -> int:
        """A stream's tokens of `text`, a step each; returns the index of the next one."""
        ids = self.tokenizer.encode(text)
        for i, token_id in enumerate(ids):
            self.step([(stream, first + i, token_id)])
            if not cuts or i in cuts:
                self.flush()
        return first + len(ids)

    def end(self, stream: int, reason: str, num_tokens: int, **more: Any) -> None:
        self.step([], [StreamEnd(stream, reason, num_tokens, **more)])
        self.flush()

    def text(self, stream: int) -> str:
        return "".join(chunk.text for chunk in self.chunks.get(f"r{stream}", []))

    def ids(self, stream: int) -> list[int]:
        """All ids sent, with a check that the ledger has no gap."""
        ids: list[int] = []
        for chunk in self.chunks.get(f"r{stream}", []):
            assert chunk.first_index == len(ids)
            ids += codec.ints(chunk.token_ids).tolist()
        return ids

    def last(self, stream: int) -> Chunk:
        chunks = self.chunks[f"r{stream}"]
        assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        return chunks[-1]
