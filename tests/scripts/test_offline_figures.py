"""The floors and figures of scripts/bench offline."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (SCRIPTS, SCRIPTS / "peers"):
        monkeypatch.syspath_prepend(str(folder))


def config(name: str) -> dict[str, object]:
    return json.loads((SCRIPTS / "data" / "models" / name / "config.json").read_text())


@pytest.mark.parametrize(
    ("model", "offline", "prefill", "batch_1"),
    [("qwen3-0.6b", 36_374, 708_085, 0.2798), ("llama-3.1-8b", 13_646, 54_500, 3.493)],
)
def test_floors(model: str, offline: float, prefill: float, batch_1: float) -> None:
    """As they were worked out apart from this code."""
    import offline_figures

    shape = offline_figures.shape(config(model))
    floors = {figure.name: figure.floor(shape) for figure in offline_figures.figures()}
    assert floors["offline256"] == pytest.approx(offline, rel=1e-4)
    assert floors["prefill 32 x 2,048"] == pytest.approx(prefill, rel=1e-4)
    assert floors["batch 1, 32 in, 128 out"] == pytest.approx(batch_1, rel=1e-3)


def test_the_workload_is_nano_vllms() -> None:
    import offline_cases

    (case,) = offline_cases.cases(["offline256"])
    assert (case.num_in, case.num_out) == (142_827, 133_966)
    with pytest.raises(SystemExit, match="no case"):
        offline_cases.cases(["offline257"])


def test_figures_from_seconds() -> None:
    import offline_figures

    seconds = {
        "batch 64": [(0.256, 2048, 8192), (0.128, 2048, 8192)],
        "batch 256 of 672, 64 out": [(1.0, 172032, 16384)],
        "batch 256 of 672, 192 out": [(2.28, 172032, 49152)],
        "prefill 32 x 2,048": [(0.5, 65536, 32)],
    }
    got = {figure.name: figure.read(seconds) for figure in offline_figures.figures()}
    assert got["batch 64, 32 in, 128 out"] == [2.0, 1.0]
    assert got["batch 256 at 736 to 864"] == pytest.approx([10.0])
    assert got["prefill 32 x 2,048"] == [131072.0]
    assert got["offline256"] == got["first token"] == []


def test_a_table_without_a_peer_and_with_one() -> None:
    import bench_offline

    times = {"prefill 32 x 2,048": [(0.5, 65536, 32)], "batch 1": [(0.128, 32, 128)]}
    slower = {"prefill 32 x 2,048": [(1.0, 65536, 32)], "batch 1": [(0.256, 32, 128)]}
    alone = bench_offline.report(config("qwen3-0.6b"), {"ringcast": times})
    assert "ratio" not in alone
    both = bench_offline.report(config("qwen3-0.6b"), {"ringcast": times, "vllm": slower})
    assert [line.split("|")[-2].strip() for line in both.splitlines()[2:]] == ["2.00", "2.00"]


def test_what_a_worker_said_before_its_limit_counts(tmp_path: Path) -> None:
    import bench_offline

    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, sys, time\n"
        "float(sys.argv[1])\n"
        "print('@@', json.dumps(['batch 1', 2.5, 32, 128]), flush=True)\n"
        "time.sleep(60)\n"
    )
    times = bench_offline.times_of([sys.executable, str(worker), "more"], limit=2.0)
    assert times == {"batch 1": [(2.5, 32, 128)]}
