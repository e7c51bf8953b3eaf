"""What a request's answer must be: the fake model's tokens, then stops and limits, step by step.

Written apart from the engine: the byte-level alphabet from its definition, the text by decoding the
bytes so far again for each token, stop strings by looking at every place where one may end.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from ringcast.executor.fake_runner import expected_tokens
from ringcast.mq.config import ModelSpec
from ringcast.mq.sampling_params import SamplingParams

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHARS = {byte: chr(byte) for byte in _PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(_OTHERS)}
BYTE_OF = [byte for byte, _ in sorted(_CHARS.items(), key=lambda pair: pair[1])]  # by token id
_TOKEN_OF = {byte: token for token, byte in enumerate(BYTE_OF)}


def encode(text: str) -> list[int]:
    return [_TOKEN_OF[byte] for byte in text.encode()]


def decode(tokens: list[int], final: bool) -> str:
    """The text of whole characters; a broken end is left out, or U+FFFD if `final`."""
    data = bytes(BYTE_OF[token] for token in tokens if token < 256)
    if final:
        return data.decode(errors="replace")
    for cut in range(min(4, len(data) + 1)):
        end = data[len(data) - cut :]
        try:
            end.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return data[: len(data) - cut].decode(errors="replace")
    return data.decode(errors="replace")


class Answer(NamedTuple):
    """All of a choice. texts[i]: what is text for sure after i tokens, in which no stop string has
    ended.
    """

    tokens: list[int]
    text: str
    reason: str
    stop_reason: int | str | None


@functools.lru_cache(maxsize=4096)
def _tokens(
    prompt: tuple[int, ...], choice: int, num_tokens: int, vocab: int, eos: int
) -> list[int]:
    spec = ModelSpec(
        name="",
        path="",
        tokenizer_path="",
        architecture="",
        vocab_size=vocab,
        max_model_len=0,
        eos_token_ids=[eos],
        hf_config={},
    )
    return expected_tokens(prompt, choice, num_tokens, spec)


def answer(
    prompt: list[int], choice: int, params: SamplingParams, spec: ModelSpec, num_slots: int
) -> Answer:
    """num_slots: tokens that fit in all KV blocks; the last one of a sequence needs none."""
    limit = min(spec.max_model_len, num_slots + 1) - len(prompt)
    if params.max_tokens is not None:
        limit = min(limit, params.max_tokens)
    (eos,) = spec.eos_token_ids
    tokens = _tokens(tuple(prompt), choice, limit, spec.vocab_size, eos)
    before = ""
    for count in range(1, limit + 1):
        armed = count >= params.min_tokens
        stop_token = armed and tokens[count - 1] in params.stop_token_ids
        told = count if not stop_token or params.include_stop_str_in_output else count - 1
        last = stop_token or count == limit
        text = decode(tokens[:told], final=last)
        found = _first_stop(text, len(before), params.stop) if armed else None
        if found is not None:
            end, stop = found
            shown = end if params.include_stop_str_in_output else end - len(stop)
            return Answer(tokens[:count], text[:shown], "stop", stop)
        if stop_token:
            return Answer(tokens[:count], text, "stop", tokens[count - 1])
        before = text
    return Answer(tokens, before, "length", None)


def _first_stop(text: str, start: int, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The first place after `start` where a stop string ends, and the longest that ends there."""
    for end in range(start + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None
