"""The real runner under a scheduler that runs ahead: at every depth the same tokens, and the same
log-probabilities, over random requests.

In float32 with a model of random weights. Rounding may differ between batches, which neither depth
nor batch changes by enough to change a token here.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from in_process import InProcessEngine, tiny_engine
from tiny_model import make_tiny_model

from ringcast.mq.sampling_params import SamplingParams

NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def make_engine(folder: Path, **options: Any) -> InProcessEngine:
    return tiny_engine(
        folder,
        **({"max_model_len": 48, "max_num_seqs": 8, "num_gpu_blocks_override": 200} | options),
    )


def draw(rng: random.Random, stems: list[list[int]]) -> tuple[list[int], SamplingParams]:
    prompt = rng.choice(stems)[: rng.randrange(16)] + rng.choices(range(256), k=rng.randrange(1, 6))
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        seed=rng.randrange(1 << 30),
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 40]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        max_tokens=rng.choice([1, 2, 8, 20]),
        min_tokens=rng.choice([0, 0, 1]),
        stop_token_ids=rng.sample(range(256), 12),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, 1]),
    )
    return prompt, params


def run(engine: InProcessEngine, seed: int) -> set[str]:
    """Random requests, a few of which are aborted. Returns those."""
    rng = random.Random(seed)
    stems = [rng.choices(range(256), k=16) for _ in range(2)]
    requests = [draw(rng, stems) for _ in range(NUM_REQUESTS)]
    for number, (prompt, params) in enumerate(requests):
        words = [rng.choices(range(256), k=2), [rng.randrange(256)]]
        engine.add(str(number), prompt, params, words)
        for _ in range(rng.randrange(3)):
            engine.step()
    aborted = {str(number) for number in rng.sample(range(NUM_REQUESTS), 3)}
    for request_id in aborted:
        engine.abort(request_id)
    engine.run()
    engine.scheduler.check()
    statistics = engine.scheduler.statistics()
    assert statistics["free_blocks"] == statistics["num_blocks"] - 1
    return aborted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_gpu_blocks_override": 17},
        {"num_gpu_blocks_override": 17, "long_prefill_token_threshold": 3},
        {"num_gpu_blocks_override": 17, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_every_depth_gives_the_same_tokens(folder: Path, options: dict[str, Any]) -> None:
    for seed in (0, 2):  # in both some stop where steps behind them are in flight
        engines = [make_engine(folder, max_steps_in_flight=n, **options) for n in (1, 2, 3)]
        aborted, *_ = [run(engine, seed) for engine in engines]
        first, *others = engines
        for other in others:
            compare(first, other, aborted)
            statistics = other.scheduler.statistics()
            assert statistics["overshoot_tokens"] > 0
            assert statistics["forks"] > 0
            assert bool(options) == (statistics["preemptions"] > 0)
        assert {end.reason for end in first.ends.values()} >= {"stop", "length"}


def compare(first: InProcessEngine, other: InProcessEngine, aborted: set[str]) -> None:
    for request_id, choices in first.tokens.items():
        for choice, tokens in choices.items():
            ends = [engine.ends[request_id, choice] for engine in (first, other)]
            counts = [end.num_tokens for end in ends]
            if request_id not in aborted:
                assert ends[0].reason == ends[1].reason
                assert counts[0] == counts[1]
            size = min(counts)
            assert tokens[:size] == other.tokens[request_id][choice][:size]
            ours, theirs = (
                engine.logprobs.get(request_id, {}).get(choice, [])[:size]
                for engine in (first, other)
            )
            for row, same in zip(ours, theirs, strict=True):
                assert row == pytest.approx(same, abs=1e-4)
        if request_id not in aborted:
            assert prompt_places(first, request_id) == prompt_places(other, request_id)


def prompt_places(engine: InProcessEngine, request_id: str) -> set[int]:
    """Of which tokens of the prompt log-probabilities came."""
    return {
        part.first + row
        for part in engine.prompt_logprobs.get(request_id, [])
        for row in range(len(part.logprobs.rank) // 4)
    }
