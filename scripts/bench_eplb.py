"""scripts/bench eplb: how evenly experts load ranks, before and after they are placed, by
simulation with the shipped placement (executor/expert_placement.py).

A layer's experts are as likely as Zipf has it, in a random order: expert i of the order has
1 / i ** EXPONENT. A window of TOKENS tokens says what each expert has had; from that they are
placed, and the ranks' loads are those of the next window, drawn anew. All figures are means over
LAYERS layers.

max / mean: the most that a rank has, over the mean. `first`: as the experts are dealt at the start;
`placed`: after the first window; `drifted`: in a later one, for which each expert's likelihood was
changed by a factor (log-normal, DRIFT), without placing anew.
moved: replicas that came to another rank, of all; `again` those for the drifted window.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from figures import machine, number, table

from ringcast.executor.expert_placement import heaviest, initial, place

HEAD = [
    "ranks",
    "redundant per rank",
    "first, max / mean",
    "placed",
    "drifted",
    "moved",
    "again",
    "to place a layer, ms",
]


def measure(ranks: int, redundant: int, exponent: float, args: argparse.Namespace) -> list[str]:
    random = np.random.default_rng(args.seed)
    slots = args.experts // ranks + redundant
    first = initial(args.experts, ranks, slots)
    ratios: list[tuple[float, float, float]] = []
    moved, again, seconds = [], [], []

    def window(likely_E: np.ndarray) -> np.ndarray:
        return random.multinomial(args.tokens * args.chosen, likely_E / likely_E.sum())

    for _ in range(args.layers):
        likely_E = random.permutation(1 / np.arange(1, args.experts + 1) ** exponent)
        drifted_E = likely_E * random.lognormal(0.0, args.drift, args.experts)
        seen_E = window(likely_E)
        start = time.perf_counter()
        placed = place(seen_E, first)
        seconds.append(time.perf_counter() - start)
        next_E, late_E = window(likely_E), window(drifted_E)
        mean = args.tokens * args.chosen / ranks
        ratios.append(
            (
                heaviest(next_E, first) / mean,
                heaviest(next_E, placed) / mean,
                heaviest(late_E, placed) / mean,
            )
        )
        moved.append((placed != first).mean())
        again.append((place(late_E, placed) != placed).mean())
    return [
        str(ranks),
        str(redundant),
        *(f"{statistics.fmean(each):.2f}" for each in zip(*ratios, strict=True)),
        f"{100 * statistics.fmean(moved):.0f} %",
        f"{100 * statistics.fmean(again):.0f} %",
        number(1e3 * statistics.median(seconds)),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--redundant", type=int, nargs="+", default=[0, 1, 2], help="per rank")
    parser.add_argument("--exponents", type=float, nargs="+", default=[0.5, 1.0], help="of Zipf")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--chosen", type=int, default=8, help="experts of a token")
    parser.add_argument("--tokens", type=int, default=100_000, help="of a window")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--drift", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    print(machine())
    for exponent in args.exponents:
        print(f"\n{args.experts} experts, {args.chosen} of a token, Zipf {exponent:g}\n")
        rows = [
            measure(ranks, redundant, exponent, args)
            for ranks in args.ranks
            for redundant in args.redundant
        ]
        print(table(HEAD, rows))
