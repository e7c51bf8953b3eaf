"""The arithmetic behind the benchmarks' tables."""

from __future__ import annotations

import math
import random
import runpy
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
figures = runpy.run_path(str(SCRIPTS / "figures.py"))


@pytest.mark.parametrize(
    ("values", "share", "want"),
    [
        ([5], 0.5, 5),
        ([5], 0.99, 5),
        ([3, 1, 2], 0.5, 2),
        ([4, 3, 2, 1], 0.5, 2),
        (range(1, 101), 0.99, 99),
        (range(1, 101), 1.0, 100),
        (range(1, 101), 0.0, 1),
    ],
)
def test_percentile(values, share, want):
    assert figures["percentile"](values, share) == want


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (0, "0"),
        (0.12345, "0.123"),
        (0.000456, "0.000456"),
        (4.5678, "4.57"),
        (78.94, "78.9"),
        (123.4, "123"),
        (12345.6, "12,346"),
        (-4.5678, "-4.57"),
    ],
)
def test_number(value, want):
    assert figures["number"](value) == want


def test_table():
    assert figures["table"](["", "a"], [["b", "1"]]) == "|  | a |\n| --- | --- |\n| b | 1 |"


@pytest.mark.parametrize(
    ("got", "want"),
    [
        ("abcdef", (0, 0)),
        ("abcde", (1, 0)),
        ("abdef", (1, 0)),
        ("abccdef", (0, 1)),
        ("abcdefef", (0, 2)),
        ("abXdef", (1, 1)),
        ("", (6, 0)),
    ],
)
def test_lost_and_repeated(got, want):
    assert figures["lost_and_repeated"](list("abcdef"), list(got)) == want


def test_lost_and_repeated_in_long_streams():
    want = [str(number) for number in range(1000)]
    got = want[:500] + want[480:700] + want[710:]
    assert figures["lost_and_repeated"](want, got) == (10, 20)


def test_kills_come_at_random_moments_but_not_too_often_at_once(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    moments = runpy.run_path(str(SCRIPTS / "bench_faults.py"))["moments"]
    pauses = list(moments(random.Random(1), 1000))
    assert all(0 <= pause < 0.3 or 1 <= pause < 2 for pause in pauses)
    soon = "".join("s" if pause < 0.3 else "l" for pause in pauses)
    assert "ss" in soon
    assert "sss" not in soon
    assert pauses == list(moments(random.Random(1), 1000))


def test_perplexity():
    assert figures["perplexity"]([0.0]) == 1.0
    assert figures["perplexity"]([-math.log(50)] * 3) == pytest.approx(50)
    assert figures["perplexity"]([-1.0, -3.0]) == pytest.approx(math.exp(2))
