"""How long the products of a mixture of experts take, beside what memory and arithmetic allow, on
the GPU that this runs on.

    experts.py                                  every model below, at 1 to 8192 tokens
    experts.py --models mixtral-8x7b --tokens 8 256

Launches are replayed from a CUDA graph, one behind the other with programmatic dependent launch.
They take turns at SETS sets of tokens, whose experts a router of random logits has chosen, so that
a few tokens' weights aren't in the cache. The floor is the longer of two times: to read the weights
of the used experts once, and to do the arithmetic. `dense` is cuBLAS's time for two products with
as many rows and one expert's weight, which is what many tokens could take.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from expert_space import DOWN, GATE_UP, MODELS, Model

from ringcast.kernels.gpu.architecture import architecture_of
from ringcast.kernels.gpu.expert_routing import dispatch, is_direct, make_blocks, route
from ringcast.kernels.gpu.experts import (
    ExpertConfig,
    ExpertPlan,
    choose_plan,
    combine,
    expert_down,
    expert_down_reference,
    expert_gate_up,
    expert_gate_up_reference,
    num_blocks,
)

SETS = 8
REPLAYS = 9
TOKENS = [1, 8, 64, 256, 2048, 8192]


class Case:
    """One model's layer, and SETS steps of so many tokens for blocks of so many slots. routed:
    False for a look at what would be launched.
    """

    def __init__(
        self,
        model: Model,
        tokens: int,
        rows: int,
        weights: tuple[torch.Tensor, torch.Tensor],
        routed: bool = True,
    ) -> None:
        self.model, self.tokens, self.rows = model, tokens, rows
        self.gate_up, self.down = weights
        m, device, dtype = model, self.down.device, self.down.dtype
        self.pdl = device.type == "cuda"
        self.count = num_blocks(tokens, m.chosen, m.experts, rows)
        self.x = torch.randn(tokens, m.hidden, device=device, dtype=dtype)
        self.inner = torch.randn(self.count * rows, m.inner, device=device, dtype=dtype)
        self.y = self.x.new_zeros(tokens * m.chosen, m.hidden)
        self.out = torch.zeros_like(self.x)
        self.sets: list[tuple] = []
        self.counted = {
            "num_tokens_N": torch.full((1,), tokens, dtype=torch.int32, device=device),
            "loads_E": torch.zeros(m.experts, dtype=torch.int64, device=device),
        }
        generator = torch.Generator(device).manual_seed(tokens)
        for _ in range(SETS):
            logits = torch.randn(tokens, m.experts, device=device, generator=generator)
            blocks = make_blocks(self.count, self.count * rows, m.experts, device)
            experts = torch.zeros(tokens, m.chosen, dtype=torch.int32, device=device)
            step = logits, experts, torch.zeros_like(experts, dtype=torch.float32), blocks
            if routed:
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
        self.product(kind, config, step, self.inner if kind == GATE_UP else self.y)

    def product(
        self, kind: int, config: ExpertConfig | None, step: tuple, out: torch.Tensor
    ) -> None:
        """Into `out`; by the reference where there is no configuration."""
        _, _, weights, blocks = step
        shape = {"rows": self.rows, "count": self.count, "config": config, "pdl": self.pdl}
        if kind == GATE_UP:
            few = {"chosen": self.model.chosen, **shape}
            multiply = expert_gate_up if config else expert_gate_up_reference
            multiply(self.x, self.gate_up, blocks, out, "silu", **few)
        else:
            multiply = expert_down if config else expert_down_reference
            multiply(self.inner, self.down, blocks, weights, out, **shape)

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


def make_weights(
    m: Model, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, 2 I, H] and [E, H, I]."""
    gate_up, down = (
        torch.randn(m.experts, *shape, device=device, dtype=dtype) / shape[1] ** 0.5
        for shape in ((2 * m.inner, m.hidden), (m.hidden, m.inner))
    )
    return gate_up, down


def planned(m: Model, tokens: int) -> ExpertPlan:
    on = architecture_of(torch.device("cuda", torch.cuda.current_device()))
    return choose_plan(tokens * m.chosen, m.experts, 2, on)


def measure(case: Case, options: argparse.Namespace) -> list[str]:
    """A row of the table."""
    plan = planned(case.model, case.tokens)
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
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, us a launch")
    for name in options.models:
        m = MODELS[name]
        weights = make_weights(m)
        print(
            f"\n{name}\n| tokens | experts | rows | gate_up (of floor) | down (of floor) | GB/s | "
            "TFLOP/s | floor | of floor | dense | routing | combine |\n|" + " --- |" * 12
        )
        for tokens in options.tokens:
            row = measure(Case(m, tokens, planned(m, tokens).rows, weights), options)
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
