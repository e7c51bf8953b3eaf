"""The search for the fastest dense products: `scripts/tune dense`.

For each shape and number of tokens the likeliest configurations are timed, then variations of the
two best; last, the three best and cuBLAS take turns, and the table has the winner. Kernels are
compiled in other processes meanwhile. What there is when the time is up is what is written.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import IO

import torch
from chain import Bench, Timer, norm_alone
from compile_pool import CompilePool, say
from dense_space import MODELS, Case, Shape, first_round, second_round

from ringcast.kernels.gpu.batch_linear_table import TUNED, Config

MARGIN = 0.03  # cuBLAS must be beaten by more than this share for an entry
FINALISTS, FINAL_SAMPLES = 3, 9
FIRST_SHARE, SECOND_SHARE = 0.6, 0.85  # of the budget, when a round must end
Pending = dict[Case, list[tuple[Config, list[Future[str]]]]]
Times = dict[Case, dict[Config | None, float]]


class Search:
    """end: of time.monotonic(). log: takes a line of JSON for each time. Raises nothing for a
    configuration that doesn't compile, doesn't fit or is wrong: it is logged and left out.
    """

    def __init__(
        self, cases: list[Case], most: int, pool: CompilePool, end: float, log: IO[str]
    ) -> None:
        self.cases, self.most, self.end = cases, most, end
        self.times: Times = {case: {} for case in cases}
        self.final: Times = {}
        self.norms: dict[Case, float] = {}
        self.left_out = 0
        self._tried: set[tuple[Case, Config]] = set()
        self._pool, self._log, self._began = pool, log, time.monotonic()

    def run(self) -> None:
        gc.disable()  # nothing may be freed on the device in the middle of a capture
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                self._run()
        finally:
            gc.enable()

    def _run(self) -> None:
        plan = {case: first_round(case, self.most) for case in self.cases}
        pending = self._compile(plan)
        self._say(f"{sum(map(len, plan.values()))} configurations, {len(self._pool)} kernels")
        again: Pending = {}
        for bench, case in self._benches(FIRST_SHARE):
            self._time_case(bench, case, pending[case], FIRST_SHARE)
            best = self.ranked(case)[:2]
            known = self.times[case]
            found = [config for config in second_round(case, best) if config not in known]
            again |= self._compile({case: found})
        self._say(f"first round done, {len(self._pool)} kernels")
        for bench, case in self._benches(1.0):
            left = [*pending[case], *again.get(case, [])]  # of the first, what wasn't compiled yet
            self._time_case(bench, case, left, SECOND_SHARE)
            self._play_off(bench, case)
        self._say("done")

    def _say(self, text: str) -> None:
        say(f"[{time.monotonic() - self._began:.0f} s] {text}")

    def _left(self, share: float) -> float:
        """Seconds until that share of the budget is used."""
        return self._began + share * (self.end - self._began) - time.monotonic()

    def _benches(self, share: float) -> Iterator[tuple[Bench, Case]]:
        """Every case in turn, while there is time."""
        most = max(case.tokens for case in self.cases)
        for shape in dict.fromkeys(case.shape for case in self.cases):
            if self._left(share) <= 0:
                return
            bench = Bench(shape, torch.bfloat16, most)
            for case in self.cases:
                if case.shape == shape and self._left(share) > 0:
                    yield bench, case
            del bench
            gc.collect()
            torch.cuda.empty_cache()

    def _compile(self, plan: dict[Case, list[Config]]) -> Pending:
        pending: Pending = {}
        for shape in dict.fromkeys(case.shape for case in plan):
            of_shape = [case for case in plan if case.shape == shape]
            bench = Bench(shape, torch.bfloat16, max(case.tokens for case in of_shape), copies=1)
            for case in of_shape:
                pending[case] = []
                for config in plan[case]:
                    launch, weight = bench.ours(config, case.tokens), bench.weights[0]
                    started = self._pool.start(lambda go=launch, w=weight: go(w))
                    pending[case].append((config, started))
        return pending

    def _time_case(
        self,
        bench: Bench,
        case: Case,
        pending: list[tuple[Config, list[Future[str]]]],
        share: float,
    ) -> None:
        taken = self.times[case]
        if None not in taken:
            self.norms[case] = norm_alone(bench, case)
            taken[None] = bench.time(bench.cublas(case.tokens), floor(case))
            self._note(case, None, taken[None])
        want = bench.want(case.tokens)
        for config, compiling in pending:
            left = self._left(share)
            if (case, config) in self._tried:
                continue
            if left <= 0 or wait(compiling, left).not_done:
                return
            self._tried.add((case, config))
            fault = next(filter(None, (future.result() for future in compiling)), "")
            if not fault:
                fault = self._time_one(bench, case, config, want)
            if fault:
                self.left_out += 1
                self._note(case, config, None, fault)

    def _time_one(self, bench: Bench, case: Case, config: Config, want: torch.Tensor) -> str:
        taken = self.times[case]
        try:
            if not bench.is_right(want, config):
                return "wrong"
            launch = bench.ours(config, case.tokens)
            taken[config] = bench.time(launch, taken[None] or 1.0, min(taken.values()))
        except Exception as error:
            if "CUDA error" in str(error):
                raise  # nothing can be launched any more
            return f"{type(error).__name__}: {str(error)[:200]}"
        self._note(case, config, taken[config])
        return ""

    def _play_off(self, bench: Bench, case: Case) -> None:
        """The best and cuBLAS in turn, so that clocks and heat are the same for all."""
        contenders = [None, *self.ranked(case)[:FINALISTS]]
        timers = {}
        for config in contenders:
            one = bench.ours(config, case.tokens) if config else bench.cublas(case.tokens)
            timers[config] = Timer(bench.weights, one, self.times[case][config])
        samples: dict[Config | None, list[float]] = {config: [] for config in contenders}
        for _ in range(FINAL_SAMPLES):
            for config, timer in timers.items():
                samples[config].append(timer.sample())
        self.final[case] = {config: statistics.median(each) for config, each in samples.items()}
        for config, median in self.final[case].items():
            self._note(case, config, median, final=True)

    def ranked(self, case: Case) -> list[Config]:
        taken = self.final.get(case) or self.times[case]
        return sorted((config for config in taken if config), key=taken.__getitem__)

    def best(self, case: Case) -> tuple[Config, float, float] | None:
        """The fastest, its microseconds and cuBLAS's, of a chain."""
        ranked, taken = self.ranked(case), self.final.get(case) or self.times[case]
        return (ranked[0], taken[ranked[0]], taken[None]) if ranked else None

    def _note(
        self,
        case: Case,
        config: Config | None,
        taken: float | None,
        fault: str = "",
        final: bool = False,
    ) -> None:
        line = {
            "shape": str(case.shape),
            "tokens": case.tokens,
            "config": list(config) if config else "cuBLAS",
            "us": taken and round(taken, 3),
            "norm": round(self.norms[case], 3),
            "floor": round(floor(case), 3),
        }
        extra = ({"fault": fault} if fault else {}) | ({"final": True} if final else {})
        self._log.write(json.dumps(line | extra) + "\n")
        self._log.flush()


