"""The sampling options that speak of tokens, held against the model's vocabulary."""

from __future__ import annotations

from collections.abc import Iterable

from ...mq import codec
from ...mq.errors import InvalidRequestError
from ...mq.sampling_params import SamplingParams
from .text_tokenizer import TextTokenizer


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequestError for a bias on, or the permission of, a token that isn't there."""
    options: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for field, ids in options.items():
        for token_id in ids:
            if token_id >= vocab_size:
                raise InvalidRequestError(
                    f"{field} names token id {token_id}: the model's vocabulary has {vocab_size} "
                    "tokens, from 0 up",
                    field,
                )


def tokenise_bad_words(
    words: Iterable[str], tokenizer: TextTokenizer, vocab_size: int
) -> list[bytes]:
    """Each word's tokens (i32), as it is written within a word and at the beginning of one.

    Raises InvalidRequestError for a word without tokens.
    """
    found: dict[bytes, None] = {}
    for word in words:
        within, *beginning = (tokenizer.encode(text, False) for text in _ways_to_write(word))
        if not within:
            raise InvalidRequestError(f"bad_words: {word[:80]!r} has no tokens", "bad_words")
        found[codec.pack(within)] = None
        for ids in beginning:
            # What ends with the tokens of `within` is impossible already.
            if ids[-len(within) :] != within:
                found[codec.pack(ids)] = None
    # A word with a token that the model can't say is never said.
    return [ids for ids in found if codec.ints(ids).max() < vocab_size]


def _ways_to_write(word: str) -> list[str]:
    bare = word.lstrip()
    return [bare, f" {bare}"] if bare else [word]
