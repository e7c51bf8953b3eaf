"""How long the products of a mixture of experts take, beside what memory and arithmetic allow, on
the GPU that this runs on.

    experts.py                                  every model below, at 1 to 8192 tokens
    experts.py --models mixtral-8x7b --tokens 8 256
    experts.py --tune                           also every configuration tried for each of them

Launches are replayed from a CUDA graph, one behind the other with programmatic dependent launch.
They take turns at SETS sets of tokens, whose experts a router of random logits has chosen, so that
a few tokens' weights aren't in the cache. The floor is the longer of two times: to read the weights
of the used experts once, and to do the arithmetic. `dense` is cuBLAS's time for two products with
as many rows and one expert's weight, which is what many tokens could take.

--tune prints for each number of slots in a block what is fastest for either product, and the sum.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from ringcast.kernels.gpu.expert_routing import dispatch, is_direct, make_blocks, route
from ringcast.kernels.gpu.experts import (
    ExpertConfig,
    choose_plan,
    combine,
    expert_down,
    expert_gate_up,
    num_blocks,
)

SETS = 8
REPLAYS = 9
MOST_SHARED = 227 * 1024
TOKENS = [1, 8, 64, 256, 2048, 8192]
GATE_UP, DOWN = 2, 1  # weights that a program of a product multiplies with


class Model(NamedTuple):
    experts: int
    chosen: int
    hidden: int
    inner: int


MODELS = {
    "qwen3-30b-a3b": Model(128, 8, 2048, 768),
    "mixtral-8x7b": Model(8, 2, 4096, 14336),
}


class Case:
    """One model's layer, and SETS steps of so many tokens for blocks of so many slots."""

    def __init__(self, model: Model, tokens: int, rows: int, weights: list[torch.Tensor]) -> None:
        self.model, self.tokens, self.rows = model, tokens, rows
        self.gate_up, self.down = weights
        m = model
        self.count = num_blocks(tokens, m.chosen, m.experts, rows)
        self.x = torch.randn(tokens, m.hidden, device="cuda", dtype=torch.bfloat16)
        self.inner = self.x.new_zeros(self.count * rows, m.inner)
        self.y = self.x.new_zeros(tokens * m.chosen, m.hidden)
        self.out = torch.zeros_like(self.x)
        self.sets: list[tuple] = []
        self.counted = {
            "num_tokens_N": torch.full((1,), tokens, dtype=torch.int32, device="cuda"),
            "loads_E": torch.zeros(m.experts, dtype=torch.int64, device="cuda"),
        }
        generator = torch.Generator("cuda").manual_seed(tokens)
        for _ in range(SETS):
            logits = torch.randn(tokens, m.experts, device="cuda", generator=generator)
            blocks = make_blocks(self.count, self.count * rows, m.experts, "cuda")
            experts = torch.zeros(tokens, m.chosen, dtype=torch.int32, device="cuda")
            step = logits, experts, torch.zeros_like(experts, dtype=torch.float32), blocks
            self.route(step, False)
            self.sets.append(step)
        self.used = sum(len(step[1].unique()) for step in self.sets) / SETS

    def route(self, step: tuple, pdl: bool = True) -> None:
        logits, experts, weights, blocks = step
        direct = is_direct(self.tokens)
        few = {"blocks": blocks, "rows": self.rows} if direct else {}
        route(logits, experts, weights, renormalize=True, pdl=pdl, **self.counted, **few)
        if not direct:
            dispatch(experts, blocks, rows=self.rows, held=self.model.experts, pdl=pdl)

    def multiply(self, kind: int, config: ExpertConfig, step: tuple) -> None:
        _, _, weights, blocks = step
        shape = {"rows": self.rows, "count": self.count, "config": config, "pdl": True}
        if kind == GATE_UP:
            few = {"chosen": self.model.chosen, **shape}
            expert_gate_up(self.x, self.gate_up, blocks, self.inner, "silu", **few)
        else:
            expert_down(self.inner, self.down, blocks, weights, self.y, **shape)

    def combine(self, step: tuple) -> None:
        combine(self.y, step[1], self.out, pdl=True)

    def bytes_and_flops(self, kind: int) -> tuple[float, float]:
        size = kind * self.model.hidden * self.model.inner
        return self.used * size * 2, 2.0 * self.tokens * self.model.chosen * size

    def floor(self, kind: int, options: argparse.Namespace) -> float:
        """Microseconds."""
        num_bytes, flops = self.bytes_and_flops(kind)
        return max(num_bytes / options.bandwidth, flops / options.tflops) / 1e6

    def dense(self) -> float:
        """Microseconds of two products of all pairs' rows with one expert's weight."""
        rows = self.x.new_zeros(self.tokens * self.model.chosen, self.model.hidden)
        wide = self.x.new_zeros(len(rows), 2 * self.model.inner)

        def multiply(step: tuple) -> None:
            torch.mm(rows, self.gate_up[0].T, out=wide)
            torch.mm(wide[:, : self.model.inner], self.down[0].T, out=rows)

        return self.time(multiply)

    def time(self, launch: Callable[[tuple], None]) -> float:
        """Microseconds a launch: the median of some replays."""
        launch(self.sets[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        rounds = 4 if self.tokens <= 256 else 1
        with torch.cuda.graph(graph):
            for step in self.sets * rounds:
                launch(step)
        graph.replay()
        taken = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(1000 * start.elapsed_time(end) / (SETS * rounds))
        return statistics.median(taken)


def candidates(kind: int, rows: int) -> Iterator[ExpertConfig]:
    """kind: how many weights a program multiplies with."""
    outputs = (32, 64, 128, 256) if rows >= 64 else (16, 32, 64, 128)
    for out, block, warps, stages in product(outputs, (64, 128, 256), (4, 8), (3, 4, 5)):
        held = rows * out * kind / (warps * 32)  # sums of a thread
        shared = (rows + kind * out) * block * 2 * (stages if rows >= 64 else stages - 1)
        few = rows <= 32 and (warps == 8 or block == 64 or kind * out > 128 or kind * out < 32)
        many = rows >= 64 and (block == 256 or kind * out < 128 or held < 32)
        if held <= 128 and 40_000 <= shared <= MOST_SHARED and not few and not many:
            yield ExpertConfig(out, block, warps, stages)


def tune(case: Case, options: argparse.Namespace) -> None:
    best = {}
    for kind in (GATE_UP, DOWN):

        def fits(config: ExpertConfig, kind: int = kind) -> bool:
            try:
                case.multiply(kind, config, case.sets[0])
            except OutOfResources:
                return False
            return True

        configs = list(candidates(kind, case.rows))
        # Most of compiling holds no lock. Each thread takes up the CUDA context first.
        with ThreadPoolExecutor(options.threads, initializer=torch.cuda.synchronize) as pool:
            fitting = list(pool.map(fits, configs))
        times = {
            config: case.time(lambda step, c=config, k=kind: case.multiply(k, c, step))
            for config, fit in zip(configs, fitting, strict=True)
            if fit
        }
        best[kind] = sorted((taken, tuple(config)) for config, taken in times.items())[:3]
    total = best[GATE_UP][0][0] + best[DOWN][0][0]
    print(f"  rows {case.rows}: {total:.1f} us", flush=True)
    for name, kind in (("gate_up", GATE_UP), ("down", DOWN)):
        print(f"    {name}", *(f"{taken:.1f} {config}" for taken, config in best[kind]), sep="  ")


def measure(case: Case, options: argparse.Namespace) -> list[str]:
    """A row of the table."""
    plan = choose_plan(case.tokens * case.model.chosen, case.model.experts, 2)
    parts = []
    for kind, config in ((GATE_UP, plan.gate_up), (DOWN, plan.down)):
        taken = case.time(lambda step, k=kind, c=config: case.multiply(k, c, step))
        num_bytes, flops = case.bytes_and_flops(kind)
        parts.append((taken, case.floor(kind, options), num_bytes, flops))
    taken, floor, num_bytes, flops = (sum(column) for column in zip(*parts, strict=True))
    routing, combining = case.time(case.route), case.time(case.combine)
    return [
        *(str(case.tokens), f"{case.used:.0f}", str(plan.rows)),
        *(f"{part[0]:.1f} ({100 * part[1] / part[0]:.0f}%)" for part in parts),
        *(f"{num_bytes / taken / 1e3:.0f}", f"{flops / taken / 1e6:.0f}"),
        *(f"{floor:.1f}", f"{100 * floor / taken:.0f}%", f"{case.dense():.1f}"),
        *(f"{routing:.1f}", f"{combining:.1f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s, for the floor")
    parser.add_argument("--tflops", type=float, default=790, help="of bfloat16, for the floor")
    parser.add_argument("--tune", action="store_true", help="try configurations")
    parser.add_argument("--threads", type=int, default=16, help="that compile")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, us a launch")
    for name in options.models:
        m = MODELS[name]
        weights = [
            torch.randn(m.experts, *shape, device="cuda", dtype=torch.bfloat16) / shape[1] ** 0.5
            for shape in ((2 * m.inner, m.hidden), (m.hidden, m.inner))
        ]
        print(
            f"\n{name}\n| tokens | experts | rows | gate_up (of floor) | down (of floor) | GB/s | "
            "TFLOP/s | floor | of floor | dense | routing | combine |\n|" + " --- |" * 12
        )
        for tokens in options.tokens:
            plan = choose_plan(tokens * m.chosen, m.experts, 2)
            row = measure(Case(m, tokens, plan.rows, weights), options)
            print(f"| {' | '.join(row)} |", flush=True)
        for tokens in options.tokens if options.tune else ():
            print(f"\n{name}, {tokens} tokens")
            mean = tokens * m.chosen / m.experts
            for rows in (16, 32, 64, 128):
                if rows == 16 or mean / 2 <= rows <= max(4 * mean, 32):
                    if rows < 64 and mean > 256:
                        continue
                    tune(Case(m, tokens, rows, weights), options)


if __name__ == "__main__":
    main()
