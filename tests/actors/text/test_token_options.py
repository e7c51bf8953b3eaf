"""Options that speak of tokens: bad words as token ids, and ids that the model doesn't have."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ringcast.actors.text.text_tokenizer import TextTokenizer
from ringcast.actors.text.token_options import tokenise_bad_words
from ringcast.actors.text.tokenizer_core import TokenizerCore
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.messages import AddRequest, Generate, OutputSpec, Rejected, TextPrompt
from ringcast.mq.sampling_params import SamplingParams


def words_of(tokenizer: TextTokenizer, *words: str, vocab_size: int = 10**6) -> list[list[int]]:
    return [codec.ints(w).tolist() for w in tokenise_bad_words(words, tokenizer, vocab_size)]


def send(spec: ModelSpec, tokenizer: TextTokenizer, **params: Any) -> Any:
    core = TokenizerCore(spec, tokenizer)
    request = Generate("r", 0, TextPrompt("x"), SamplingParams(**params), OutputSpec(0), 0.0)
    return core.handle("client.0", request, 0.0)[-1].message


def test_within_a_word_and_at_the_beginning_of_one(byte_level: TextTokenizer) -> None:
    encode = byte_level.encode
    within, beginning = encode("dog", False), encode(" dog", False)
    assert beginning[-len(within) :] != within
    assert words_of(byte_level, "dog") == words_of(byte_level, " dog") == [within, beginning]
    assert words_of(byte_level, "dog", "\n", " ") == [
        within,
        beginning,
        encode("\n", False),
        encode(" ", False),
    ]


def test_what_the_shorter_one_forbids_anyway_is_left_out(by_bytes: TextTokenizer) -> None:
    for word in ("qq", "the", "dog", "Zażółć", "!"):
        found = words_of(by_bytes, word, word)
        assert found[0] == by_bytes.encode(word, False)
        assert len(found) <= 2
        for other in found[1:]:
            assert other == by_bytes.encode(" " + word, False)
            assert other[-len(found[0]) :] != found[0]


def test_what_the_model_cannot_say_needs_no_mask(byte_level: TextTokenizer) -> None:
    (within, beginning) = words_of(byte_level, "dog")
    assert max(within) < max(beginning)
    assert words_of(byte_level, "dog", vocab_size=max(within) + 1) == [within]


def test_they_travel_with_the_request(spec: ModelSpec, byte_level: TextTokenizer) -> None:
    request = send(spec, byte_level, bad_words=["dog"])
    assert isinstance(request, AddRequest)
    assert [codec.ints(w).tolist() for w in request.bad_words] == words_of(byte_level, "dog")
    assert request.params.bad_words == ("dog",)


@pytest.mark.parametrize(
    ("param", "value"),
    [("logit_bias", {0: 1.0, 504: 2.0}), ("allowed_token_ids", [1, 504])],
)
def test_ids_outside_the_vocabulary(
    spec: ModelSpec, byte_level: TextTokenizer, param: str, value: Any
) -> None:
    assert byte_level.vocab_size == 504
    refusal = send(spec, byte_level, **{param: value})
    assert isinstance(refusal, Rejected)
    assert (refusal.error.status, refusal.error.param) == (400, param)
    assert f"{param} names token id 504: the model's vocabulary has 504" in refusal.error.message
    wide = msgspec.structs.replace(spec, vocab_size=505)
    assert isinstance(send(wide, byte_level, **{param: value}), AddRequest)


def test_a_word_without_tokens(spec: ModelSpec, word_piece: TextTokenizer) -> None:
    refusal = send(spec, word_piece, bad_words=["the", "\t"])
    assert isinstance(refusal, Rejected)
    assert (refusal.error.status, refusal.error.param) == (400, "bad_words")
    assert refusal.error.message == "bad_words: '\\t' has no tokens"
