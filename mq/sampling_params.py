"""How the next token is chosen and when to stop: the part of a request that users set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_CHOICES = 128


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Sampling options by the names that vLLM and OpenAI clients use.

    n: how many choices to return for one prompt (one prefill, n forks).
    temperature: 0 is greedy. Above 0 logits are divided by it.
    top_p: smallest set of tokens whose probabilities sum to at least this, in (0, 1].
    top_k: only the k likeliest tokens; 0 or -1 is all.
    min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
    seed: the same seed draws the same numbers, whatever else is in the batch; None draws one.
    stop: strings that end the text; they are cut off unless include_stop_str_in_output.
    stop_token_ids: token ids that end the text, beside the model's own EOS ids.
    ignore_eos: go on past the model's EOS ids.
    max_tokens: most tokens to generate; None is up to the context length.
    min_tokens: no EOS, stop token or stop string before this many.
    logprobs: return the log-probabilities of the chosen token and of this many likeliest ones.
    skip_special_tokens: leave special tokens out of the text.

    Raises InvalidRequestError (a ValueError) naming the field and what it accepts.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop: Any = self.stop
        if isinstance(stop, str):
            stop = (stop,)
        msgspec.structs.force_setattr(self, "stop", tuple(stop or ()))
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        for field, types, accepted in _TYPES:
            value = getattr(self, field)
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                _refuse(field, value, accepted)
        for field, allowed, accepted in _RANGES:
            value = getattr(self, field)
            if value is not None and not allowed(value):
                _refuse(field, value, accepted)
        if not all(isinstance(s, str) and s for s in self.stop):
            _refuse("stop", self.stop, "non-empty strings")
        if len(self.stop) > MAX_STOP_STRINGS:
            _refuse("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
        if not all(
            isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in self.stop_token_ids
        ):
            _refuse("stop_token_ids", self.stop_token_ids, "token ids (integers, 0 or more)")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


_NUMBER = (int, float)
_TYPES: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("n", (int,), "an integer"),
    ("temperature", _NUMBER, "a number"),
    ("top_p", _NUMBER, "a number"),
    ("top_k", (int,), "an integer"),
    ("min_p", _NUMBER, "a number"),
    ("seed", (int, type(None)), "an integer or None"),
    ("include_stop_str_in_output", (bool,), "true or false"),
    ("ignore_eos", (bool,), "true or false"),
    ("max_tokens", (int, type(None)), "an integer or None"),
    ("min_tokens", (int,), "an integer"),
    ("logprobs", (int, type(None)), "an integer or None"),
    ("skip_special_tokens", (bool,), "true or false"),
)
_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("n", lambda v: 1 <= v <= MAX_CHOICES, f"an integer from 1 to {MAX_CHOICES}"),
    ("temperature", lambda v: 0.0 <= v < float("inf"), "a number of at least 0"),
    ("top_p", lambda v: 0.0 < v <= 1.0, "a number above 0 and at most 1"),
    ("top_k", lambda v: -1 <= v < 2**31, "-1 or 0 (all tokens), or a positive integer"),
    ("min_p", lambda v: 0.0 <= v <= 1.0, "a number from 0 to 1"),
    ("seed", lambda v: -(2**63) <= v < 2**63, "an integer of 64 bits"),
    ("max_tokens", lambda v: 1 <= v < 2**31, "an integer of at least 1"),
    ("min_tokens", lambda v: 0 <= v < 2**31, "an integer of at least 0"),
    ("logprobs", lambda v: 0 <= v <= MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}"),
)


def _refuse(field: str, value: object, accepted: str) -> None:
    shown = repr(value)
    raise InvalidRequestError(f"{field} must be {accepted}, got {shown[:80]}", param=field)
