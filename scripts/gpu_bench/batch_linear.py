"""Which configuration of batch_linear is fastest for each shape and number of tokens, beside
cuBLAS, on the GPU that this runs on.

    batch_linear.py                                      the shapes of the models below
    batch_linear.py --models qwen3-0.6b --tokens 16 64   of some of them
    batch_linear.py --shapes 960x576 576x576:add 3072x576:silu

Launches are replayed from a CUDA graph, one behind the other with programmatic dependent launch, as
in a decode step. They take turns at enough copies of the weight that the L2 cache never serves one.
The floor is the time to read the weight once. cuBLAS's column is its product, and the gated
activation as a kernel of its own where batch_linear does that besides; the residual addition isn't
counted, since a norm can take it.

Two rounds: the first cuts the work in different ways, the second varies the best ones' warps,
stages and prefetch. All that a round needs is compiled before it, in processes of their own.

The last lines are entries for TUNED in kernels/gpu/batch_linear_table.py, for what beats cuBLAS.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import NamedTuple

import torch

from ringcast.kernels.gpu.activation import gated_activation
from ringcast.kernels.gpu.batch_linear import (
    MOST_PARTS,
    batch_linear,
    batch_linear_reference,
    batch_linear_scratch,
)
from ringcast.kernels.gpu.batch_linear_table import (
    MOST_SPLITS,
    SHARED_BYTES,
    Config,
    rule,
    stages_within,
    tokens_tile,
)

MARGIN = 0.03  # cuBLAS must be beaten by more than this share for an entry
REPLAYED_MICROSECONDS = 400  # of a graph, at least
REPLAYS = 7
CACHE_TIMES = 3  # copies of a weight together fill the L2 cache so many times
MOST_SHARED = 220 * 1024
SHARED_ONE = 200 * 1024  # for stages, where a program has a multiprocessor to itself
REFINED = 1  # configurations of the first round that the second varies


class Shape(NamedTuple):
    rows: int
    inputs: int
    part: str = ""  # "add", "silu", "gelu_tanh"

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
    "llama-8b": layer(4096, 32, 8, 128, 14336, 128256),
}


def parse_shape(text: str) -> Shape:
    size, _, part = text.partition(":")
    rows, _, inputs = size.partition("x")
    if part not in ("", "add", "silu", "gelu_tanh"):
        raise argparse.ArgumentTypeError(f"{text!r}: unknown {part}")
    try:
        return Shape(int(rows), int(inputs), part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} isn't ROWSxINPUTS[:part]") from None


def cuts(case: Case, itemsize: int) -> Iterator[Config]:
    """Ways to cut the work that fill the GPU and fit it; the rule's first."""
    shape, tokens = case
    yield rule(*shape[:2], shape.gated, tokens, itemsize)
    tile = tokens_tile(tokens)
    tiles = {16: [16], 32: [32], 64: [64], 128: [64, 128]}[tile]
    if tokens > 128:
        tiles = [128, 256]
    for tile, rows, splits in product(tiles, (8, 16, 32, 64, 128), (1, 2, 4, 8)):
        programs = -(-shape.rows // rows) * -(-tokens // tile) * splits
        # Many rows need no splits, and few programs leave multiprocessors idle.
        if programs < 96 or (splits > 1 and programs > 300) or programs * rows * tile > 1 << 28:
            continue
        # So small a tile of many would read x more often than the weight.
        if (programs > 1200 and rows < 64) or rows * 8 < tile:
            continue
        block = (256 if tile <= 32 and rows <= 32 else 128 if tile <= 64 else 64) * 2 // itemsize
        if block * splits > shape.inputs:
            continue
        swap = rows >= 64
        for shared in (SHARED_BYTES, SHARED_ONE):
            stages = stages_within(shared, rows, tile, block, itemsize)
            yield fitted(case, Config(rows, tile, block, splits, 4, stages, 4, swap), itemsize)


def wholes(case: Case, itemsize: int) -> Iterator[Config]:
    """Ways to cut the work so that a split is one block, loaded before the wait."""
    shape, tokens = case
    tile = tokens_tile(tokens)
    for rows, block in product((16, 32, 64, 128), (128, 256, 512)):
        splits = -(-shape.inputs // block)
        programs = -(-shape.rows // rows) * -(-tokens // tile) * splits
        wasted = splits * block / shape.inputs - 1
        held = rows * block * itemsize
        fits = tile <= 64 and splits <= MOST_SPLITS and 8192 <= held <= 65536
        if fits and 96 <= programs <= 600 and wasted <= 0.1:
            warps = 8 if held > 32768 else 4
            yield Config(rows, tile, block, splits, warps, 1, 1, rows >= 64)


def fitted(case: Case, config: Config, itemsize: int) -> Config:
    """With warps for its accumulators, and no more stages or prefetch than it has blocks."""
    blocks = max(1, -(-case.shape.inputs // config.block) // config.splits)
    big = config.rows * config.tokens >= 16384
    ahead = 65536 // (config.rows * config.block * itemsize)  # so many bytes a program
    return config._replace(
        warps=8 if big else config.warps,
        stages=max(2, min(config.stages, blocks + 1)),
        prefetch=max(1, min(blocks, ahead)),
    )


def variants(config: Config) -> Iterator[Config]:
    """Of a good configuration: other warps, stages, prefetch, operands, blocks."""
    if config.stages == 1:
        yield config._replace(prefetch=0)
        yield config._replace(warps=12 - config.warps)
        yield config._replace(swap=not config.swap)
        return
    yield config._replace(prefetch=0)
    yield config._replace(prefetch=min(4 * config.prefetch, 16))
    yield config._replace(warps=12 - config.warps)
    yield config._replace(stages=max(2, config.stages - 1))
    yield config._replace(swap=not config.swap)
    half = config._replace(block=config.block // 2, stages=min(6, 2 * config.stages))
    yield half._replace(prefetch=2 * config.prefetch)
    if config.stages >= 4:
        double = config._replace(block=config.block * 2, stages=config.stages // 2)
        yield double._replace(prefetch=max(1, config.prefetch // 2))


def allowed(case: Case, config: Config, itemsize: int) -> bool:
    shared = (config.rows + config.tokens) * config.block * itemsize * config.stages
    tiles = -(-case.shape.rows // config.rows) * -(-case.tokens // config.tokens)
    parts = tiles * config.splits * config.rows * config.tokens if config.splits > 1 else 0
    fits = shared <= MOST_SHARED and parts <= MOST_PARTS
    # Registers of accumulators; rows as the left operand are 16 at least.
    held = config.rows * config.tokens // (32 * config.warps) <= 160
    return fits and held and config.block >= 32 and not (config.swap and config.rows < 16)


class Bench:
    """The inputs for one shape: copies of the weight, and everything else once."""

    def __init__(self, shape: Shape, dtype: torch.dtype, most_tokens: int, copies: int = 0) -> None:
        self.shape = shape
        size = shape.rows * shape.inputs * dtype.itemsize
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        weight = torch.randn(shape.rows, shape.inputs, device="cuda", dtype=dtype)
        weight /= shape.inputs**0.5
        copies = copies or max(2, -(-CACHE_TIMES * cache // size))
        self.weights = [weight] + [weight.clone() for _ in range(copies - 1)]
        self.x = torch.randn(most_tokens, shape.inputs, device="cuda", dtype=dtype)
        self.out = torch.zeros(most_tokens, shape.outputs, device="cuda", dtype=dtype)
        self.wide = torch.empty(most_tokens, shape.rows, device="cuda", dtype=dtype)
        self.scratch = batch_linear_scratch(most_tokens, shape.rows, "cuda")

    def launch(self, config: Config, tokens: int, weight: torch.Tensor) -> None:
        x, out = self.x[:tokens], self.out[:tokens]
        options = {"activation": self.shape.activation, "config": config, "pdl": True}
        if self.shape.part == "add":
            options["add_to_TN"] = out
        batch_linear(x, weight, out, self.scratch, **options)

    def cublas(self, tokens: int, weight: torch.Tensor) -> None:
        wide = self.wide[:tokens]
        torch.mm(self.x[:tokens], weight.T, out=wide)
        if self.shape.gated:
            gated_activation(wide, self.out[:tokens], self.shape.part, pdl=True)

    def reference(self, tokens: int) -> torch.Tensor:
        want = torch.empty_like(self.out[:tokens])
        how = {"activation": self.shape.activation}
        batch_linear_reference(self.x[:tokens], self.weights[0], want, None, **how)
        return want

    def is_right(self, want: torch.Tensor, config: Config) -> bool:
        self.out.zero_()
        self.launch(config, len(want), self.weights[0])
        return torch.allclose(self.out[: len(want)], want, rtol=0.03, atol=0.03)

    def time(self, launch: Callable[[torch.Tensor], object], expected: float) -> float:
        """Microseconds a launch, the median of some replays. expected: about as many."""
        copies = len(self.weights)
        rounds = max(1, round(REPLAYED_MICROSECONDS / (expected * copies)))
        launch(self.weights[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for weight in self.weights:
                    launch(weight)
        graph.replay()
        taken = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(1000 * start.elapsed_time(end) / (rounds * copies))
        return statistics.median(taken)


def compile_one(job: tuple[Case, Config, torch.dtype]) -> str | None:
    """In a process of its own; what is compiled is kept on disk. Returns what went wrong."""
    case, config, dtype = job
    try:
        bench = Bench(case.shape, dtype, case.tokens, copies=1)
        bench.launch(config, case.tokens, bench.weights[0])
        torch.cuda.synchronize()
    except Exception as error:
        return f"{case.shape} {tuple(config)}: {type(error).__name__}: {str(error)[:200]}"
    return None


Plan = dict[Case, list[Config]]


def compile_all(plan: Plan, pool: ProcessPoolExecutor, dtype: torch.dtype) -> None:
    """All kernels of a plan, each once. A configuration that doesn't compile leaves the plan."""
    keys: dict[tuple, tuple[Case, Config, torch.dtype]] = {}
    of: dict[tuple[Case, Config], tuple] = {}
    for case, configs in plan.items():
        for config in configs:
            one_tile = case.tokens <= config.tokens
            loaded = config.block * (config.splits if config.stages == 1 else 1)
            even = case.shape.inputs % loaded == 0
            key = (config, case.shape.part, one_tile, even, case.shape.rows % 16)
            of[case, config] = key
            keys.setdefault(key, (case, config, dtype))
    began = time.perf_counter()
    # The slow ones to compile go first.
    order = sorted(keys, key=lambda key: -key[0].rows * key[0].tokens)
    faults = dict(zip(order, pool.map(compile_one, [keys[key] for key in order]), strict=True))
    for fault in filter(None, faults.values()):
        print(f"left out: {fault}", flush=True)
    for case in plan:
        plan[case] = [config for config in plan[case] if not faults[of[case, config]]]
    print(f"{len(keys)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)


def floor(shape: Shape, options: argparse.Namespace) -> float:
    itemsize = getattr(torch, options.dtype).itemsize
    return shape.rows * shape.inputs * itemsize / options.bandwidth / 1e6


Times = dict[Case, dict[Config | None, float]]


def time_all(plan: Plan, times: Times, options: argparse.Namespace) -> None:
    """Adds the microseconds of each configuration to times; None stands for cuBLAS."""
    for shape in dict.fromkeys(case.shape for case in plan):
        bench = Bench(shape, getattr(torch, options.dtype), max(options.tokens))
        for case, configs in plan.items():
            if case.shape == shape:
                taken = times.setdefault(case, {})
                time_case(bench, case.tokens, configs, taken, max(floor(shape, options), 2.0))


def time_case(
    bench: Bench,
    tokens: int,
    configs: list[Config],
    taken: dict[Config | None, float],
    expected: float,
) -> None:
    if None not in taken:
        taken[None] = bench.time(lambda weight: bench.cublas(tokens, weight), expected)
    want = bench.reference(tokens)
    for config in configs:
        if not bench.is_right(want, config):
            raise SystemExit(f"wrong: {bench.shape}, {tokens} tokens, {config}")
        taken[config] = bench.time(functools.partial(bench.launch, config, tokens), expected)


def best_of(taken: dict[Config | None, float]) -> list[Config]:
    return sorted((config for config in taken if config), key=taken.__getitem__)


def search(cases: list[Case], options: argparse.Namespace) -> Times:
    dtype, times = getattr(torch, options.dtype), {}
    itemsize = dtype.itemsize
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        for refine in (False, True):
            plan: Plan = {}
            for case in cases:
                if refine:
                    best = best_of(times[case])[:REFINED]
                    found = [c for b in best for c in variants(b)]
                else:
                    found = [*cuts(case, itemsize), *wholes(case, itemsize)]
                plan[case] = [
                    config
                    for config in dict.fromkeys(found)
                    if allowed(case, config, itemsize) and config not in times.get(case, {})
                ]
            compile_all(plan, pool, dtype)
            began = time.perf_counter()
            time_all(plan, times, options)
            print(f"timed in {time.perf_counter() - began:.0f} s", flush=True)
    return times


def report(times: Times, options: argparse.Namespace) -> None:
    print("| shape | tokens | best | best us | rule | cuBLAS | floor | of floor | of cuBLAS |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    entries: dict[Shape, dict[int, Config | None]] = {}
    for (shape, tokens), taken in times.items():
        ranked = best_of(taken)
        if options.all:
            for config in ranked:
                print(f"  {shape} {tokens} {tuple(config)} {taken[config]:.2f}")
        best, cublas, least = ranked[0], taken[None], floor(shape, options)
        by_rule = taken.get(rule(*shape[:2], shape.gated, tokens), float("nan"))
        row = [
            *(str(shape), str(tokens), str(tuple(best)), f"{taken[best]:.2f}", f"{by_rule:.2f}"),
            *(f"{cublas:.2f}", f"{least:.2f}", f"{100 * least / taken[best]:.0f}%"),
            f"{100 * taken[best] / cublas:.0f}%",
        ]
        print(f"| {' | '.join(row)} |")
        worth = taken[best] < (1 - MARGIN) * cublas
        entries.setdefault(shape, {})[tokens] = best if worth else None
    print()
    for shape, by_tokens in entries.items():
        if any(by_tokens.values()):
            print(f"    ({shape.rows}, {shape.inputs}, {shape.gated}): {{")
            for tokens, config in by_tokens.items():
                print(f"        {tokens}: {f'Config{tuple(config)}' if config else None},")
            print("    },")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[], help="their layers")
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=[])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s, for the floor")
    parser.add_argument("--processes", type=int, default=16, help="that compile")
    parser.add_argument("--all", action="store_true", help="print each configuration's time")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    names = options.models or ([] if options.shapes else list(MODELS))
    shapes = [*options.shapes, *(shape for name in names for shape in MODELS[name])]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.dtype}", flush=True)
    cases = [Case(shape, tokens) for shape in dict.fromkeys(shapes) for tokens in options.tokens]
    report(search(cases, options), options)


if __name__ == "__main__":
    main()
