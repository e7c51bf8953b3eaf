"""A ring whose ends are killed at random for a while (torture.py says what is checked)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TORTURE = Path(__file__).with_name("torture.py")


def torture(seed, seconds):
    done = subprocess.run(
        [sys.executable, "-P", str(TORTURE), str(seed), str(seconds)],
        capture_output=True,
        text=True,
        timeout=seconds + 100,
    )
    assert done.returncode == 0, done.stderr
    return {name: int(count) for name, count in re.findall(r"(\w+)'?:? (\d+)", done.stdout)}


def test_killed_at_random():
    counts = torture(seed=1, seconds=4)
    assert counts["killed"] > 20
    assert counts["resets"] > 2
    assert counts["records"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_killed_at_random_for_long(seed):
    assert torture(seed, seconds=30)["killed"] > 100
