"""The arithmetic of the benchmarks, and how they say it: percentiles, tables, the machine."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from pathlib import Path


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of all values don't exceed."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


def perplexity(logprobs: Sequence[float]) -> float:
    """Of tokens with these log-probabilities (Jelinek et al., 1977)."""
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def number(value: float) -> str:
    """Three significant digits, or all before the point: 0.123, 4.56, 78.9, 12,345."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def lost_and_repeated(want: Sequence[str], got: Sequence[str]) -> tuple[int, int]:
    """How many tokens of `want` aren't in `got`, and how many of `got` shouldn't be there.

    A token that was changed counts as both.
    """
    if want == got:
        return 0, 0
    lost = repeated = 0
    for kind, a, b, c, d in SequenceMatcher(a=want, b=got, autojunk=False).get_opcodes():
        if kind != "equal":
            lost += b - a
            repeated += d - c
    return lost, repeated


def machine() -> str:
    """One line: cores, processor, kernel, Python, and how busy it was before we began."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores of {model}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, load {load:.2f} before the run"
    )
