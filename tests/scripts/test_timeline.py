"""What scripts/gpu_bench/timeline.py makes of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringcast.executor.trace_summary import annotation

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def event(cat: str, name: str, begin: float, length: float, number: int = 0) -> dict[str, Any]:
    args = {"correlation": number} if number else {}
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": length, "args": args}


def test_work_belongs_to_the_step_that_launched_it(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS / "gpu_bench"))
    from timeline import report, steps_of

    steps = steps_of(
        [
            event("user_annotation", annotation(7), 0, 8),
            event("cuda_runtime", "cudaGraphLaunch", 1, 1, number=3),
            event("user_annotation", annotation(8), 10, 8),
            event("cuda_runtime", "cudaGraphLaunch", 11, 1, number=4),
            event("kernel", "product", 250, 50, number=4),
            event("kernel", "attention", 100, 60, number=3),
            event("kernel", "product", 160, 40, number=3),
        ]
    )
    assert [(step.begin, step.end, step.busy) for step in steps] == [
        (100, 200, 100),
        (250, 300, 50),
    ]
    assert steps[0].kernels == {"attention": 60, "product": 40}
    report(steps)
    (line,) = capsys.readouterr().out.splitlines()
    assert "100 us each" in line  # to the end of the last: 200 for two
    assert "25 idle between" in line
    assert "product 45, attention 30" in line
