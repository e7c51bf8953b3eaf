"""The prefix benchmark's workload and arithmetic."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import bench_prefix

        yield bench_prefix
    for name in ("bench_prefix", "figures"):
        sys.modules.pop(name, None)


def test_prompts_share_their_beginnings_and_nothing_else(bench):
    prompts = bench.Workload(3, 40, 10, 5).prompts(seed=1, vocab_size=1000)
    assert [len(prompt) for prompt in prompts] == [45] * 10
    shared = Counter(tuple(prompt[:40]) for prompt in prompts)
    assert sorted(shared.values()) == [3, 3, 4]
    assert prompts[0][:40] == prompts[3][:40]
    assert len({tuple(prompt[40:]) for prompt in prompts}) == 10
    assert all(100 <= token < 1000 for prompt in prompts for token in prompt)


def test_prompts_follow_from_the_seed(bench):
    work = bench.Workload(2, 8, 4, 4)
    assert work.prompts(7, 500) == work.prompts(7, 500)
    assert work.prompts(7, 500)[0][:8] != work.prompts(8, 500)[0][:8]


@pytest.mark.parametrize(
    ("work", "rate"),
    [((4, 512, 64, 64), 60 / 64 * 512 / 576), ((4, 10, 4, 10), 0), ((9, 1, 3, 1), 0)],
)
def test_best_hit_rate(bench, work, rate):
    assert bench.Workload(*work).best_hit_rate == pytest.approx(rate)


def test_a_round_counts_tokens_not_requests(bench):
    one = bench.Round([bench.Answer(0.2, 100, 75), bench.Answer(0.1, 300, 25)], 1.0)
    assert one.hit_rate == 0.25
    assert (one.ttft(0.5), one.ttft(0.99)) == (0.1, 0.2)


def test_report(bench):
    def one(ttft, found, seconds):
        return bench.Round([bench.Answer(ttft, 100, found)], seconds)

    rounds = {
        "off": [one(0.4, 0, 8.0), one(0.6, 0, 9.0), one(0.9, 0, 30.0)],
        "on": [one(0.2, 50, 4.0), one(0.2, 60, 3.0), one(0.1, 40, 5.0)],
    }
    assert bench.report(rounds) == [
        ["off", "0.0%", "600", "600", "9.00"],
        ["on", "50.0%", "200", "200", "4.00"],
        ["off / on", "", "3.00 (2.00 to 9.00)", "3.00 (2.00 to 9.00)", "3.00 (2.00 to 6.00)"],
    ]
