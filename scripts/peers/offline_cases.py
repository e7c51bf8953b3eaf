"""The work of scripts/bench offline: the same token ids and lengths for every engine, and what a
worker says of it.

offline256 is nano-vllm's benchmark: 256 prompts and outputs, lengths uniform in 100 to 1,024
(142,827 tokens in, 133,966 out). offline512 is two of it, with other tokens in the second.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import NamedTuple


class Case(NamedTuple):
    """max_tokens: of each prompt. rounds: how often it is measured, after one round that isn't.
    usual: done without being asked for.
    """

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]
    temperature: float
    rounds: int
    warm: bool = True
    usual: bool = True

    @property
    def num_in(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_out(self) -> int:
        return sum(self.max_tokens)


def cases(names: list[str]) -> list[Case]:
    """Those named, in this order; all usual ones for an empty list."""
    rng = random.Random(0)
    mixed = [_ids(rng, rng.randint(100, 1024)) for _ in range(256)]
    lengths = [rng.randint(100, 1024) for _ in range(256)]
    second = [_ids(rng, len(prompt)) for prompt in mixed]
    rng = random.Random(1)
    all_cases = [
        *(_fixed(f"batch {n}", rng, n, 32, 128, rounds=3) for n in (1, 8, 64)),
        *(_fixed(f"batch 256 of 672, {n} out", rng, 256, 672, n, rounds=2) for n in (64, 192)),
        _fixed("prefill 32 x 2,048", rng, 32, 2048, 1, rounds=3),
        Case("offline256", mixed, lengths, 0.6, rounds=2, warm=False),
        Case("offline512", mixed + second, lengths * 2, 0.6, rounds=2, warm=False, usual=False),
        *(
            _fixed(f"batch 256 of 572, {n} out", rng, 256, 572, n, rounds=2, usual=False)
            for n in (64, 192)
        ),
    ]
    unknown = set(names) - {case.name for case in all_cases}
    if unknown:
        raise SystemExit(f"no case {unknown}; there are {[case.name for case in all_cases]}")
    return [case for case in all_cases if (case.name in names if names else case.usual)]


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(0, 10000) for _ in range(count)]


def _fixed(
    name: str,
    rng: random.Random,
    n: int,
    num_in: int,
    num_out: int,
    rounds: int,
    usual: bool = True,
) -> Case:
    prompts = [_ids(rng, num_in) for _ in range(n)]
    return Case(name, prompts, [num_out] * n, 0.0, rounds, usual=usual)


def measure(generate: Callable[[list[list[int]], list[int], float], int], names: list[str]) -> None:
    """Do all cases, the first token of the process first. `generate` returns how many tokens came.

    The environment's process start (argv[1], seconds of time.time()) is when the engine was asked
    for.
    """
    generate([[5, 6, 7]], [1], 0.0)
    say("first token", time.time() - float(sys.argv[1]), 3, 1)
    for case in cases(names):
        for number in range(case.rounds + case.warm):
            start = time.perf_counter()
            tokens = generate(case.prompts, case.max_tokens, case.temperature)
            seconds = time.perf_counter() - start
            assert tokens == case.num_out, f"{case.name}: {tokens} tokens of {case.num_out}"
            if number >= case.warm:
                say(case.name, seconds, case.num_in, case.num_out)


def say(name: str, seconds: float, num_in: int, num_out: int) -> None:
    print("@@", json.dumps([name, seconds, num_in, num_out]), flush=True)
