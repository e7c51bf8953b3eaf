"""The table of scripts/bench decode, and its workers' protocol and memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_ratios_are_of_the_same_round() -> None:
    import bench_decode

    cell = (1, 32, 128)
    times = {(cell, "ringcast"): [1.0, 2.0, 4.0], (cell, "peer"): [2.0, 6.0, 4.0]}
    text = bench_decode.report(times, [cell], ["ringcast"], ["ringcast", "peer"])
    _, _, own, peer = text.splitlines()
    assert own == "| 1x32x128 | ringcast | 64.0 (32.0 to 128.0) out | 1.00 (1.00 to 1.00) |"
    assert peer == "| 1x32x128 | peer | 32.0 (21.3 to 64.0) out | 2.00 (1.00 to 3.00) |"


def test_with_one_token_of_output_the_prompts_are_counted() -> None:
    import bench_decode

    cell = (8, 256, 1)
    text = bench_decode.report({(cell, "ringcast"): [4.0]}, [cell], ["ringcast"], ["ringcast"])
    assert "| 8x256x1 | ringcast | 512.0 (512.0 to 512.0) in |" in text


WORKER = """
import json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print("noise")
print("@@ ready", flush=True)
for line in sys.stdin:
    print("@@", sum(json.loads(line)), flush=True)
child.communicate(b"\\n")
"""


def test_a_worker_and_all_below_it() -> None:
    import bench_decode

    worker = bench_decode.Worker("peer", [sys.executable, "-c", WORKER])
    assert worker.work((1, 2, 3), 4) == 10.0
    pids = bench_decode.descendants(worker.process.pid)
    assert len(pids) == 2
    assert worker.megabytes() >= 5
    worker.close()
    assert worker.process.returncode == 0


def test_a_worker_that_dies_is_named() -> None:
    import bench_decode

    with pytest.raises(SystemExit, match="peer ended with status 3"):
        bench_decode.Worker("peer", [sys.executable, "-c", "raise SystemExit(3)"])
