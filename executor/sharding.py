"""Which part of each weight a rank of a tensor-parallel engine has, from the model's declaration.

    q, k, v               by heads (outputs); with more ranks than KV heads, several ranks have the
                          same one
    o                     by heads (inputs): the ranks' results are parts of a sum
    gate, up              by outputs
    down                  by inputs: the ranks' results are parts of a sum
    embedding, head       by tokens of the vocabulary, rounded up: the last ranks' parts end in
                          zeros. A rank embeds the tokens that it has and makes zeros of the others,
                          so embeddings are summed, too; and tied weights stay one table
    norms                 whole

Biases go with outputs. Where inputs are split, rank 0 alone has the bias, and the others zeros.

A rank runs the model that `local` declares: the same one with fewer heads, a narrower feed-forward
layer and a smaller vocabulary. So whatever runs a declaration runs a part of it, on any device; it
only has to sum after embedding, o and down, and to gather the logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..mq.board import MAX_READERS
from ..mq.errors import ConfigError
from .models.llama import LlamaConfig
from .weights import WeightSource

OUTPUTS, INPUTS = 0, 1  # dimensions of a weight


class Split(NamedTuple):
    """Along which dimension a weight is split, and by which number of the declaration."""

    dim: int
    by: str


SPLITS = {
    "q_proj": Split(OUTPUTS, "heads"),
    "k_proj": Split(OUTPUTS, "kv_heads"),
    "v_proj": Split(OUTPUTS, "kv_heads"),
    "o_proj": Split(INPUTS, "heads"),
    "gate_proj": Split(OUTPUTS, "intermediate_size"),
    "up_proj": Split(OUTPUTS, "intermediate_size"),
    "down_proj": Split(INPUTS, "intermediate_size"),
    "embed_tokens": Split(OUTPUTS, "vocab_size"),
    "lm_head": Split(OUTPUTS, "vocab_size"),
}


class Part(NamedTuple):
    """Of a dimension: what the rank has is [start, stop) of `whole`, and zeros up to `size`."""

    whole: int
    start: int
    stop: int
    size: int


class Sharding:
    """The part of `rank` among `size`. Raises ConfigError where the model can't be split so.

    local: what the rank declares. parts: of each dimension that is split, by its name in SPLITS.
    """

    def __init__(self, config: LlamaConfig, rank: int, size: int) -> None:
        _check(config, size)
        self.rank, self.size = rank, size
        heads = config.heads // size
        kv_heads = max(1, config.kv_heads // size)
        inner = config.intermediate_size // size
        tokens = -(-config.vocab_size // size)
        self.local = copy.copy(config)
        self.local.heads, self.local.kv_heads = heads, kv_heads
        self.local.intermediate_size, self.local.vocab_size = inner, tokens
        first_kv = rank * config.kv_heads // size
        self.parts = {
            "heads": _part(config.heads, rank * heads, heads, config.head_size),
            "kv_heads": _part(config.kv_heads, first_kv, kv_heads, config.head_size),
            "intermediate_size": _part(config.intermediate_size, rank * inner, inner),
            "vocab_size": _part(config.vocab_size, rank * tokens, tokens),
        }

    def weights(self, source: WeightSource) -> WeightSource:
        """The rank's part of the weights of `source`."""
        return source if self.size == 1 else ShardedWeights(source, self)


class ShardedWeights:
    """Takes the rank's part of each weight; shapes are the part's."""

    def __init__(self, source: WeightSource, sharding: Sharding) -> None:
        self._source = source
        self._sharding = sharding

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def take(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        part: tuple[slice, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        assert not part
        assert dtype is None, "quantised checkpoints aren't split"
        if shape is None:  # a scale of the KV cache
            return self._source.take(name, None)
        module = name.split(".")[-2]
        if module.endswith("norm"):
            return self._source.take(name, shape)
        split = SPLITS[module]
        if split.dim >= len(shape):
            bias = self._source.take(name, shape)
            return torch.zeros_like(bias) if self._sharding.rank else bias
        part = self._sharding.parts[split.by]
        assert shape[split.dim] == part.size, (name, shape, part)
        whole = tuple(part.whole if i == split.dim else n for i, n in enumerate(shape))
        cut = (*[slice(None)] * split.dim, slice(part.start, part.stop))
        taken = self._source.take(name, whole, cut)
        missing = part.size - (part.stop - part.start)
        if not missing:
            return taken
        return F.pad(taken, (0, 0) * (len(shape) - 1 - split.dim) + (0, missing))

    def finish(self, ignored: Callable[[str], bool]) -> None:
        self._source.finish(ignored)


def _part(whole: int, first: int, count: int, unit: int = 1) -> Part:
    start, stop = min(first, whole), min(first + count, whole)
    return Part(whole * unit, start * unit, stop * unit, count * unit)


def _divides(config: LlamaConfig, size: int) -> bool:
    few, many = sorted((config.kv_heads, size))
    return not (config.heads % size or config.intermediate_size % size or many % few)


def _check(config: LlamaConfig, size: int) -> None:
    if _divides(config, size):
        return
    sizes = [str(n) for n in range(1, MAX_READERS + 1) if _divides(config, n)]
    raise ConfigError(
        f"tensor_parallel_size = {size}: {config.heads} heads, {config.kv_heads} KV heads and a "
        f"feed-forward size of {config.intermediate_size} can't be split so; this model takes "
        f"{', '.join(sizes)}"
    )
