"""Beam search through all processes against transformers' own: a small random model in float32."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from tiny_model import make_tiny_model

from ringcast import LLM, BeamSearchParams
from ringcast.mq.errors import InvalidRequestError

WIDTH, NUM_TOKENS = 4, 12
PROMPTS = [[*range(5 + n, 25 + 3 * n)] for n in range(3)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder, and transformers' model. Its EOS is a token that good sequences have."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    tokenizer = (folder / "tokenizer.json").read_bytes()
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**json.loads((folder / "config.json").read_text()))
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
    model.tie_weights()
    eos = reference(model, PROMPTS[0], None)[0][0][len(PROMPTS[0]) + 4]
    model.generation_config.eos_token_id = eos
    model.config.eos_token_id = eos
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    return folder, model, eos


@pytest.fixture(scope="module")
def llm(made):
    options = {"dtype": "float32", "num_gpu_blocks_override": 400, "num_threads": 1}
    with LLM(str(made[0]), max_model_len=64, **options) as llm:
        yield llm


@torch.inference_mode()
def reference(model, prompt, eos):
    """(tokens, sum of log-probabilities) of transformers' sequences, the best first."""
    model.generation_config.eos_token_id = eos  # what is given as None below is taken from here
    out = model.generate(
        torch.tensor([prompt]),
        generation_config=transformers.GenerationConfig(
            num_beams=WIDTH,
            num_return_sequences=WIDTH,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            length_penalty=0.0,
            eos_token_id=eos,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )
    sequences = [tokens.tolist() for tokens in out.sequences]
    if eos is not None:
        start = len(prompt)
        ends = [s.index(eos, start) + 1 if eos in s[start:] else len(s) for s in sequences]
        sequences = [s[:end] for s, end in zip(sequences, ends, strict=True)]
    return list(zip(sequences, out.sequences_scores.tolist(), strict=True))


def params(**more):
    return BeamSearchParams(beam_width=WIDTH, max_tokens=NUM_TOKENS, length_penalty=0.0, **more)


def test_the_sequences_of_transformers(made, llm):
    outputs = llm.beam_search(PROMPTS, params(ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        want = reference(made[1], prompt, None)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in want]
        scores = [beam.cum_logprob for beam in output.sequences]
        assert scores == pytest.approx([score for _, score in want], abs=1e-3)
        assert {beam.finish_reason for beam in output.sequences} == {"length"}


def test_no_worse_than_transformers_where_sequences_end(made, llm):
    """transformers drops an EOS that comes after the beam_width likeliest continuations of a step;
    here it counts, so there may be a better sequence.
    """
    _, model, eos = made
    outputs = llm.beam_search(PROMPTS, params())
    ended = same = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        want = reference(model, prompt, eos)
        for beam, (tokens, score) in zip(output.sequences, want, strict=True):
            assert beam.tokens == tokens or beam.cum_logprob > score - 1e-3
            stopped = eos in beam.tokens[len(prompt) :]
            assert (beam.finish_reason == "stop") == stopped
            assert not stopped or beam.tokens.index(eos, len(prompt)) == len(beam.tokens) - 1
            ended += stopped
        same += output.sequences[0].tokens == want[0][0]
    assert ended
    assert same


def test_text_and_logprobs(made, llm):
    (output,) = llm.beam_search("Hello", BeamSearchParams(beam_width=2, max_tokens=3))
    for beam in output.sequences:
        assert beam.tokens[:5] == llm.generate("Hello", use_tqdm=False)[0].prompt_token_ids
        assert beam.text.startswith("Hello")
        assert len(beam.text) > 5
        own = [row[t].logprob for row, t in zip(beam.logprobs, beam.tokens[5:], strict=True)]
        assert sum(own) == pytest.approx(beam.cum_logprob)
        assert all(len(row) == 4 for row in beam.logprobs)


def test_a_prompt_without_room_is_refused(llm):
    with pytest.raises(InvalidRequestError, match="64"):
        llm.beam_search([[5] * 64], params())
    (output,) = llm.beam_search([[5] * 62], params(ignore_eos=True))
    assert {len(beam.tokens) for beam in output.sequences} == {64}
