"""The search for the fastest configurations: what `scripts/tune` does, whatever it tunes.

For each case the likeliest configurations are timed, then variations of the two best; last, the
three best and what they must beat take turns. Kernels are compiled in other processes meanwhile.
What there is when the time is up is what counts. A configuration is timed only if its results are
those of the reference.

What is tuned is a Subject (tune_dense.py, tune_few.py, tune_attention.py, tune_experts.py).
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import IO, Any, NamedTuple, Protocol

import torch
from compile_pool import CompilePool, say
from timer import MeanTimer, Timer, median

FINALISTS, FINAL_SAMPLES = 3, 9
FIRST_SHARE, SECOND_SHARE = 0.6, 0.85  # of the budget, when a round must end
PATIENCE = 5.0  # seconds
MARGIN = 0.03  # of what must be beaten, at least, for another choice
Config = tuple[Any, ...]  # a named one
Contender = Config | None  # None: the library
Compiling = tuple[Config, list[Future[str]]]
Pending = dict[Hashable, list[Compiling]]
Times = dict[Hashable, dict[Contender, float]]


class Bench(Protocol):
    """A subject's inputs, on the device."""

    def launch(self, case: Any, config: Any) -> Callable[[], object]:
        """Makes each kind of launch that a time has in it once."""

    def is_right(self, case: Any, config: Any) -> bool:
        """Whether results are the reference's."""

    def timer(self, case: Any, config: Any, expected: float) -> Timer | MeanTimer:
        """expected: about so many microseconds."""

    def beside(self, case: Any) -> float:
        """Microseconds that a time has in it besides."""


class Subject(ABC):
    """Cases that are tuned on the same inputs, and what is tried for each.

    A case is hashable and has a name (str). library: what takes part under the name of None.
    """

    cases: list[Any]
    library = ""

    @abstractmethod
    def first_round(self, case: Any, most: int) -> list[Any]:
        """What is in use, and about so many more, the likeliest first."""

    @abstractmethod
    def second_round(self, case: Any, best: list[Any]) -> list[Any]:
        """Variations of the best."""

    @abstractmethod
    def baseline(self, case: Any) -> Any:
        """What must be beaten by more than MARGIN."""

    @abstractmethod
    def floor(self, case: Any) -> float:
        """Microseconds that bytes or operations take at what was measured on an H200."""

    @abstractmethod
    def open(self, look: bool = False) -> Bench:
        """look: only for what would be launched; nothing is."""


class Best(NamedTuple):
    """Microseconds of the fastest, and of what it must beat."""

    config: Any
    taken: float
    baseline: float

    @property
    def is_worth_it(self) -> bool:
        return self.taken < (1 - MARGIN) * self.baseline


