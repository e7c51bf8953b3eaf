"""The simulation of expert loads: redundant experts make ranks even, and a run follows from its
seed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import bench_eplb

        yield bench_eplb
    for name in ("bench_eplb", "figures"):
        sys.modules.pop(name, None)


def test_redundant_experts_make_ranks_even(bench):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    args = parser.parse_args(["--experts", "32", "--layers", "3", "--seed", "5"])
    without, with_one, again = (bench.measure(8, extra, 1.0, args) for extra in (0, 1, 1))
    assert len(without) == len(bench.HEAD)
    assert with_one[:-1] == again[:-1]  # the last one is a time
    first, placed = map(float, with_one[2:4])
    assert placed < 1.1 < first
    assert float(without[3]) > 1.3
