"""A request as the scheduler knows it: one prompt and its choices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...mq import codec, messages
from .sequence import Sequence


class Request:
    """open: the choices that have not ended. held: those that wait to fork from the first one; none
    of a request that is resumed, whose choices have nothing more in common than their prompt.
    counted: the prompt is in the statistics. hashes: of the prompt's full blocks, once they were
    asked for. priority: the lower, the more urgent. queued: when it got here. tokenizer: by which
    it came.
    """

    __slots__ = (
        "arrival",
        "bad_words",
        "client",
        "counted",
        "hashes",
        "held",
        "incarnation",
        "open",
        "params",
        "priority",
        "prompt",
        "queued",
        "request_id",
        "salt",
        "tokenizer",
    )

    def __init__(
        self,
        message: messages.AddRequest,
        streams: Iterator[int],
        eos_token_ids: Iterable[int],
        max_model_len: int,
        queued: float = 0.0,
        tokenizer: str = "",
    ) -> None:
        params = message.params
        self.tokenizer = tokenizer
        self.queued = queued
        self.request_id = message.request_id
        self.arrival = message.arrival
        self.incarnation = message.incarnation
        self.client = message.output.client
        self.priority = message.priority
        self.counted = False
        self.hashes: list[bytes] = []
        self.params = params
        self.bad_words = message.bad_words
        self.salt = message.cache_salt.encode()
        self.prompt: list[int] = codec.ints(message.prompt_token_ids).tolist()
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids = stop_ids.union(eos_token_ids)
        num_prompt = len(self.prompt)
        max_length = max_model_len
        if params.max_tokens is not None:
            max_length = min(max_length, num_prompt + params.max_tokens)
        outputs: dict[int, list[int]] = {choice: [] for choice in range(params.n)}
        if message.resume:
            outputs = {one.choice: codec.ints(one.token_ids).tolist() for one in message.resume}
        sequences = [
            Sequence(self, stream, choice, stop_ids, max_length, output)
            for (choice, output), stream in zip(outputs.items(), streams, strict=False)
        ]
        self.open = {sequence.stream: sequence for sequence in sequences}
        self.held = [] if message.resume else sequences[1:]

    @property
    def leading(self) -> list[Sequence]:
        """The choices that begin by a prefill of their own: the first, or all that are resumed.

        Of a new request: none has ended yet.
        """
        sequences = list(self.open.values())
        return sequences[: len(sequences) - len(self.held)]