class Search:
    """end: of time.monotonic(). log: takes a line of JSON for each time. Raises nothing for a
    configuration that doesn't compile, doesn't fit or is wrong: it is logged and left out.
    """

    def __init__(
        self, subjects: list[Any], most: int, pool: CompilePool, end: float, log: IO[str]
    ) -> None:
        self.subjects, self.most, self.end = subjects, most, end
        self.subject = {case: subject for subject in subjects for case in subject.cases}
        self.cases = [*self.subject]
        self.times: Times = {case: {} for case in self.cases}
        self.final: Times = {}
        self.beside = dict.fromkeys(self.cases, 0.0)
        self.left_out = 0
        self._tried: set[tuple[Hashable, Config]] = set()
        self._pool, self._log, self._began = pool, log, time.monotonic()

    def run(self) -> None:
        """On the current stream, which isn't the default one."""
        gc.disable()  # nothing may be freed on the device in the middle of a capture
        try:
            self._run()
        finally:
            gc.enable()

    def _run(self) -> None:
        plan = {case: s.first_round(case, self.most) for case, s in self.subject.items()}
        pending = self._compile(plan)
        self._say(f"{sum(map(len, plan.values()))} configurations, {len(self._pool)} kernels")
        again: Pending = {}
        for bench, case in self._benches(FIRST_SHARE):
            self._time_case(bench, case, pending[case], FIRST_SHARE)
            varied = self.subject[case].second_round(case, self.ranked(case)[:2])
            new = [config for config in varied if config not in plan[case]]
            again |= self._compile({case: new[: self.most]})
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

    def _benches(self, share: float) -> Iterator[tuple[Bench, Hashable]]:
        """Every case in turn, while there is time."""
        for subject in self.subjects:
            if self._left(share) <= 0:
                return
            bench = subject.open()
            for case in subject.cases:
                if self._left(share) > 0:
                    yield bench, case
            del bench
            gc.collect()
            torch.cuda.empty_cache()

    def _compile(self, plan: dict[Any, list[Config]]) -> Pending:
        pending: Pending = {}
        for subject in self.subjects:
            mine = [case for case in subject.cases if plan.get(case)]
            bench = subject.open(look=True) if mine else None
            for case in mine:
                pending[case] = [
                    (config, self._pool.start(bench.launch(case, config))) for config in plan[case]
                ]
        return pending

    def _time_case(
        self,
        bench: Bench,
        case: Hashable,
        pending: list[Compiling],
        share: float,
    ) -> None:
        taken, subject = self.times[case], self.subject[case]
        if subject.library and None not in taken:
            self.beside[case] = bench.beside(case)
            taken[None] = median(bench.timer(case, None, subject.floor(case)))
            self._note(case, None, taken[None])
        left = [each for each in pending if (case, each[0]) not in self._tried]
        for config, compiling in self._compiled(left, share):
            self._tried.add((case, config))
            fault = next(filter(None, (future.result() for future in compiling)), "")
            if not fault:
                fault = self._time_one(bench, case, config)
            if fault:
                self.left_out += 1
                self._note(case, config, None, fault)

    def _compiled(self, waiting: list[Compiling], share: float) -> Iterator[Compiling]:
        """Each when it is compiled, in their order where that is possible. Once there was one, the
        others have a few seconds for the next: another case's may be there.
        """
        patience = self._left(share)
        while waiting and (left := self._left(share)) > 0:
            for each in waiting:
                if all(future.done() for future in each[1]):
                    waiting.remove(each)
                    yield each
                    patience = PATIENCE
                    break
            else:
                undone = [f for _, futures in waiting for f in futures if not f.done()]
                if not wait(undone, min(left, patience), FIRST_COMPLETED).done:
                    return

    def _time_one(self, bench: Bench, case: Hashable, config: Config) -> str:
        taken = self.times[case]
        best = min(taken.values(), default=float("inf"))
        try:
            if not bench.is_right(case, config):
                return "wrong"
            expected = best if taken else self.subject[case].floor(case)
            taken[config] = median(bench.timer(case, config, expected), best)
        except Exception as error:
            if "CUDA error" in str(error):
                raise  # nothing can be launched any more
            return f"{type(error).__name__}: {str(error)[:200]}"
        self._note(case, config, taken[config])
        return ""

    def _play_off(self, bench: Bench, case: Hashable) -> None:
        """The best and what they must beat in turn, so that clocks and heat are alike for all."""
        taken, baseline = self.times[case], self.subject[case].baseline(case)
        contenders = dict.fromkeys([baseline, *self.ranked(case)[:FINALISTS]])
        timers = {c: bench.timer(case, c, taken[c]) for c in contenders if c in taken}
        samples: dict[Contender, list[float]] = {config: [] for config in timers}
        for _ in range(FINAL_SAMPLES):
            for config, timer in timers.items():
                samples[config].append(timer.sample())
        self.final[case] = {config: statistics.median(each) for config, each in samples.items()}
        for config, middle in self.final[case].items():
            self._note(case, config, middle, final=True)

    def ranked(self, case: Hashable) -> list[Any]:
        taken = self.final.get(case) or self.times[case]
        return sorted((config for config in taken if config), key=taken.__getitem__)

    def best(self, case: Hashable) -> Best | None:
        """None: too little was measured to say."""
        taken, baseline = self.times[case], self.subject[case].baseline(case)
        taken = self.final.get(case) or taken
        ranked = self.ranked(case)
        if not ranked or baseline not in taken:
            return None
        return Best(ranked[0], taken[ranked[0]], taken[baseline])

    def _note(
        self,
        case: Hashable,
        config: Contender,
        taken: float | None,
        fault: str = "",
        final: bool = False,
    ) -> None:
        subject = self.subject[case]
        line = {
            "case": str(case),
            "config": list(config) if config else subject.library,
            "us": taken and round(taken, 3),
            "beside": round(self.beside[case], 3),
            "floor": round(subject.floor(case), 3),
        }
        extra = ({"fault": fault} if fault else {}) | ({"final": True} if final else {})
        self._log.write(json.dumps(line | extra) + "\n")
        self._log.flush()


def report(search: Search, cases: Iterable[Any], baseline: str) -> list[str]:
    """A table of what was found. baseline: a name for what had to be beaten."""
    lines = [
        "us, less what is measured beside; * by the play-off",
        f"| case | best | us | {baseline} | floor | of floor | of {baseline} |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        if not (best := search.best(case)):
            continue
        floor, beside = search.subject[case].floor(case), search.beside[case]
        taken, beaten = best.taken - beside, best.baseline - beside
        row = [
            *(str(case), str(tuple(best.config))),
            f"{taken:.2f}{'*' if case in search.final else ''}",
            *(f"{beaten:.2f}", f"{floor:.2f}", f"{100 * floor / taken:.0f}%"),
            f"{100 * taken / beaten:.0f}%",
        ]
        lines.append(f"| {' | '.join(row)} |")
    return lines
