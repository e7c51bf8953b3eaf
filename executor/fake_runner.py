"""A model runner without a model, for tests of everything around one. It trusts no plan.

The next token is a pure function of the prompt, the choice, the position and the token before
(`fake_token`), so a test knows a request's whole output beforehand (`expected_tokens`), whatever
was batched, chunked, cached, forked or preempted on the way.

In place of keys and values each slot of the cache holds a fingerprint of the token there and of all
tokens before it, which is just what real keys and values depend on. After a step's writes, every
row of the step must find its own fingerprints in the slots of its block table, from its first token
to the last one computed. So a block that was shared, given away, evicted or copied wrongly shows.

The model's hf_config may have "windows": those of its groups of layers, 0 for none. Each group has
its own block table and fingerprints then, which must be there as far as its window reaches.

With enable_expert_parallel there are no experts to deal either, but replicas step together as if
there were: they meet in each step (lockstep.py).
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from ..mq import codec, messages
from ..mq.config import EngineConfig, ModelSpec
from ..mq.errors import ConfigError
from ..mq.kv_groups import spec_of
from .runner import Done, OtherHosts

DEFAULT_NUM_BLOCKS = 1024
STEP_SECONDS = "RINGCAST_FAKE_STEP_SECONDS"
ECHO = "RINGCAST_FAKE_ECHO"
TRUST = "RINGCAST_FAKE_TRUST"
_MASK = 2**64 - 1


def fake_token(
    prompt_crc: int,
    choice: int,
    position: int,
    previous_token: int,
    vocab_size: int,
    eos_token_ids: Collection[int],
) -> int:
    """The token at `position` (0 is the prompt's first) of a choice of the prompt with this CRC-32.

    Never an EOS id, nor one of the low ids, where tokenizers keep their special tokens: the lowest
    256, or a quarter of a vocabulary of less than 1,024.
    """
    lowest = min(256, vocab_size // 4)
    size = vocab_size - lowest
    key = (prompt_crc << 32) ^ (choice << 24) ^ (position << 8) ^ previous_token
    key = (key ^ key >> 31) * 0xBF58476D1CE4E5B9 & _MASK
    key = (key ^ key >> 29) * 0x94D049BB133111EB & _MASK
    start = (key ^ key >> 32) % size
    for step in range(size):
        token = lowest + (start + step) % size
        if token not in eos_token_ids:
            return token
    raise AssertionError("every token of the vocabulary is an EOS")


def expected_tokens(
    prompt_ids: Sequence[int], choice: int, num_tokens: int, spec: ModelSpec
) -> list[int]:
    """The first num_tokens output tokens of a choice, if nothing stops it."""
    crc = zlib.crc32(codec.pack(prompt_ids))
    output: list[int] = []
    previous = prompt_ids[-1]
    for position in range(len(prompt_ids), len(prompt_ids) + num_tokens):
        previous = fake_token(crc, choice, position, previous, spec.vocab_size, spec.eos_token_ids)
        output.append(previous)
    return output


class _Row:
    """What a worker keeps of a sequence. prints[i] is the fingerprint of tokens[: i + 1]."""

    def __init__(self, new: messages.NewSequence) -> None:
        tokens = codec.ints(new.token_ids).tolist()
        self.choice = new.choice
        self.prompt = tokens[: new.num_prompt_tokens]
        self.crc = zlib.crc32(new.token_ids[: 4 * new.num_prompt_tokens])
        self.num_logprobs = new.params.logprobs
        self.num_computed = new.num_computed_tokens
        self.block_ids: list[int] = codec.ints(new.block_ids).tolist()
        self.num_known = 0
        self.last_token = 0
        self._prints = np.zeros(2 * len(tokens), dtype=np.uint64)
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        known = self.num_known
        if known == len(self._prints):
            self._prints = np.concatenate([self._prints, np.zeros_like(self._prints)])
        before = int(self._prints[known - 1]) if known else 0
        self._prints[known] = (before * 0x9E3779B97F4A7C15 + token + 1) & _MASK
        self.last_token = token
        self.num_known = known + 1

    def prints(self, start: int, end: int) -> NDArray[np.uint64]:
        return self._prints[start:end]


class FakeModelRunner:
    """step_seconds: how long a step takes at least. echo: the output is the prompt, repeated.
    trust: plans are right, and there are no fingerprints: for benchmarks of what is around it.
    meet: how replicas that step together meet: a step's WaveStep and number of tokens to whether
    any of them has work. `load` makes it, unless it's there.

    `load` takes them from the environment where RINGCAST_FAKE_STEP_SECONDS, RINGCAST_FAKE_ECHO and
    RINGCAST_FAKE_TRUST are set.
    """

    step_seconds = 0.0
    echo = False
    trust = False
    meet: Callable[[messages.WaveStep | None, int], bool] | None = None

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        rank: int = 0,
        group_fd: int = -1,
        engine: int = 0,
        others: OtherHosts | None = None,
    ) -> None:
        self._config = config
        self._spec = spec
        self._rank = rank
        self._group_fd, self._engine = group_fd, engine
        self._num_links = others.num_links if others is not None else 0
        self._leave: Callable[[], None] = lambda: None
        self._num_blocks = config.num_gpu_blocks_override or DEFAULT_NUM_BLOCKS
        self._kv = np.zeros((self._num_blocks, config.block_size), dtype=np.uint64)
        self._windows: list[int] = spec.hf_config.get("windows", [0])
        self._rows: dict[int, _Row] = {}
        self._next_step = 0

    def load(self, progress: Callable[[str, int, int], None]) -> messages.WorkerReady:
        """Raises ConfigError if RINGCAST_FAKE_STEP_SECONDS is no number of seconds."""
        text = os.environ.get(STEP_SECONDS)
        if text is not None:
            try:
                self.step_seconds = float(text)
            except ValueError:
                raise ConfigError(f"{STEP_SECONDS} must be a number, got {text!r}") from None
        self.echo = self.echo or bool(os.environ.get(ECHO))
        self.trust = self.trust or bool(os.environ.get(TRUST))
        if self._config.lockstep and self.meet is None:
            self._join()
        progress("loading no model", 1, 1)
        groups = tuple(spec_of(window) for window in self._windows)
        return messages.WorkerReady(self._rank, self._num_blocks, self._config.block_size, groups)

    def details(self) -> dict[str, str | int | float]:
        return {
            "device": "fake",
            "num_blocks": self._num_blocks,
            "block_size": self._config.block_size,
        }

    def leave(self) -> None:
        self._leave()

    def _join(self) -> None:
        from .lockstep import Replicas, compile_kernels  # with torch, which isn't needed otherwise

        compile_kernels()
        place = self._rank, self._engine, self._group_fd
        replicas = Replicas(self._config, *place, self._num_links)
        self.meet = lambda place, num_tokens: replicas.meet(place, num_tokens).any_work
        self._leave = replicas.leave

    def launch(self, plan: messages.StepPlan) -> Done:
        return Done(self.execute(plan))

    def execute(self, plan: messages.StepPlan) -> messages.StepOutput:
        """One step. Raises AssertionError for a plan that a scheduler must never make."""
        start = time.perf_counter()
        assert plan.step == self._next_step, f"step {plan.step} came, not {self._next_step}"
        self._next_step += 1
        self._update_batch(plan)
        self._copy_blocks(codec.ints(plan.copy_from), codec.ints(plan.copy_to))
        rows = codec.ints(plan.rows).tolist()
        counts = codec.ints(plan.num_tokens).tolist()
        any_work = self.meet is not None and self.meet(plan.wave, sum(counts))
        if self.trust:
            for number, count in zip(rows, counts, strict=True):
                self._rows[number].num_computed += count
        else:
            self._write(rows, counts)
            self._verify(rows, counts)
        sampled, tokens = self._sample(rows)
        logprobs = self._logprobs(sampled, tokens)
        time.sleep(max(0.0, start + self.step_seconds - time.perf_counter()))
        return messages.StepOutput(
            plan.step,
            codec.pack(sampled),
            codec.pack(tokens),
            logprobs,
            time.perf_counter() - start,
            any_work=any_work,
        )

    def _update_batch(self, plan: messages.StepPlan) -> None:
        for row in codec.ints(plan.removed).tolist():
            assert row in self._rows, f"removed row {row} is not in use"
            del self._rows[row]
        for new in plan.new:
            assert new.row not in self._rows, f"row {new.row} was given out twice"
            assert 0 <= new.row < self._config.max_num_seqs, f"there is no row {new.row}"
            row = self._rows[new.row] = _Row(new)
            assert 0 < new.num_prompt_tokens <= row.num_known
            assert 0 <= row.num_computed < row.num_known, "nothing is left to compute"
        appended = zip(
            codec.ints(plan.block_rows).tolist(), codec.ints(plan.block_ids).tolist(), strict=True
        )
        for number, block in appended:
            self._rows[number].block_ids.append(block)

    def _copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        assert len(sources) == len(targets)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            assert 0 < source < self._num_blocks, f"block {source} can't be copied"
            assert 0 < target < self._num_blocks, f"block {target} can't be copied to"
            self._kv[target] = self._kv[source]

    def _write(self, rows: list[int], num_tokens: list[int]) -> None:
        """The fingerprints of this step's tokens go to their slots."""
        assert len(set(rows)) == len(rows) == len(num_tokens), "a row is in the step twice"
        total, budget = sum(num_tokens), self._config.max_num_batched_tokens
        assert total <= budget, f"{total} tokens in one step, and the budget is {budget}"
        written: set[int] = set()
        for number, count in zip(rows, num_tokens, strict=True):
            row = self._rows[number]
            start, end = row.num_computed, row.num_computed + count
            assert 0 < count <= row.num_known - start, f"row {number} can't compute {count} tokens"
            for group in range(len(self._windows)):
                slots = self._slots(row, group)
                assert end <= len(slots), f"row {number} has no block for token {end - 1}"
                targets = slots[start:end]
                assert targets.min() >= self._config.block_size, f"row {number}: no such block"
                assert written.isdisjoint(targets.tolist()), (
                    f"row {number} writes where another does"
                )
                written.update(targets.tolist())
                self._kv.reshape(-1)[targets] = row.prints(start, end) + np.uint64(group)
            row.num_computed = end

    def _verify(self, rows: list[int], num_tokens: list[int]) -> None:
        """Every row finds all that its tokens of this step see."""
        for number, count in zip(rows, num_tokens, strict=True):
            row = self._rows[number]
            for group, window in enumerate(self._windows):
                first = max(0, row.num_computed - count - window + 1) if window else 0
                slots = self._slots(row, group)[first : row.num_computed]
                prints = row.prints(first, row.num_computed) + np.uint64(group)
                wrong = np.flatnonzero(self._kv.reshape(-1)[slots] != prints) + first
                assert not wrong.size, f"row {number}: the KV of token {wrong[0]} is not its own"

    def _slots(self, row: _Row, group: int) -> NDArray[np.int64]:
        blocks = np.array(row.block_ids, dtype=np.int64)[group :: len(self._windows)]
        assert blocks.size, "a row has no blocks"
        assert 0 <= blocks.min() <= blocks.max() < self._num_blocks, "a row has no such block"
        size = self._config.block_size
        return (blocks[:, None] * size + np.arange(size)).reshape(-1)

    def _sample(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """The rows that are sampled, and their new tokens."""
        vocab_size, eos_token_ids = self._spec.vocab_size, self._spec.eos_token_ids
        sampled = [r for r in rows if self._rows[r].num_computed == self._rows[r].num_known]
        tokens = []
        for number in sampled:
            row = self._rows[number]
            if self.echo:
                token = row.prompt[(row.num_known - len(row.prompt)) % len(row.prompt)]
            else:
                token = fake_token(
                    row.crc, row.choice, row.num_known, row.last_token, vocab_size, eos_token_ids
                )
            row.append(token)
            tokens.append(token)
        return sampled, tokens

    def _logprobs(self, sampled: list[int], tokens: list[int]) -> messages.TokenLogprobs | None:
        """As if the chosen token were the likeliest, then the ids above it, each half as likely."""
        asked = [(i, self._rows[row].num_logprobs) for i, row in enumerate(sampled)]
        wanted = [(i, k) for i, k in asked if k is not None]
        if not wanted:
            return None
        width = 1 + max(k for _, k in wanted)
        places = np.maximum(np.arange(width) - 1, 0)
        ids = np.full((len(wanted), width), -1, dtype=np.int32)
        for m, (i, k) in enumerate(wanted):
            ids[m, : k + 1] = (tokens[i] + places[: k + 1]) % self._spec.vocab_size
        logprobs = np.where(ids >= 0, -np.log(2) * (places + 1), -np.inf).astype(np.float32)
        return messages.TokenLogprobs(
            width=width,
            index=codec.pack([i for i, _ in wanted]),
            token_ids=ids.tobytes(),
            logprobs=logprobs.tobytes(),
            rank=np.ones(len(wanted), dtype=np.int32).tobytes(),
        )
