"""A request as the scheduler knows it: one prompt and its choices."""

from __future__ import annotations

from collections.abc import Iterable

from ...mq import codec, messages
from .sequence import Sequence


class Request:
    """open: the choices that have not ended. held: those that wait to fork from the first one."""

    __slots__ = (
        "arrival",
        "bad_words",
        "held",
        "incarnation",
        "open",
        "params",
        "prompt",
        "request_id",
        "salt",
    )

    def __init__(
        self,
        message: messages.AddRequest,
        streams: Iterable[int],
        eos_token_ids: Iterable[int],
        max_model_len: int,
    ) -> None:
        params = message.params
        self.request_id = message.request_id
        self.arrival = message.arrival
        self.incarnation = message.incarnation
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
        sequences = [
            Sequence(self, stream, choice, stop_ids, max_length)
            for choice, stream in enumerate(streams)
        ]
        self.open = {sequence.stream: sequence for sequence in sequences}
        self.held = sequences[1:]

    @property
    def first(self) -> Sequence:
        """The choice that does the prefill. It is open for as long as others are held."""
        return next(iter(self.open.values()))
