"""Logits processors of a user's own: how they are found, and what they get to see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ringcast.executor.logits_processor import LogitsProcessor, load_processors
from ringcast.executor.sampler import Sampler
from ringcast.mq import codec
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.errors import ConfigError
from ringcast.mq.messages import NewSequence
from ringcast.mq.sampling_params import SamplingParams

VOCAB = 10


class Only(LogitsProcessor):
    """Leaves those that ask nothing but the token that they name, and notes what it was given."""

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self.wanted: dict[int, int] = {}
        self.seen: list[Any] = []

    def enter(self, sequence: NewSequence) -> bool:
        wanted = (sequence.params.extra_args or {}).get("only")
        if wanted is not None:
            self.wanted[sequence.row] = wanted
        return wanted is not None

    def apply(self, logits: torch.Tensor, rows: Any, known_tokens: Any, num_known: Any) -> None:
        pairs = zip(rows, num_known, strict=True)
        self.seen.append({int(row): known_tokens[row, :n].tolist() for row, n in pairs})
        assert (logits.dtype, logits.shape) == (torch.float32, (len(rows), VOCAB))
        for i, row in enumerate(rows.tolist()):
            logits[i, : self.wanted[row]] = -torch.inf
            logits[i, self.wanted[row] + 1 :] = -torch.inf


class Add(Only):
    def enter(self, sequence: NewSequence) -> bool:
        return True

    def apply(self, logits: torch.Tensor, rows: Any, known_tokens: Any, num_known: Any) -> None:
        logits[:, 4] += 100


def names(*found: str) -> list[str]:
    return [f"{__name__}:{name}" for name in found]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    module = type(sys)(__name__)
    module.Only, module.Add, module.NOTHING = Only, Add, 5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, __name__, module)


def new(row: int, tokens: list[int], **options: Any) -> NewSequence:
    params = SamplingParams(**{"temperature": 0, **options})
    return NewSequence(row, "", 0, codec.pack(tokens), len(tokens), 0, b"", params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_see_the_processors_that_they_want(dtype: torch.dtype) -> None:
    (only,) = load_processors(EngineConfig(logits_processors=names("Only")), None)  # type: ignore[arg-type]
    assert isinstance(only, Only)
    known = np.zeros((4, 8), np.int32)
    known[:, :2] = [[1, 2], [3, 4], [5, 6], [7, 8]]
    sampler = Sampler(4, VOCAB, [0], known, [only])
    asked: list[dict[str, Any]] = [
        {},
        {"extra_args": {"only": 7}},
        {"logit_bias": {5: 100}},
        {"extra_args": {"only": 3}, "repetition_penalty": 2.0},
    ]
    for row, options in enumerate(asked):
        sampler.enter(new(row, known[row, :2].tolist(), **options))
    logits = torch.zeros(4, VOCAB, dtype=dtype)
    logits[:, 9] = 1.0
    rows, positions = np.array([3, 2, 1, 0], np.int32), np.array([2, 2, 1, 2], np.int32)
    assert sampler.sample(logits.clone(), rows, positions)[0].tolist() == [3, 5, 7, 9]
    assert only.seen == [{3: [7, 8], 1: [3]}]
    sampler.enter(new(3, [1, 2]))
    assert sampler.sample(logits.clone(), rows, positions)[0].tolist() == [9, 5, 7, 9]


def test_in_the_order_of_the_option_after_bias_and_before_penalties() -> None:
    config = EngineConfig(logits_processors=names("Only", "Add"))
    processors = load_processors(config, None)  # type: ignore[arg-type]
    sampler = Sampler(1, VOCAB, [0], np.zeros((1, 8), np.int32), processors)
    sampler.enter(new(0, [4], repetition_penalty=4.0, logit_bias={6: 30}))
    # 4 was in the prompt, so its 100 become 25, and 6 has its 30.
    assert sampler.sample(torch.zeros(1, VOCAB), *np.zeros((2, 1), np.int32))[0].tolist() == [6]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Only", "must be of the form module:Class"),
        (":Only", "must be of the form module:Class"),
        ("no.such.module:Only", "No module named 'no'.*on PYTHONPATH"),
        (f"{__name__}:Missing", "has no attribute 'Missing'"),
        (f"{__name__}:NOTHING", "is no subclass of"),
        ("builtins:dict", "is no subclass of"),
    ],
)
def test_what_is_none(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"logits_processors: '{name}' .*{words}"):
        load_processors(EngineConfig(logits_processors=[name]), None)  # type: ignore[arg-type]
