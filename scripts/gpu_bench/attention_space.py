"""The configurations of decode and prefill attention that are worth a try: what fits the shared
memory and the registers of a multiprocessor.

How many registers a program takes was seen in what Triton 3.6 makes of these kernels for Hopper:
beyond the bounds below they spill.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from spaces import Limits
from triton import next_power_of_2

from ringcast.kernels.gpu.decode_plan import DecodeConfig, choose_decode_config
from ringcast.kernels.gpu.prefill_attention import (
    MOST_DESCRIBED_TOKENS,
    TILE_ROWS,
    PrefillConfig,
    choose_prefill_config,
)

QUERY_BYTES = 2  # of an element


class Model(NamedTuple):
    """window: of the layers that have one."""

    heads: int
    kv_heads: int
    head_size: int
    window: int = 0


MODELS = {
    "qwen3": Model(16, 8, 128),
    "llama": Model(32, 8, 128),
    "mistral": Model(32, 8, 128, window=4096),
    "smollm2": Model(9, 3, 64),
    "gemma3": Model(4, 1, 256, window=512),
}


@dataclass(frozen=True)
class DecodeCase:
    """One entry of decode_table. element_size: of the cache."""

    kv_heads: int
    head_size: int
    element_size: int

    def __str__(self) -> str:
        return f"decode, {self.kv_heads} heads of {self.head_size} x {self.element_size} bytes"

    def points(self, names: list[str]) -> list[Model]:
        """Whose queries it is measured with."""
        models = (MODELS[name]._replace(window=0) for name in names)
        return [m for m in dict.fromkeys(models) if m[1:3] == self.key[:2]]

    @property
    def key(self) -> tuple[int, int, int]:
        return self.kv_heads, self.head_size, self.element_size

    def in_use(self, limits: Limits) -> DecodeConfig:
        return choose_decode_config(*self.key, limits.architecture)

    def candidates(self, limits: Limits) -> Iterator[DecodeConfig]:
        for resident, tile, warps, stages in product(
            (1, 2, 3, 4, 6), (16, 32, 64, 128), (2, 4, 8), (2, 3, 4, 5, 6)
        ):
            workers = max(1, resident * limits.multiprocessors // self.kv_heads)
            config = DecodeConfig(workers, tile, warps, stages)
            if self._fits(config, limits):
                yield config

    def _fits(self, config: DecodeConfig, limits: Limits) -> bool:
        """All workers at once, and enough of their loads in flight to hide the memory's latency."""
        size, threads = next_power_of_2(self.head_size), 32 * config.warps
        resident = self._resident(config, limits)
        # Words of a thread: its part of the queries' sums and scores, of keys and of values.
        held = (16 * (size + config.tile) + self._tile_bytes(config) // 4) / threads
        return (
            held <= 150
            and resident * threads * 160 <= limits.registers
            and self.shared_bytes(config, limits) <= limits.shared
            and resident * self._tile_bytes(config) * (config.stages - 1) >= 32768
        )

    def shared_bytes(self, config: DecodeConfig, limits: Limits) -> int:
        """Of a multiprocessor."""
        in_flight = self._tile_bytes(config) * (config.stages - 1)
        queries = 32 * next_power_of_2(self.head_size) + 2048
        return self._resident(config, limits) * (in_flight + queries)

    def _tile_bytes(self, config: DecodeConfig) -> int:
        return 2 * config.tile * next_power_of_2(self.head_size) * self.element_size

    def _resident(self, config: DecodeConfig, limits: Limits) -> int:
        return max(1, round(config.workers * self.kv_heads / limits.multiprocessors))


@dataclass(frozen=True)
class PrefillCase:
    """One entry of prefill_table. element_size: of the queries."""

    head_size: int
    element_size: int
    windowed: bool
    described: bool

    def __str__(self) -> str:
        more = ", windowed" * self.windowed + ", described" * self.described
        return f"prefill, heads of {self.head_size} x {self.element_size} bytes{more}"

    def points(self, names: list[str]) -> list[Model]:
        models = (MODELS[name] for name in names)
        if not self.windowed:
            models = (model._replace(window=0) for model in models)
        alike = (m for m in models if m.head_size == self.head_size)
        return [m for m in dict.fromkeys(alike) if (m.window > 0) == self.windowed]

    @property
    def key(self) -> tuple[int, int, bool, bool]:
        return self.head_size, self.element_size, self.windowed, self.described

    def in_use(self, limits: Limits) -> PrefillConfig:
        return choose_prefill_config(*self.key, limits.architecture)

    def candidates(self, limits: Limits) -> Iterator[PrefillConfig]:
        """The rows of a tile are what the engine plans with."""
        for tile, warps, stages, programs, descriptors in product(
            (16, 32, 64, 128), (4, 8, 16), (2, 3, 4), (1, 2, 4, 8), {False, self.described}
        ):
            config = PrefillConfig(tile, warps, stages, TILE_ROWS, programs, descriptors)
            in_box = not descriptors or tile <= MOST_DESCRIBED_TOKENS
            if in_box and self._fits(config, limits):
                yield config

    def _fits(self, config: PrefillConfig, limits: Limits) -> bool:
        rows, threads = config.rows // config.programs, 32 * config.warps
        # Sums and scores of a thread.
        held = rows * (next_power_of_2(self.head_size) + config.tile) / threads
        most = min(160, 0.75 * limits.registers / threads)
        fits = self.shared_bytes(config, limits) <= limits.shared
        # A warp multiplies 16 rows.
        return fits and 24 <= held <= most and rows >= 16 * config.warps

    def shared_bytes(self, config: PrefillConfig, limits: Limits) -> int:
        """Of a multiprocessor, which has one program at least."""
        rows, size = config.rows // config.programs, next_power_of_2(self.head_size)
        return (rows + 2 * config.stages * config.tile) * size * self.element_size


Case = DecodeCase | PrefillCase


def decode_cases(names: list[str], element_sizes: list[int]) -> list[DecodeCase]:
    keys = ((MODELS[name][1:3], size) for name in names for size in element_sizes)
    return [DecodeCase(*heads, size) for heads, size in dict.fromkeys(keys)]


def prefill_cases(names: list[str]) -> list[PrefillCase]:
    models = [MODELS[name] for name in names]
    kinds = [(m.head_size, QUERY_BYTES, w) for m in models for w in {False, m.window > 0}]
    return [PrefillCase(*kind, d) for kind in dict.fromkeys(kinds) for d in (True, False)]
