"""The loads from which experts are placed are those of the last steps, and of no others."""

from __future__ import annotations

import numpy as np
import pytest

from ringcast.executor.load_window import LoadWindow


@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 8, 9, 30])
@pytest.mark.parametrize("interval", [1, 2, 4, 9])
def test_the_loads_of_the_last_steps(window, interval):
    """Step n has 10 ** 3 + n tokens."""
    loads = LoadWindow(window, interval)
    totals, per_step = np.zeros(1, np.int64), []
    for step in range(60):
        got = loads.step(totals.copy)
        if step and step % interval == 0:
            begin, end = got
            assert end - (0 if begin is None else begin) == sum(per_step[-window:])
        else:
            assert got is None
        assert len(loads._starts) <= window // interval + 1
        per_step.append(1000 + step)
        totals += per_step[-1]
