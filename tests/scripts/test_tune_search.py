"""The search of scripts/tune, with times that are made up."""

from __future__ import annotations

import io
import json
import time
from concurrent.futures import Future
from itertools import product
from math import inf
from pathlib import Path

import pytest

from ringcast.kernels.gpu import expert_table, prefill_table
from ringcast.kernels.gpu.decode_plan import DecodeConfig
from ringcast.kernels.gpu.experts import ExpertConfig
from ringcast.kernels.gpu.prefill_attention import PrefillConfig

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
BASELINE = (4, 4)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS / "gpu_bench"))
    monkeypatch.setattr("gc.collect", lambda: 0)  # half a second each


class Pool:
    """hung: configurations whose compiling never ends. faults: of others, by the configuration."""

    def __init__(self, hung=(), faults=None) -> None:
        self.hung, self.faults, self.started = hung, faults or {}, []

    def __len__(self) -> int:
        return len(self.started)

    def start(self, launch) -> list[Future]:
        config = launch()
        future: Future = Future()
        if config not in self.hung:
            future.set_result(self.faults.get(config, ""))
        self.started.append(config)
        return [future]


class Clock:
    """A timer whose samples are what they are said to be."""

    def __init__(self, taken: float) -> None:
        self.taken = taken

    def sample(self) -> float:
        return self.taken


class Bench:
    def __init__(self, times, wrong=()) -> None:
        self.times, self.wrong, self.timed = times, wrong, []

    def launch(self, case, config):
        return lambda: config

    def is_right(self, case, config) -> bool:
        return config not in self.wrong

    def timer(self, case, config, expected) -> Clock:
        taken = self.times(config)
        self.timed.append(config)
        if taken == inf:
            raise RuntimeError("out of resources: it has no room")
        return Clock(taken)

    def beside(self, case) -> float:
        return 0.5


def subject_of(bench: Bench, library: str = ""):
    from search import Subject

    class Grid(Subject):
        """All pairs from 1 to 16, from the middle on."""

        cases = ("grid",)

        def first_round(self, case, most):
            return [BASELINE, *[c for c in product((2, 4, 8), repeat=2) if c != BASELINE]][:most]

        def second_round(self, case, best):
            return [(a * x, b * y) for a, b in best for x, y in ((2, 1), (1, 2))]

        def baseline(self, case):
            return None if library else BASELINE

        def floor(self, case):
            return 1.0

        def open(self, look=False):
            return bench

    Grid.library = library
    return Grid()


def search_of(bench: Bench, pool: Pool, library: str = "", seconds: float = 60.0):
    from search import Search

    log = io.StringIO()
    subject = subject_of(bench, library)
    return Search([subject], 20, pool, time.monotonic() + seconds, log), log


def large_is_fast(config) -> float:
    return 100 / (config[0] * config[1])


def test_variations_of_the_best_are_tried_and_the_fastest_is_found():
    bench, pool = Bench(large_is_fast), Pool()
    search, log = search_of(bench, pool)
    search.run()
    best = search.best("grid")
    assert best == ((16, 8), 100 / 128, 100 / 16)
    assert best.is_worth_it
    assert pool.started[0] == BASELINE
    assert len(pool.started) == len(set(pool.started))
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    finals = [tuple(line["config"]) for line in lines if line.get("final")]
    assert finals[0] == BASELINE
    assert (16, 8) in finals
    assert len(finals) == 4


def test_what_is_wrong_or_doesnt_fit_is_never_chosen():
    times = {(8, 8): inf}
    bench = Bench(lambda c: times.get(c, large_is_fast(c)), wrong=[(16, 8), (8, 16), (8, 4)])
    search, log = search_of(bench, Pool(faults={(4, 8): "CompilationError: no"}))
    search.run()
    assert search.best("grid") == ((2, 16), 100 / 32, 100 / 16)
    assert not set(bench.timed) & {(16, 8), (8, 16), (8, 4), (4, 8)}
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    faults = {tuple(line["config"]): line["fault"] for line in lines if "fault" in line}
    assert faults[4, 8] == "CompilationError: no"
    assert faults[8, 4] == "wrong"
    assert faults[8, 8] == "RuntimeError: out of resources: it has no room"
    assert search.left_out == len(faults)


def test_a_device_that_is_lost_ends_the_search():
    def lost(config):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    search, _ = search_of(Bench(lost), Pool())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        search.run()
    assert search.best("grid") is None