def floor(case: Case) -> float:
    """Microseconds that bytes or operations take at what was measured on an H200."""
    return max(case.num_bytes / 4.3e6, case.operations / 790e6)


def report(search: Search, models: list[str]) -> str:
    """Two tables: of products, less the norm of their chain, and of the layers they make."""
    lines = [
        "us less the norm's; * by the play-off",
        "| shape | tokens | best | us | cuBLAS | floor | of floor | of cuBLAS |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in search.cases:
        if not (found := search.best(case)):
            continue
        config, taken, cublas = found
        taken, cublas = (each - search.norms[case] for each in (taken, cublas))
        row = [
            *(str(case.shape), str(case.tokens), str(tuple(config))),
            f"{taken:.2f}{'*' if case in search.final else ''}",
            *(f"{cublas:.2f}", f"{floor(case):.2f}", f"{100 * floor(case) / taken:.0f}%"),
            f"{100 * taken / cublas:.0f}%",
        ]
        lines.append(f"| {' | '.join(row)} |")
    lines += [
        "",
        "| layer, chains with its norms | tokens | table | cuBLAS | floor of the products |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in models:
        for tokens in dict.fromkeys(case.tokens for case in search.cases):
            found = [
                (search.best(case), floor(case))
                for case in (Case(shape, tokens) for shape in MODELS[name][:4])
                if case in search.times
            ]
            if len(found) == 4 and all(best for best, _ in found):
                ours = sum(min(best[1:]) for best, _ in found if best)
                cublas = sum(best[2] for best, _ in found if best)
                least = sum(each for _, each in found)
                lines.append(f"| {name} | {tokens} | {ours:.2f} | {cublas:.2f} | {least:.2f} |")
    lines.append(f"\n{search.left_out} configurations were left out; the log says why.")
    return "\n".join(lines)


def table(search: Search) -> dict[tuple[int, int, bool], dict[int, Config | None]]:
    """TUNED with what was found."""
    tuned = {key: dict(by_tokens) for key, by_tokens in TUNED.items()}
    for case in search.cases:
        if found := search.best(case):
            config, taken, cublas = found
            key = (*case.shape[:2], case.shape.gated)
            worth = taken < (1 - MARGIN) * cublas
            tuned.setdefault(key, {})[case.tokens] = config if worth else None
    return tuned


def write_table(path: Path, tuned: dict) -> None:
    """In place of the TUNED that the file at `path` has."""
    rows = []
    for (weight_rows, inputs, gated), by_tokens in tuned.items():
        if any(by_tokens.values()):
            rows.append(f"    ({weight_rows}, {inputs}, {gated}): {{")
            for tokens, config in sorted(by_tokens.items()):
                rows.append(f"        {tokens}: {written(config)},")
            rows.append("    },")
    replace_tuned(path, rows)


def written(config: Config | None) -> str:
    if config is None:
        return "None"
    return f"Config{tuple(config) if config.tma else tuple(config)[:-1]}"


def replace_tuned(path: Path, rows: list[str]) -> None:
    before, start, rest = path.read_text().partition("\nTUNED: ")
    head, _, old = rest.partition("\n")
    if not start or not head.endswith(" = {") or "\n}\n" not in old:
        raise ValueError(f"{path} has no TUNED that could be replaced")
    after = old.partition("\n}\n")[2]
    path.write_text("\n".join([f"{before}{start}{head}", *rows, "}", after]))


def parse_shape(text: str) -> Shape:
    size, _, part = text.partition(":")
    rows, _, inputs = size.partition("x")
    if part not in ("", "add", "silu", "gelu_tanh") or not (rows.isdigit() and inputs.isdigit()):
        raise ValueError(f"{text!r} isn't ROWSxINPUTS[:add|:silu|:gelu_tanh]")
    return Shape(int(rows), int(inputs), part)
