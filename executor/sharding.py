"""Which part of each weight a rank of a tensor-parallel engine has, from the model's declaration.

    q, k, v               by heads (outputs); with more ranks than KV heads, several ranks have the
                          same one
    o                     by heads (inputs): the ranks' results are parts of a sum
    gate, up              by outputs
    down                  by inputs: the ranks' results are parts of a sum
    an expert's           alike, by its own inner size; or, with enable_expert_parallel, an expert
                          is whole on one of the ranks: what the others add to the sum is zeros.
                          With redundant experts the first ones are on two
    embedding, head       by tokens of the vocabulary, rounded up: the last ranks' parts end in
                          zeros. A rank embeds the tokens that it has and makes zeros of the others,
                          so embeddings are summed, too; and tied weights stay one table
    norms, router         whole

Biases go with outputs. Where inputs are split, rank 0 alone has the bias, and the others zeros.

A rank runs the model that `local` declares: the same one with fewer heads, a narrower feed-forward
layer and a smaller vocabulary. So whatever runs a declaration runs a part of it, on any device; it
only has to sum after embedding, o and down, and to gather the logits.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ..mq.board import MAX_READERS
from ..mq.errors import ConfigError
from . import expert_placement
from .models.llama import Experts, LlamaConfig
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
    "w1": Split(OUTPUTS, "expert_size"),
    "w3": Split(OUTPUTS, "expert_size"),
    "w2": Split(INPUTS, "expert_size"),
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
    by_expert: experts are dealt to the ranks instead of split. placement, place: of the experts
    (expert_placement.py), and which of its ranks this one is.
    """

    def __init__(
        self,
        config: LlamaConfig,
        rank: int,
        size: int,
        by_expert: bool = False,
        dealt: tuple[int, int] | None = None,
        redundant: int = 0,
    ) -> None:
        """dealt: rank and size among those that experts are dealt to, if these are more. redundant:
        how many more there are to deal.
        """
        self._dealt = dealt or (rank, size)
        _check(config, size, by_expert, self._dealt[1], redundant)
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
        self.held: list[int] | None = None  # the experts that are whole on this rank
        self.placement, self.place = np.zeros((1, 0), np.int32), 0
        if config.experts is not None:
            self.local.experts = self._share(config.experts, by_expert, redundant)

    def _share(self, experts: Experts, by_expert: bool, redundant: int) -> Experts:
        if by_expert:
            self.place, size = self._dealt
            held = (experts.num + redundant) // size
            self.placement = expert_placement.initial(experts.num, size, held)
            self.held = self.placement[self.place].tolist()
            return dataclasses.replace(experts, first=self.place * held % experts.num, held=held)
        self.placement = expert_placement.initial(experts.num, 1, experts.num)
        inner = experts.inner_size // self.size
        self.parts["expert_size"] = _part(experts.inner_size, self.rank * inner, inner)
        return dataclasses.replace(experts, inner_size=inner)

    def weights(self, source: WeightSource) -> WeightSource:
        """The rank's part of the weights of `source`."""
        return source if self.size == self._dealt[1] == 1 else ShardedWeights(source, self)


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
        *_, kind, number, module, _ = f"..{name}".split(".")
        if module.endswith("norm") or module == "gate":
            return self._source.take(name, shape)
        split, sharding = SPLITS[module], self._sharding
        if kind == "experts":
            if sharding.held is not None:
                there = () if int(number) in sharding.held else (slice(0),)
                return self._source.take(name, shape, there)
            split = split._replace(by="expert_size")
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


def _inner(config: LlamaConfig, by_expert: bool, redundant: int) -> dict[str, int]:
    """What of the feed-forward layers must be split evenly, in words."""
    experts, sizes = config.experts, {}
    if experts is None or not all(experts.sparse):
        sizes[f"a feed-forward size of {config.intermediate_size}"] = config.intermediate_size
    if experts is not None and by_expert:
        more = f" and {redundant} redundant ones" if redundant else ""
        sizes[f"{experts.num} experts{more}"] = experts.num + redundant
    elif experts is not None:
        sizes[f"experts of size {experts.inner_size}"] = experts.inner_size
    return sizes


def _divides(config: LlamaConfig, size: int, by_expert: bool, redundant: int) -> bool:
    few, many = sorted((config.kv_heads, size))
    inner = _inner(config, by_expert, redundant).values()
    return not (config.heads % size or many % few or any(number % size for number in inner))


def _check(config: LlamaConfig, size: int, by_expert: bool, dealt: int, redundant: int) -> None:
    if by_expert and config.experts is None:
        raise ConfigError(
            "enable_expert_parallel = True: this model is dense, it has no experts; leave it False"
        )
    if by_expert and dealt == 1:
        raise ConfigError(
            "enable_expert_parallel = True: deals experts to ranks, and tensor_parallel_size is 1; "
            "with experts dealt it takes 2 or more, or data_parallel_size does"
        )
    if redundant and config.experts is not None:
        _check_redundant(config.experts.num, dealt, redundant)
    if dealt > size and config.experts is not None and config.experts.num % dealt and not redundant:
        raise ConfigError(
            f"enable_expert_parallel = True: {config.experts.num} experts can't be dealt evenly to "
            f"the {dealt} ranks of tensor_parallel_size x data_parallel_size"
        )
    if _divides(config, size, by_expert, redundant):
        return
    ranks = range(1, MAX_READERS + 1)
    sizes = [str(n) for n in ranks if _divides(config, n, by_expert, redundant)]
    *others, last = [
        f"{config.heads} heads",
        f"{config.kv_heads} KV heads",
        *_inner(config, by_expert, redundant),
    ]
    raise ConfigError(
        f"tensor_parallel_size = {size}: {', '.join(others)} and {last} can't be split so; this "
        f"model takes {', '.join(sizes)}"
    )


def _check_redundant(experts: int, dealt: int, redundant: int) -> None:
    """A rank has each expert once at most, so every rank has all of them at most."""
    least, most = -experts % dealt, experts * (dealt - 1)
    if (experts + redundant) % dealt or redundant > most:
        raise ConfigError(
            f"eplb_config.num_redundant_experts = {redundant}: with {experts} experts and {dealt} "
            f"ranks it must be {least} or some times {dealt} more, up to {most}"
        )
