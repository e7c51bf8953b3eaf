"""A scheduler by hand: plans that say just what a test wants, and the logits that a runner made of
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ringcast.executor.cpu_runner import CpuModelRunner
from ringcast.mq import codec, messages
from ringcast.mq.config import EngineConfig, ModelSpec, build
from ringcast.mq.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class HandScheduler:
    """Gives blocks out one after the other (1, 2, ...) and never takes one back. Where layers come
    in groups, blocks[row] has one for each group, then the next for each, and so on.

    `logits[row, position]` is what the token at `position` of `row` was chosen from.
    """

    def __init__(self, runner: CpuModelRunner, block_size: int) -> None:
        self.runner = runner
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        self.known: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}
        self._computed: dict[int, int] = {}
        self._block_size = block_size
        self.groups = runner._batch.num_groups
        self._next_block = 1
        self._step = 0
        self._new: list[messages.NewSequence] = []
        self._removed: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self._record()

    def enter(
        self,
        row: int,
        tokens: list[int],
        computed: int = 0,
        blocks: list[int] | None = None,
        params: SamplingParams = GREEDY,
    ) -> None:
        """A sequence enters with the next plan; `blocks` hold its first `computed` tokens (and are
        its table).
        """
        blocks = list(blocks or [])
        self.known[row], self.blocks[row], self._computed[row] = list(tokens), blocks, computed
        self._new.append(
            messages.NewSequence(
                row,
                f"request-{row}",
                0,
                codec.pack(tokens),
                len(tokens),
                computed,
                codec.pack(blocks),
                params,
            )
        )

    def remove(self, row: int) -> None:
        self._removed.append(row)
        del self.known[row], self.blocks[row], self._computed[row]

    def copy(self, source: int) -> int:
        """Copy a block with the next plan; returns the copy."""
        self._copies.append((source, self._take_block()))
        return self._copies[-1][1]

    def run(self, lengths: dict[int, int]) -> messages.StepOutput:
        """One step that computes so many tokens of each row."""
        appended = [(row, block) for row, n in lengths.items() for block in self._grow(row, n)]
        plan = messages.StepPlan(
            self._step,
            codec.pack(self._removed),
            self._new,
            *(codec.pack(column) for column in _columns(appended)),
            *(codec.pack(column) for column in _columns(self._copies)),
            codec.pack(lengths.keys()),
            codec.pack(lengths.values()),
        )
        self._step += 1
        self._new, self._removed, self._copies = [], [], []
        output = self.runner.execute(plan)
        assert output.step == plan.step
        for row, token in zip(
            codec.ints(output.rows).tolist(), codec.ints(output.token_ids).tolist(), strict=True
        ):
            assert self._computed[row] == len(self.known[row]), "a row was sampled too early"
            self.known[row].append(token)
        return output

    def _grow(self, row: int, length: int) -> list[int]:
        self._computed[row] += length
        columns = -(-self._computed[row] // self._block_size)
        missing = columns * self.groups - len(self.blocks[row])
        fresh = [self._take_block() for _ in range(missing)]
        self.blocks[row] += fresh
        return fresh

    def _take_block(self) -> int:
        self._next_block += 1
        return self._next_block - 1

    def _record(self) -> None:
        sampler = self.runner._sampler
        sample = sampler.sample

        def recording(logits, rows, positions):
            for row, position, row_logits in zip(
                rows.tolist(), positions.tolist(), logits, strict=True
            ):
                self.logits[row, position] = row_logits.clone()
            return sample(logits, rows, positions)

        sampler.sample = recording


def _columns(pairs: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [a for a, _ in pairs], [b for _, b in pairs]


def make_spec(folder: Path, **changes: object) -> ModelSpec:
    hf_config = json.loads((folder / "config.json").read_text())
    fields = {
        "name": folder.name,
        "path": str(folder),
        "tokenizer_path": str(folder),
        "hf_config": hf_config,
        "architecture": hf_config["architectures"][0],
        "vocab_size": hf_config["vocab_size"],
        "max_model_len": 256,
        "eos_token_ids": [2],
    }
    return ModelSpec(**(fields | changes))


@pytest.fixture
def spec_of() -> Callable[..., ModelSpec]:
    return make_spec


@pytest.fixture
def hand() -> Callable[..., HandScheduler]:
    """Load a runner on a model folder: hand(folder, max_model_len=..., **engine options)."""

    def load(folder: Path, max_model_len: int = 256, **options: object) -> HandScheduler:
        options = {
            "dtype": "float32",
            "max_num_seqs": 8,
            "num_threads": 2,
            "num_gpu_blocks_override": 200,
        } | options
        config = build(EngineConfig, options)
        runner = CpuModelRunner(config, make_spec(folder, max_model_len=max_model_len))
        runner.load(lambda *_: None)
        return HandScheduler(runner, config.block_size)

    return load


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A runner sets torch's number of threads for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
