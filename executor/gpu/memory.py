"""How the memory of a CUDA device is shared out, from what is measured, and how many blocks of KV
cache that leaves.

    weights       allocated once they are loaded
    activations   the buffers of the largest step, and what it takes beside them while it runs
    graphs        what one captured graph took of the device, times their number
    KV cache      the rest of gpu_memory_utilization x the device's memory
    free          what is left to others

What is in use already when an engine starts is not its own and doesn't count against its share, but
it must leave that share free.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ...mq.config import EngineConfig
from ...mq.errors import ConfigError
from ...mq.kv_groups import blocks_for, longest_chunk, longest_sequence
from ...mq.messages import KVSpec
from ..kv_memory import NULL_BLOCKS

GIB = 1 << 30
# Of the device's memory, for what grows after start-up: lazily loaded kernels, the allocator's
# rounding.
RESERVE = 256 << 20


class Terms(NamedTuple):
    """Bytes. total, others: the device's, and what was in use before this engine."""

    total: int
    others: int
    weights: int
    activations: int
    graphs: int

    def own(self) -> int:
        return self.weights + self.activations + self.graphs

    def table(self, kv_cache: int) -> str:
        """For the log and for error messages."""
        terms = {
            "in use by others": self.others,
            "weights": self.weights,
            "activations": self.activations,
            "graphs": self.graphs,
            "KV cache": kv_cache,
            "free": self.total - self.others - self.own() - kv_cache,
        }
        return ", ".join(f"{name} {gib(size)}" for name, size in terms.items())


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


class Meter:
    """Reads a device's memory as an engine's start goes on. On the CPU all is 0."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._free_at_start, self.total = self._read()
        self.others = self.total - self._free_at_start

    def _read(self) -> tuple[int, int]:
        if not self._on_gpu:
            return 0, 0
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return free, total

    def check_share(self, utilization: float) -> None:
        """Raises ConfigError if others have so much that this engine's share isn't free."""
        share = int(utilization * self.total)
        if share > self._free_at_start:
            most = int(100 * self._free_at_start / self.total) / 100
            raise ConfigError(
                f"gpu_memory_utilization = {utilization}: that is {gib(share)} of "
                f"{gib(self.total)}, and others use {gib(self.others)}: set it to at most {most}, "
                "or free memory on the device"
            )

    def used(self) -> int:
        """By this engine, the allocator's cache included."""
        return self._free_at_start - self._read()[0]

    def settle(self) -> int:
        """The same once nothing is cached: what really is in use."""
        if self._on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
        return self.used()


# What to change where an allocation fails.
_ADVICE = {
    "weights": "a smaller model or dtype, or free memory on the device",
    "activations": "lower max_num_batched_tokens or max_num_seqs",
    "graphs": "lower gpu_memory_utilization or max_num_seqs, or set enforce_eager",
    "KV cache": "lower gpu_memory_utilization, num_gpu_blocks_override or kv_cache_memory_bytes",
}


@contextmanager
def room_for(term: str) -> Iterator[None]:
    """Turns torch's error into one that says which term didn't fit, and what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"the device has no memory left for {term}: {_ADVICE[term]} ({reason})"
        ) from error


def num_blocks(
    config: EngineConfig,
    groups: Sequence[KVSpec],
    max_model_len: int,
    block_bytes: int,
    terms: Terms,
) -> int:
    """Blocks of the cache, block 0 included. Raises ConfigError if not one sequence of
    max_model_len fits.
    """
    chunk, size = longest_chunk(config), config.block_size
    per_sequence = blocks_for(groups, max_model_len, chunk, size)
    most = config.max_num_seqs * per_sequence + NULL_BLOCKS
    if config.num_gpu_blocks_override is not None:
        blocks, option = config.num_gpu_blocks_override, "num_gpu_blocks_override"
    elif config.kv_cache_memory_bytes is not None:
        option = "kv_cache_memory_bytes"
        blocks = min(config.kv_cache_memory_bytes // block_bytes, most)
    else:
        option = "gpu_memory_utilization"
        blocks = min(_space(config, terms) // block_bytes, most)
    tokens = longest_sequence(groups, max(blocks - NULL_BLOCKS, 0), chunk, size)
    if tokens < max_model_len:
        need = (per_sequence + NULL_BLOCKS) * block_bytes
        raise ConfigError(
            f"max_model_len is {max_model_len}, and the KV cache has room for {tokens} tokens "
            f"({blocks} blocks, {gib(blocks * block_bytes)}; one such sequence needs {gib(need)}): "
            f"set max_model_len to at most {tokens}, or raise {option}. Of {gib(terms.total)}: "
            + terms.table(blocks * block_bytes)
        )
    return blocks


def _space(config: EngineConfig, terms: Terms) -> int:
    share = int(config.gpu_memory_utilization * terms.total)
    unused = terms.total - terms.others - RESERVE
    return max(0, min(share, unused) - terms.own())
