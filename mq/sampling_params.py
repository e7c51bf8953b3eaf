"""How the next token is chosen and when to stop: the part of a request that users set."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec

from .errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 1024
MAX_CHOICES = 128
MAX_NESTING = 32


class RequestOutputKind(enum.Enum):
    """What each output of `AsyncLLM.generate` has: all so far, what is new, or all at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Sampling options by the names that vLLM and OpenAI clients use.

    n: how many choices to return for one prompt (one prefill, n forks).
    temperature: 0 is greedy. Above 0 logits are divided by it.
    top_p: smallest set of tokens whose probabilities sum to at least this, in (0, 1].
    top_k: only the k likeliest tokens; 0 or -1 is all.
    min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
    presence_penalty: taken from the logit of each token of the output so far, in [-2, 2].
    frequency_penalty: the same, once for each time that the token occurs in it, in [-2, 2].
    repetition_penalty: logits of tokens of the prompt or the output so far are divided by it where
        positive, multiplied where negative. Above 0 (1e-30 to 1e30); 1 is none.
    logit_bias: added to the logits of these token ids, each in [-100, 100].
    allowed_token_ids: no other token is possible; None allows all.
    bad_words: strings whose last token is impossible where the output ends with the tokens before
        it. They count at the beginning of a word as within one.
    seed: the same seed draws the same numbers, whatever else is in the batch; None draws one.
    stop: strings that end the text; they are cut off unless include_stop_str_in_output.
    stop_token_ids: token ids that end the text, beside the model's own EOS ids.
    ignore_eos: go on past the model's EOS ids.
    max_tokens: most tokens to generate; None is up to the context length.
    min_tokens: no EOS, stop token or stop string before this many.
    logprobs: return the log-probabilities of the chosen token and of this many likeliest ones.
    prompt_logprobs: the same for each token of the prompt but the first.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: False leaves the text empty, for callers that only want token ids.
    output_kind: what each output of `AsyncLLM.generate` has.
    extra_args: for the engine's own logits processors (--logits-processors), by name: what JSON
        has, with integers of 64 bits and 32 levels at most.

    Raises InvalidRequestError (a ValueError) naming the field and what it accepts.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for field in ("stop", "bad_words", "stop_token_ids"):
            value = getattr(self, field)
            self._set(field, (value,) if isinstance(value, str) else tuple(value or ()))
        if isinstance(self.allowed_token_ids, list | tuple):
            self._set("allowed_token_ids", tuple(self.allowed_token_ids))
        for field, types, accepted in _TYPES:
            value = getattr(self, field)
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                _refuse(field, value, accepted)
        for field, allowed, accepted in _RANGES:
            value = getattr(self, field)
            if value is not None and not allowed(value):
                _refuse(field, value, accepted)
        for field, most in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
            strings = getattr(self, field)
            if not all(isinstance(s, str) and s for s in strings):
                _refuse(field, strings, "non-empty strings")
            if len(strings) > most:
                _refuse(field, f"{len(strings)} strings", f"at most {most} strings")
        for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if not all(map(_is_token_id, getattr(self, field) or ())):
                _refuse(field, getattr(self, field), "token ids (integers, 0 or more)")
        self._check_together()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the sampler has to know which tokens there are already."""
        neutral = (0.0, 0.0, 1.0)
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != neutral

    def _set(self, field: str, value: object) -> None:
        msgspec.structs.force_setattr(self, field, value)

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.stop and not self.detokenize:
            _refuse("stop", self.stop, "absent where detokenize is false: there is no text")


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_bias(value: object) -> bool:
    return isinstance(value, _NUMBER) and not isinstance(value, bool) and -100 <= value <= 100


def _is_deeper(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return False
    return not levels or any(_is_deeper(item, levels - 1) for item in value)


def _can_travel(value: object) -> bool:
    """Whether a message can carry it, and every actor read it."""
    if _is_deeper(value, MAX_NESTING):
        return False
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


_NUMBER = (int, float)
_TYPES: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("n", (int,), "an integer"),
    ("temperature", _NUMBER, "a number"),
    ("top_p", _NUMBER, "a number"),
    ("top_k", (int,), "an integer"),
    ("min_p", _NUMBER, "a number"),
    ("presence_penalty", _NUMBER, "a number"),
    ("frequency_penalty", _NUMBER, "a number"),
    ("repetition_penalty", _NUMBER, "a number"),
    ("logit_bias", (dict, type(None)), "numbers by token id, or None"),
    ("allowed_token_ids", (tuple, type(None)), "token ids or None"),
    ("seed", (int, type(None)), "an integer or None"),
    ("include_stop_str_in_output", (bool,), "true or false"),
    ("ignore_eos", (bool,), "true or false"),
    ("max_tokens", (int, type(None)), "an integer or None"),
    ("min_tokens", (int,), "an integer"),
    ("logprobs", (int, type(None)), "an integer or None"),
    ("prompt_logprobs", (int, type(None)), "an integer or None"),
    ("skip_special_tokens", (bool,), "true or false"),
    ("detokenize", (bool,), "true or false"),
    ("output_kind", (RequestOutputKind,), "a RequestOutputKind"),
    ("extra_args", (dict, type(None)), "values by name, or None"),
)
_RANGES: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    ("n", lambda v: 1 <= v <= MAX_CHOICES, f"an integer from 1 to {MAX_CHOICES}"),
    ("temperature", lambda v: 0.0 <= v < float("inf"), "a number of at least 0"),
    ("top_p", lambda v: 0.0 < v <= 1.0, "a number above 0 and at most 1"),
    ("top_k", lambda v: -1 <= v < 2**31, "-1 or 0 (all tokens), or a positive integer"),
    ("min_p", lambda v: 0.0 <= v <= 1.0, "a number from 0 to 1"),
    ("presence_penalty", lambda v: -2.0 <= v <= 2.0, "a number from -2 to 2"),
    ("frequency_penalty", lambda v: -2.0 <= v <= 2.0, "a number from -2 to 2"),
    ("repetition_penalty", lambda v: 1e-30 <= v <= 1e30, "a number above 0 (1e-30 to 1e30)"),
    (
        "logit_bias",
        lambda v: all(map(_is_bias, v.values())),
        "numbers from -100 to 100, by token id",
    ),
    ("allowed_token_ids", len, "at least one token id, or None to allow all"),
    ("seed", lambda v: -(2**63) <= v < 2**63, "an integer of 64 bits"),
    ("max_tokens", lambda v: 1 <= v < 2**31, "an integer of at least 1"),
    ("min_tokens", lambda v: 0 <= v < 2**31, "an integer of at least 0"),
    ("logprobs", lambda v: 0 <= v <= MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}"),
    ("prompt_logprobs", lambda v: 0 <= v <= MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}"),
    (
        "extra_args",
        lambda v: all(isinstance(k, str) for k in v) and _can_travel(v),
        f"values by name, such as JSON has: integers of 64 bits, at most {MAX_NESTING} levels",
    ),
)


def _refuse(field: str, value: object, accepted: str) -> None:
    shown = repr(value)
    raise InvalidRequestError(f"{field} must be {accepted}, got {shown[:80]}", param=field)
