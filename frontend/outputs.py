"""What a generation returns, in the shape that vLLM's users know."""

from __future__ import annotations

import dataclasses

from ..actors.text.logprob_rows import LogprobRow, unpack_rows
from ..mq import codec
from ..mq.messages import Chunk, Finish
from .handle import RequestHandle


@dataclasses.dataclass(slots=True)
class Logprob:
    """rank is 1 for the likeliest token of its place; decoded_token is the token's own text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One choice. `logprobs` has for each token the chosen one and the likeliest ones, by token id.

    finish_reason: "stop", "length", "abort", or None while it runs.
    stop_reason: the stop string or stop token id that ended it, None for an EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """All choices of one request. `prompt` is the text, where the user gave one.

    prompt_token_ids is the same list in all outputs of a request.
    prompt_logprobs has for each token of the prompt itself and the likeliest ones, by token id, and
    None for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class ChoiceBuilder:
    """Puts a choice together from its chunks. changed: there is something new in it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish: Finish | None = None
        self.changed = False
        self._texts: list[str] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative: float | None = None

    def add(self, chunk: Chunk) -> None:
        self.changed = True
        packed = chunk.token_ids
        if len(packed) == 4:  # nearly always in a stream, and numpy would take much longer
            self.token_ids.append(int.from_bytes(packed, "little", signed=True))
        else:
            self.token_ids += codec.ints(packed).tolist()
        if chunk.text:
            self._texts.append(chunk.text)
        if chunk.finish is not None:
            self.finish = chunk.finish
        if chunk.logprobs is not None:
            for row in logprob_rows(chunk):
                self._cumulative = (self._cumulative or 0.0) + row.logprobs[0]
                self._logprobs.append(_by_token_id(row))

    @property
    def text(self) -> str:
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    def output(self) -> CompletionOutput:
        """A snapshot: later chunks don't change it."""
        return self._output(self.token_ids.copy(), self._logprobs.copy())

    def take(self) -> CompletionOutput:
        """What is new since the last time. (cumulative_logprob is of all.)"""
        output = self._output(self.token_ids, self._logprobs)
        self.changed = False
        self.token_ids, self._texts, self._logprobs = [], [], []
        return output

    def _output(self, token_ids: list[int], logprobs: list[dict[int, Logprob]]) -> CompletionOutput:
        finish = self.finish
        return CompletionOutput(
            self.index,
            self.text,
            token_ids,
            self._cumulative,
            logprobs or None,
            finish.reason if finish is not None else None,
            finish.stop_reason if finish is not None else None,
        )


class RequestBuilder:
    """Puts a request's output together from its chunks."""

    def __init__(
        self,
        handle: RequestHandle,
        prompt: str | None,
        request_id: str | None = None,
    ) -> None:
        self.handle = handle
        self.choices = [ChoiceBuilder(i) for i in range(handle.request.params.n)]
        self._prompt = prompt
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        self._request_id = request_id or handle.request_id

    def add(self, chunk: Chunk) -> None:
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs += prompt_logprobs(chunk)
        self.choices[chunk.choice].add(chunk)

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    def output(self) -> RequestOutput:
        """All so far."""
        return self._output([choice.output() for choice in self.choices])

    def take(self) -> RequestOutput:
        """What is new since the last time, of the choices that have something new."""
        return self._output([choice.take() for choice in self.choices if choice.changed])

    def _output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        asked = self.handle.request.params.prompt_logprobs is not None
        finishes = [choice.finish for choice in self.choices if choice.finish is not None]
        finish = finishes[0] if finishes else None
        if not self._prompt_token_ids:
            self._prompt_token_ids = codec.ints(self.handle.prompt_token_ids).tolist()
        return RequestOutput(
            self._request_id,
            self._prompt,
            self._prompt_token_ids,
            outputs,
            len(finishes) == len(self.choices),
            finish.num_prompt_tokens if finish is not None else None,
            finish.num_cached_tokens if finish is not None else None,
            self._prompt_logprobs.copy() if asked else None,
        )


def logprob_rows(chunk: Chunk) -> list[LogprobRow]:
    """The log-probabilities in a chunk, one row for each of its tokens."""
    if chunk.logprobs is None:
        return []
    return unpack_rows(chunk.logprobs, chunk.logprob_tokens, chunk.first_index)


def prompt_logprobs(chunk: Chunk) -> list[dict[int, Logprob]]:
    """Those of the request's prompt, from its second token on, if this chunk has them."""
    return [_by_token_id(row) for row in prompt_logprob_rows(chunk)]


def prompt_logprob_rows(chunk: Chunk) -> list[LogprobRow]:
    """The same, as rows."""
    if chunk.prompt_logprobs is None:
        return []
    return unpack_rows(chunk.prompt_logprobs, chunk.prompt_logprob_tokens)


def _by_token_id(row: LogprobRow) -> dict[int, Logprob]:
    entry: dict[int, Logprob] = {}
    columns = zip(row.token_ids, row.logprobs, row.texts, strict=True)
    for column, (token_id, logprob, text) in enumerate(columns):
        if text is not None:
            # The chosen token often comes again among the likeliest, where its column is its rank.
            entry.setdefault(
                token_id, Logprob(logprob, column or row.rank, text.decode(errors="replace"))
            )
    return entry
