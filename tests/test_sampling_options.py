"""Sampling options from the scheduler through a real model and back: a tiny one, random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_process import InProcessEngine, tiny_engine
from tiny_model import make_tiny_model

from ringcast.mq.sampling_params import SamplingParams

NUM_TOKENS = 40
PROMPT = [10, 20, 30, 40, 50]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def generate(engine: InProcessEngine, bad_words: Any = (), **options: Any) -> list[int]:
    params = SamplingParams(
        **{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **options}
    )
    name = f"request-{len(engine.tokens)}"
    engine.add(name, PROMPT, params, bad_words)
    engine.run()
    return engine.tokens[name][0]


def test_each_option_has_its_effect(folder: Path) -> None:
    engine = tiny_engine(folder)
    plain = generate(engine)
    assert len(set(plain)) < NUM_TOKENS, "a greedy random model that repeats nothing shows nothing"
    allowed = [3, 5, 250]
    assert set(generate(engine, allowed_token_ids=allowed, temperature=2.0, seed=1)) == {*allowed}
    assert generate(engine, logit_bias={77: 100}) == [77] * NUM_TOKENS
    assert plain[0] not in generate(engine, logit_bias={plain[0]: -100})
    for options in ({"repetition_penalty": 1e6}, {"presence_penalty": 2, "frequency_penalty": 2}):
        output = generate(engine, **options)
        assert len(set(output)) > len(set(plain))
    assert not set(PROMPT) & set(generate(engine, repetition_penalty=1e6))
    assert len(set(generate(engine, repetition_penalty=1e6))) == NUM_TOKENS


def test_a_bad_word_never_comes(folder: Path) -> None:
    engine = tiny_engine(folder)
    plain = generate(engine)
    word = plain[3:6]
    first = next(i for i in range(4) if plain[i : i + 3] == word)
    output = generate(engine, [word])
    assert output[: first + 2] == plain[: first + 2]
    assert all(output[i : i + 3] != word for i in range(NUM_TOKENS))
    assert plain[0] not in generate(engine, [plain[:1]])


MIXED: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "temperature": 1.0, "seed": 1},
    {"frequency_penalty": 0.8, "temperature": 0.8, "seed": 2, "top_p": 0.9},
    {"temperature": 1.0, "seed": 3},
    {"logit_bias": {5: 6.0, 9: -50.0}, "temperature": 1.0, "seed": 4, "n": 3},
    {"allowed_token_ids": list(range(60)), "repetition_penalty": 1.5, "n": 1},
    {
        "temperature": 1.2,
        "seed": 5,
        "repetition_penalty": 1.2,
        "frequency_penalty": -0.3,
        "presence_penalty": 0.3,
        "logit_bias": {3: 2.0},
        "min_tokens": 10,
        "ignore_eos": False,
        "n": 2,
    },
]


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 40},  # preempts
        {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 3},
        {"enable_prefix_caching": False, "max_num_seqs": 3},
    ],
    ids=str,
)
def test_the_same_tokens_preempted_chunked_and_in_other_batches(
    folder: Path, options: dict[str, Any]
) -> None:
    outputs = []
    for changes in ({}, options):
        engine = tiny_engine(folder, **changes)
        for number, each in enumerate(MIXED):
            params = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **each}
            prompt = [number, 10, 20, 30, 40, 50, 60, 70, 80]
            words = [[number], [5, 6], [7, 8, 9]]
            engine.add(str(number), prompt, SamplingParams(**params), words)
        engine.run()
        outputs.append(engine.tokens)
    assert outputs[0] == outputs[1]
    assert ("num_gpu_blocks_override" in options) == bool(
        engine.scheduler.statistics()["preemptions"]
    )


PROCESSOR = """
import torch
from ringcast.executor.logits_processor import LogitsProcessor

class Even(LogitsProcessor):
    def __init__(self, config, spec):
        self.odd = torch.arange(1, spec.vocab_size, 2)

    def enter(self, sequence):
        return bool((sequence.params.extra_args or {}).get("even"))

    def apply(self, logits, rows, known_tokens, num_known):
        logits[:, self.odd] = -torch.inf
"""


def test_a_logits_processor_by_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_processors.py").write_text(PROCESSOR)
    monkeypatch.syspath_prepend(str(tmp_path))
    engine = tiny_engine(folder, logits_processors=["my_processors:Even"])
    random = {"temperature": 3.0, "seed": 1}
    assert not any(token % 2 for token in generate(engine, extra_args={"even": True}, **random))
    assert any(token % 2 for token in generate(engine, **random))
