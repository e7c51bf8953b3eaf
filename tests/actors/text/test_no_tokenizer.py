"""Engines without a tokenizer: token ids go through both cores, and text is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from actors.text.streams import packed_streams

from ringcast.actors.text.detokenizer_core import DetokenizerCore
from ringcast.actors.text.logprob_rows import unpack_rows
from ringcast.actors.text.tokenizer_core import TokenizerCore
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.messages import (
    AddRequest,
    ChatPrompt,
    Detokenize,
    Generate,
    OpenStream,
    OutputSpec,
    Prompt,
    Rejected,
    StreamEnd,
    StreamStep,
    TextPrompt,
    Tokenize,
    TokenLogprobs,
    TokensPrompt,
)
from ringcast.mq.sampling_params import SamplingParams

IDS = TokensPrompt(codec.pack([1, 2, 3]))


def hand_in(spec: ModelSpec, prompt: Prompt, **params: Any) -> Any:
    """What comes of a request: the AddRequest, or the ErrorInfo of its refusal."""
    request = Generate("r", 0, prompt, SamplingParams(**params), OutputSpec(0), 0.0)
    *_, send = TokenizerCore(spec, None).handle("client.0", request, 0.0)
    return send.message.error if isinstance(send.message, Rejected) else send.message


def test_token_ids_are_taken(spec: ModelSpec) -> None:
    added = hand_in(spec, IDS, max_tokens=4, stop_token_ids=[7])
    assert isinstance(added, AddRequest)
    assert (added.prompt_token_ids, added.params.max_tokens) == (IDS.token_ids, 4)
    assert added.params.stop_token_ids == (7,)


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        (TextPrompt("a text"), {}, "prompt"),
        (ChatPrompt(b'[{"role": "user", "content": "hi"}]'), {}, "messages"),
        (IDS, {"stop": "end"}, "stop"),
        (IDS, {"bad_words": ["bad"]}, "bad_words"),
    ],
)
def test_what_needs_text_is_refused(
    spec: ModelSpec, prompt: Prompt, params: dict[str, Any], param: str
) -> None:
    error = hand_in(spec, prompt, **params)
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(f"{param} needs a tokenizer, and this engine has none")


def test_tokens_have_no_text(spec: ModelSpec) -> None:
    core = DetokenizerCore(spec, None)
    params = SamplingParams(max_tokens=2, logprobs=1)
    core.handle("scheduler.0", OpenStream(0, "r", 0, 0, 3, params, OutputSpec(0)), 0.0)
    ids, index = codec.pack([5, 6]), codec.pack([0, 1])
    floats = b"\0\0\0\0" * 4
    logprobs = TokenLogprobs(2, index, codec.pack([5, 8, 6, 9]), floats, codec.pack([1, 1]))
    end = StreamEnd(0, "length", 2)
    step = StreamStep(packed_streams([0, 0]), index, ids, [end], logprobs)
    core.handle("scheduler.0", step, 0.0)
    ((chunk,),) = [send.message.chunks for send in core.flush(0.0)]
    assert (chunk.token_ids, chunk.text) == (ids, "")
    assert (chunk.finish.reason, chunk.finish.num_output_tokens) == ("length", 2)
    rows = unpack_rows(chunk.logprobs, chunk.logprob_tokens)
    assert [(row.token_ids, row.texts) for row in rows] == [
        ([5, 8], [b"", b""]),
        ([6, 9], [b"", b""]),
    ]


@pytest.mark.parametrize(
    ("question", "param"),
    [
        (Tokenize(0, "q", TextPrompt("a text")), "prompt"),
        (Detokenize(0, "q", IDS.token_ids), "tokens"),
    ],
)
def test_questions_are_refused(
    spec: ModelSpec, question: Tokenize | Detokenize, param: str
) -> None:
    (send,) = TokenizerCore(spec, None).handle("client.0", question, 0.0)
    assert isinstance(send.message, Rejected)
    assert (send.message.error.status, send.message.error.param) == (400, param)
    assert "skip_tokenizer_init" in send.message.error.message
