"""The configurations of a dense product that are worth a try, the likeliest first.

A model of the hardware ranks the ways to cut the work, each with the blocks and stages that fit it;
what is measured to be best is then varied. The model knows four limits: reading from memory once,
what all programs read from the L2 cache, what one multiprocessor reads, and what it multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from ringcast.kernels.gpu.batch_linear import MOST_PARTS, MOST_TILES
from ringcast.kernels.gpu.batch_linear_table import (
    MOST_SPLITS,
    MULTIPROCESSORS,
    SHARED_BYTES,
    Config,
    configuration,
    rule,
    stages_within,
    tokens_tile,
)

ITEMSIZE = 2
MOST_SHARED = 220 * 1024
SHARED_ONE = 200 * 1024  # for stages, where a program has a multiprocessor to itself
MEMORY, CACHE, ONE_CACHE = 4.3e6, 5.5e6, 0.09e6  # bytes a microsecond
ONE_PRODUCT = 6.0e6  # operations a microsecond of one multiprocessor
LONGEST_AHEAD = 65536  # bytes of the weight that a program asks for before its turn


class Shape(NamedTuple):
    """part: what is in the launch besides: "add", "silu", "gelu_tanh"."""

    rows: int
    inputs: int
    part: str = ""

    @property
    def activation(self) -> str | None:
        return self.part if self.gated else None

    @property
    def gated(self) -> bool:
        return self.part in ("silu", "gelu_tanh")

    @property
    def outputs(self) -> int:
        return self.rows // 2 if self.gated else self.rows

    def __str__(self) -> str:
        return f"{self.rows}x{self.inputs}" + (f":{self.part}" if self.part else "")


class Case(NamedTuple):
    shape: Shape
    tokens: int

    def __str__(self) -> str:
        return f"{self.shape} x {self.tokens}"

    @property
    def num_bytes(self) -> int:
        """That must move: the weight, x and the result, each once."""
        s = self.shape
        return ITEMSIZE * (s.rows * s.inputs + self.tokens * (s.inputs + s.outputs))

    @property
    def operations(self) -> float:
        return 2.0 * self.tokens * self.shape.rows * self.shape.inputs


def layer(hidden: int, heads: int, kv_heads: int, size: int, inner: int, vocab: int) -> list[Shape]:
    return [
        Shape((heads + 2 * kv_heads) * size, hidden),
        Shape(hidden, heads * size, "add"),
        Shape(2 * inner, hidden, "silu"),
        Shape(hidden, inner, "add"),
        Shape(vocab, hidden),
    ]


MODELS = {
    "qwen3-0.6b": layer(1024, 16, 8, 128, 3072, 151936),
    "llama-3.1-8b": layer(4096, 32, 8, 128, 14336, 128256),
}


def first_round(case: Case, most: int) -> list[Config]:
    """What the table has and the rule says, and so many more."""
    shape, tokens = case
    known = [rule(*shape[:2], shape.gated, tokens)]
    in_use = configuration(*shape[:2], shape.gated, tokens)
    if in_use:
        known.insert(0, in_use)
    found = [*tiles(case)] if tokens > 16 else []
    if tokens <= 64:
        found += [*cuts(case), *wholes(case)]
    ranked = sorted(dict.fromkeys(found), key=lambda config: estimate(case, config))
    fitting = [config for config in ranked if allowed(case, config)][:most]
    return list(dict.fromkeys([*(c for c in known if allowed(case, c)), *fitting]))


def second_round(case: Case, best: list[Config]) -> list[Config]:
    found = [varied for config in best for varied in variants(case, config)]
    return [config for config in dict.fromkeys(found) if allowed(case, config)]


def tiles(case: Case) -> Iterator[Config]:
    """Of tile_linear."""
    shape, tokens = case
    widest = max(64, 1 << (min(tokens, 256) - 1).bit_length())
    for rows, tile, splits, block in product(
        (64, 128, 256), (32, 64, 128, 256), (1, 2, 4, 8, 16), (64, 128)
    ):
        programs = -(-shape.rows // rows) * -(-tokens // tile) * splits
        if tile > widest or (tile < 64 and tokens > 32) or block * splits > shape.inputs:
            continue
        # Splits wait for each other, so all of them must run at once.
        if programs < 48 or (splits > 1 and programs > MULTIPROCESSORS):
            continue
        warps = 4 if rows * tile <= 64 * 128 else 8
        for shared in (SHARED_BYTES, MOST_SHARED):
            stages = min(6, shared // ((rows + tile) * block * ITEMSIZE))
            if stages >= 2:
                ahead = LONGEST_AHEAD // (rows * block * ITEMSIZE)
                config = Config(rows, tile, block, splits, warps, stages, ahead, rows > tile, True)
                yield fitted(case, config)


def cuts(case: Case) -> Iterator[Config]:
    """Of the other kernel, for few tokens."""
    shape, tokens = case
    tile = tokens_tile(tokens)
    for rows, splits in product((16, 32, 64, 128), (1, 2, 4, 8)):
        programs = -(-shape.rows // rows) * -(-tokens // tile) * splits
        # Many rows need no splits, and few programs leave multiprocessors idle.
        if programs < 96 or (splits > 1 and programs > 300) or programs * rows * tile > 1 << 28:
            continue
        if (programs > 1200 and rows < 64) or rows * 8 < tile:
            continue
        block = 256 if tile <= 32 and rows <= 32 else 128
        if block * splits > shape.inputs:
            continue
        for shared in (SHARED_BYTES, SHARED_ONE):
            stages = stages_within(shared, rows, tile, block, ITEMSIZE)
            yield fitted(case, Config(rows, tile, block, splits, 4, stages, 4, rows >= 64))


def wholes(case: Case) -> Iterator[Config]:
    """Of the other kernel, with a split that is one block, loaded before the wait."""
    shape, tokens = case
    tile = tokens_tile(tokens)
    for rows, block in product((16, 32, 64, 128), (128, 256, 512)):
        splits = -(-shape.inputs // block)
        programs = -(-shape.rows // rows) * -(-tokens // tile) * splits
        wasted = splits * block / shape.inputs - 1
        held = rows * block * ITEMSIZE
        fits = tile <= 64 and splits <= MOST_SPLITS and 8192 <= held <= 65536
        if fits and 96 <= programs <= 600 and wasted <= 0.1:
            yield Config(rows, tile, block, splits, 8 if held > 32768 else 4, 1, 1, rows >= 64)


def fitted(case: Case, config: Config) -> Config:
    """With no more stages or prefetch than it has blocks."""
    blocks = max(1, -(-case.shape.inputs // config.block) // config.splits)
    return config._replace(
        stages=max(2, min(config.stages, blocks + 1)), prefetch=max(1, min(blocks, config.prefetch))
    )


def variants(case: Case, config: Config) -> Iterator[Config]:
    """Of a good configuration: other warps, stages, prefetch, operands, blocks."""
    blocks = -(-case.shape.inputs // config.block) // config.splits
    yield config._replace(prefetch=0)
    yield config._replace(warps=12 - config.warps)
    yield config._replace(swap=not config.swap)
    if config.stages == 1:
        return
    yield config._replace(prefetch=max(1, config.prefetch // 4))
    yield config._replace(prefetch=min(4 * config.prefetch, max(blocks, 1), 16))
    yield config._replace(stages=max(2, config.stages - 1))
    yield config._replace(stages=config.stages + 1)
    half = config._replace(block=config.block // 2, stages=min(8, 2 * config.stages))
    yield half._replace(prefetch=2 * config.prefetch)
    if config.stages >= 4:
        double = config._replace(block=config.block * 2, stages=config.stages // 2)
        yield double._replace(prefetch=max(1, config.prefetch // 2))


def programs_of(case: Case, config: Config) -> int:
    return -(-case.shape.rows // config.rows) * -(-case.tokens // config.tokens) * config.splits


def estimate(case: Case, config: Config) -> float:
    """Microseconds, roughly: good for an order."""
    programs = programs_of(case, config)
    rounds = -(-programs // MULTIPROCESSORS)
    inputs = case.shape.inputs / config.splits
    moved = (config.rows + config.tokens) * inputs * ITEMSIZE
    multiplied = 2.0 * config.rows * config.tokens * inputs
    taken = max(
        case.num_bytes / MEMORY,
        programs * moved / CACHE,
        rounds * moved / ONE_CACHE,
        rounds * multiplied / ONE_PRODUCT,
    )
    if config.splits > 1:
        taken += 1.5 + 8 * programs * config.rows * config.tokens / CACHE
    # What is in flight hides the latency of memory; a second program, that of the start.
    if _shared(config) > SHARED_BYTES:
        taken += 0.3
    return taken + (0.0 if config.tma else 0.5)


def _shared(config: Config) -> int:
    return (config.rows + config.tokens) * config.block * ITEMSIZE * config.stages


def allowed(case: Case, config: Config) -> bool:
    tiles = programs_of(case, config) // config.splits
    parts = tiles * config.splits * config.rows * config.tokens if config.splits > 1 else 0
    fits = _shared(config) <= MOST_SHARED and parts <= MOST_PARTS and 2 * tiles <= MOST_TILES
    if config.splits == 1:
        fits = _shared(config) <= MOST_SHARED
    # Registers of accumulators; rows as the left operand are 16 at least.
    held = config.rows * config.tokens // (32 * config.warps) <= 160
    taken = config.rows // (2 if case.shape.gated else 1)
    left = taken if config.swap else config.tokens
    if config.tma:
        sound = left >= 64 and taken >= 16 and config.splits <= config.tokens
        # Descriptors take rows of 16 bytes' multiples.
        sound &= case.shape.inputs % 8 == 0 and config.block >= 64
    else:
        sound = config.block >= 32 and not (config.swap and config.rows < 16)
    return fits and held and sound