def test_a_gain_within_the_margin_isnt_worth_a_change():
    search, _ = search_of(Bench(lambda c: 10.0 if c == BASELINE else 9.8), Pool())
    search.run()
    assert search.best("grid").taken == 9.8
    assert not search.best("grid").is_worth_it


def test_a_library_takes_part():
    bench = Bench(lambda c: 0.7 if c is None else large_is_fast(c))
    search, _ = search_of(bench, Pool(), "cuBLAS")
    search.run()
    assert search.best("grid") == ((16, 8), 100 / 128, 0.7)
    assert not search.best("grid").is_worth_it
    assert search.beside["grid"] == 0.5


def test_compiling_that_hangs_holds_nothing_else_up(monkeypatch):
    monkeypatch.setattr("search.PATIENCE", 0.02)
    bench = Bench(large_is_fast)
    search, _ = search_of(bench, Pool(hung=[(2, 2)]))
    began = time.monotonic()
    search.run()
    assert time.monotonic() - began < 20
    assert search.best("grid").config == (16, 8)
    assert (2, 2) not in bench.timed


def test_the_budget_ends_the_search():
    pool = Pool(hung=list(product((2, 4, 8), repeat=2)))
    search, _ = search_of(Bench(large_is_fast), pool, seconds=0.3)
    began = time.monotonic()
    search.run()
    assert time.monotonic() - began < 20
    assert search.best("grid") is None


def test_nothing_is_said_without_a_time_of_what_is_in_use():
    search, _ = search_of(Bench(large_is_fast), Pool(faults={BASELINE: "it doesn't compile"}))
    search.run()
    assert search.best("grid") is None


def measured(cases, found):
    """A search that has found: by the case, (configuration, us, us of what is in use)."""
    from search import Best

    class Found:
        def __init__(self) -> None:
            self.cases = cases

        def best(self, case):
            return Best(*found[case]) if case in found else None

    return Found()


def hopper():
    from spaces import Limits

    return Limits((9, 0), 132, 227 * 1024, 65536)


def test_attention_tables_take_what_is_worth_it_and_keep_the_rest():
    from attention_space import DecodeCase, PrefillCase
    from tune_attention import table

    fast = PrefillConfig(32, 8, 4, 256, 2)
    in_use = PrefillCase(128, 2, False, False).in_use(hopper())
    found = {
        PrefillCase(128, 2, False, False): (fast, 9.0, 10.0),
        PrefillCase(96, 2, False, False): (fast, 9.9, 10.0),
        DecodeCase(128, 2, 1): (DecodeConfig(1, 16, 2, 2), 1.0, 2.0),
    }
    search = measured([*found, PrefillCase(64, 2, False, False)], found)
    old = prefill_table.TUNED
    new = table(search, old, hopper(), PrefillCase)
    changed = {(128, 2, False, False): tuple(fast), (96, 2, False, False): tuple(in_use)}
    assert new[9, 0] == old[9, 0] | changed
    assert list(new[9, 0]) == sorted(new[9, 0])
    other = table(search, old, hopper()._replace(architecture=(8, 0)), PrefillCase)
    assert other[9, 0] == old[9, 0]
    assert set(other[8, 0]) == set(changed)
    assert table(measured([], {}), old, hopper(), PrefillCase) == old


def test_expert_plans_have_the_rows_with_the_least_sum():
    from expert_space import DOWN, GATE_UP, ExpertCase
    from tune_experts import table

    old, other = expert_table.TUNED[9, 0], ExpertConfig(64, 64, 4, 3)
    found = {
        # Other rows win by both together, though in use one product is as fast.
        ExpertCase(32, 32, GATE_UP): (other, 9.0, 12.0),
        ExpertCase(32, 32, DOWN): (other, 6.0, 6.0),
        ExpertCase(32, 64, GATE_UP): (other, 7.0, 9.0),
        ExpertCase(32, 64, DOWN): (other, 7.0, 7.0),
        # Not by enough.
        ExpertCase(96, 64, GATE_UP): (other, 9.9, 10.0),
        ExpertCase(96, 64, DOWN): (other, 9.9, 10.0),
        # Nothing to compare with.
        ExpertCase(512, 64, GATE_UP): (other, 1.0, 1.0),
        ExpertCase(512, 64, DOWN): (other, 1.0, 1.0),
    }
    new = table(measured([*found], found), expert_table.TUNED, hopper())
    assert new == {(9, 0): old | {32: (64, tuple(other), tuple(other))}}
    assert table(measured([*found], {}), expert_table.TUNED, hopper()) == expert_table.TUNED
