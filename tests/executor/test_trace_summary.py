"""Idle shares and kernels, from traces made by hand and one of torch's own."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ringcast.executor.profiler import Profiler, ProfilerError
from ringcast.executor.trace_summary import annotation, summarise


def event(cat: str, name: str, begin: float, length: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": length, "tid": 1, "args": args}


def launch(begin: float, number: int) -> dict[str, Any]:
    return event("cuda_runtime", "cudaGraphLaunch", begin, 1, correlation=number)


def step(number: int, begin: float, length: float) -> dict[str, Any]:
    return event("user_annotation", annotation(number), begin, length)


# On the host steps 0 and 1 are launched at 0 and 10; on the device they run from 100 to 200, with a
# hole of 20, and from 250 to 300.
ON_DEVICE = [
    step(0, 0, 8),
    launch(1, 7),
    launch(3, 8),
    step(1, 10, 8),
    launch(12, 9),
    event("kernel", "matmul", 100, 50, correlation=7),
    event("kernel", "matmul", 140, 40, correlation=7),
    event("gpu_memcpy", "Memcpy DtoH", 200 - 0.5, 0.5, correlation=8),
    event("kernel", "softmax", 250, 50, correlation=9),
]


def test_idle_time_between_steps_and_within_them():
    summary = summarise(ON_DEVICE)
    assert (summary.device, summary.steps) == (True, 2)
    assert summary.seconds == pytest.approx(200e-6)
    assert summary.idle_between == pytest.approx(50 / 200)
    assert summary.idle_within == pytest.approx(19.5 / 200)


def test_kernels_are_added_up_and_the_longest_comes_first():
    kernels = [(k.name, k.calls, round(k.seconds * 1e6, 3)) for k in summarise(ON_DEVICE).kernels]
    assert kernels == [("matmul", 2, 90.0), ("softmax", 1, 50.0), ("Memcpy DtoH", 1, 0.5)]


def test_work_of_no_step_is_no_step_but_is_counted_among_the_kernels():
    before = event("kernel", "load", 20, 10, correlation=3)  # launched before the profile began
    other = [launch(9, 4), event("kernel", "between", 210, 10, correlation=4)]
    summary = summarise([before, *other, *ON_DEVICE])
    assert summary.steps == 2
    assert summary.seconds == pytest.approx(200e-6)
    assert summary.idle_between == pytest.approx(50 / 200)
    assert {kernel.name for kernel in summary.kernels} >= {"load", "between"}


def test_steps_that_overlap_leave_nothing_between_them():
    steps = [step(n, 10 * n, 10) for n in range(3)] + [launch(10 * n + 5, n) for n in range(3)]
    work = [event("kernel", "k", 100 + 30 * n, 40, correlation=n) for n in range(3)]
    summary = summarise(steps + work)
    assert (summary.steps, summary.idle_between, summary.idle_within) == (3, 0.0, 0.0)


def test_on_a_processor_steps_are_their_launches_and_operators_are_without_their_own():
    summary = summarise(
        [
            step(0, 0, 60),
            step(1, 80, 20),
            event("cpu_op", "linear", 0, 50),
            event("cpu_op", "mm", 10, 30),
            event("cpu_op", "mm", 80, 15),
        ]
    )
    assert (summary.device, summary.steps, summary.idle_within) == (False, 2, None)
    assert summary.idle_between == pytest.approx(0.2)
    kernels = [(k.name, k.calls, round(k.seconds * 1e6, 3)) for k in summary.kernels]
    assert kernels == [("mm", 2, 45.0), ("linear", 1, 20.0)]


@pytest.mark.parametrize("events", [[], [{"ph": "M"}], [event("kernel", "k", 1, 2, correlation=1)]])
def test_a_trace_without_steps(events):
    summary = summarise(events)
    assert (summary.steps, summary.seconds) == (0, 0.0)
    assert summary.table().startswith("0 steps in 0.000 s")


def test_the_table():
    first, head, *rows = summarise(ON_DEVICE).table().splitlines()
    assert first == "2 steps in 0.000 s; idle: 25.0% of it between steps, 9.8% within steps"
    assert head.split() == ["kernel", "calls", "ms", "share"]
    assert rows[0].split() == ["matmul", "2", "0.090", "64.1%"]


# --- torch's profiler


def record(profiler: Profiler) -> str:
    profiler.start()
    for number in range(3):
        with profiler.step(number):
            torch.ones(50, 50) @ torch.ones(50, 50)
    return profiler.stop()()


def test_a_trace_and_its_table_are_written(tmp_path):
    for _ in range(2):
        report = record(Profiler(str(tmp_path / "traces"), "worker.0"))
    name, path = re.match(r"(worker\.0): (.*)\n3 steps in ", report).groups()
    assert Path(path).parent == tmp_path / "traces"
    with gzip.open(path) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {annotation(0), annotation(2), "aten::mm"} <= names
    assert "aten::mm" in report
    assert len(list((tmp_path / "traces").glob(f"{name}.*.pt.trace.json.gz"))) == 2
    assert len(list((tmp_path / "traces").glob("*.txt"))) == 2


def test_what_can_not_be_done_is_said(tmp_path):
    none = Profiler(None, "worker.0")
    for act in (none.start, none.stop):
        with pytest.raises(ProfilerError, match="no folder for profiles: set torch_profiler_dir"):
            act()
    profiler = Profiler(str(tmp_path), "worker.0")
    with pytest.raises(ProfilerError, match="no profile is being recorded"):
        profiler.stop()
    profiler.start()
    with pytest.raises(ProfilerError, match="stop it first") as refused:
        profiler.start()
    assert refused.value.refused
    profiler.stop()
    (tmp_path / "file").touch()
    with pytest.raises(ProfilerError, match=r"torch_profiler_dir = .*File exists") as failed:
        Profiler(str(tmp_path / "file"), "worker.0").start()
    assert not failed.value.refused


def test_a_folder_that_goes_away_is_an_error_of_the_report(tmp_path):
    folder = tmp_path / "traces"
    profiler = Profiler(str(folder), "worker.0")
    profiler.start()
    write = profiler.stop()
    folder.rmdir()
    folder.touch()
    with pytest.raises(ProfilerError, match="torch_profiler_dir"):
        write()
