"""Kernels compiled before they are launched: which ones, by whom, and what if they aren't."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ringcast.executor.gpu import compile_ahead, variants
from ringcast.executor.gpu.compile_ahead import CompileServer, jobs_of, prepare_folder
from ringcast.mq.errors import ConfigError

LAUNCHLESS = Path(__file__).with_name("launchless.py")
TESTS = LAUNCHLESS.parents[2]


def environment(folder: Path) -> dict[str, str]:
    paths = os.pathsep.join([*sys.path, str(TESTS)])
    compiled = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return compiled | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(folder)}


def launchless(what: str, folder: Path) -> Any:
    command = [sys.executable, "-P", LAUNCHLESS, what, folder]
    return json.loads(subprocess.check_output(command, env=environment(folder), text=True))


@pytest.mark.slow
def test_no_step_needs_a_variant_that_warm_up_has_not_collected(tmp_path):
    """With graphs and without, of each family of models; of a rank of two, of a replica, of one
    rank or two, whose experts others have, too, here or on other hosts; of a stage of three, and
    of workers on several hosts.
    """
    report = launchless("steps", tmp_path)
    assert len(report) == 24
    for name, each in report.items():
        assert each["new"] == [], name
        assert each["known"] >= each["used"] >= 20


@pytest.mark.slow
def test_a_server_compiles_and_triton_finds_what_it_has_made(tmp_path):
    """What it can't compile is named, and is no matter to the rest."""
    report = launchless("compile", tmp_path)
    assert report["first"] == [6, 6, [], [[6, 6]]]
    assert report["second"] == [6, 0, [], []]  # nothing was missing
    assert report["hits"] == [True]
    known, missing, (error,), last = report["third"]
    assert (known, missing, last) == (7, 1, [[1, 1]])
    assert error.startswith("bad: CompilationError: ")


@pytest.mark.slow
def test_a_server_whose_engine_dies_ends_what_it_has_started(tmp_path):
    order = json.dumps(launchless("order", tmp_path)).encode()
    env = environment(tmp_path) | compile_ahead.ENVIRONMENT
    pipe = subprocess.PIPE
    with subprocess.Popen(compile_ahead.COMMAND, stdin=pipe, stdout=pipe, env=env) as server:
        assert server.stdin is not None
        server.stdin.write(order + b"\n")
        server.stdin.flush()
        compiling = wait_for_children(server.pid)
        assert threads_of(server.pid) == 1  # so that to fork was sound
        server.stdin.close()
        assert server.wait(10) == 1
    assert len(compiling) <= 2
    assert not [pid for pid in compiling if Path(f"/proc/{pid}").exists()]


def wait_for_children(pid: int) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return [int(child) for child in children]
        time.sleep(0.01)
    raise AssertionError("no job was started")


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


# --- the engine's side, with servers that do as they like


class Kernel(NamedTuple):
    """What compile_ahead sees of a Variant."""

    name: str
    data: str = ""
    signature: str = ""
    compiled: bool = False

    def is_compiled(self, target: tuple[str, int, int]) -> bool:
        return self.compiled


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """ask(source of a server, kernels) -> what compile_missing says, and the progress."""
    monkeypatch.setattr(variants, "current_target", lambda: ("cuda", 90, 32))

    def ask(source: str, kernels: list[Kernel]) -> tuple[Any, list[tuple[int, int]]]:
        progress: list[tuple[int, int]] = []
        command = (sys.executable, "-c", f"import sys, json\n{source}")
        with CompileServer(tmp_path, command) as server:
            answer = server.compile_missing(lambda: kernels, lambda *step: progress.append(step))
        return answer, progress

    return ask


ANSWER_ALL = """
order = json.loads(sys.stdin.readline())
for place, job in enumerate(order["jobs"]):
    print(json.dumps({"job": place, "error": "no" if job["name"] == "bad" else ""}), flush=True)
"""
ANSWER_ONE = """
sys.stdin.readline()
print('{"job": 0, "error": ""}', flush=True)
"""
NEVER_READ = "import time; time.sleep(600)"


def test_only_what_is_missing_is_ordered(ask):
    answer, progress = ask(ANSWER_ALL, [Kernel("a", compiled=True), Kernel("bad"), Kernel("c")])
    assert answer == (3, 2, ["bad: no"])
    assert progress == [(0, 2), (1, 2), (2, 2)]


def test_nothing_is_missing_and_nobody_waits_for_the_server(ask):
    start = time.monotonic()
    assert ask(NEVER_READ, [Kernel("a", compiled=True)]) == ((1, 0, []), [])
    assert time.monotonic() - start < 30


def test_a_server_that_dies_is_no_error_of_the_engine(ask):
    answer, progress = ask(ANSWER_ONE, [Kernel("a"), Kernel("b"), Kernel("c")])
    assert answer == (3, 3, ["the compile server ended with 2 kernels left"])
    assert progress[-1] == (1, 3)
    answer, _ = ask("sys.exit(3)", [Kernel("a")] * 1000)
    assert answer == (1000, 1000, ["the compile server ended with 1000 kernels left"])


def test_a_server_that_talks_nonsense_is_no_error_of_the_engine(ask):
    answer, _ = ask("sys.stdin.readline(); print('hello')", [Kernel("a")])
    assert answer == (1, 1, ["the compile server ended with 1 kernels left"])


def test_a_server_that_can_not_start_is_no_error_of_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(variants, "current_target", lambda: ("cuda", 90, 32))
    with CompileServer(tmp_path, (str(tmp_path / "none"),)) as server:
        answer = server.compile_missing(lambda: [Kernel("a")], lambda *_: None)
    assert answer == (1, 1, ["the compile server did not start"])


def test_an_error_of_the_engine_ends_the_server(tmp_path):
    command = (sys.executable, "-c", NEVER_READ)
    server = CompileServer(tmp_path, command)
    with contextlib.suppress(ZeroDivisionError), server:
        process = server._process
        raise ZeroDivisionError
    assert process is not None
    assert process.returncode == -signal.SIGKILL


def test_the_last_launched_are_the_first_compiled_and_each_launcher_once():
    jobs = jobs_of([Kernel("a", "1", "x"), Kernel("b", "2", "y"), Kernel("c", "3", "x")])
    assert [(job.name, job.data, job.launcher) for job in jobs] == [
        ("c", "3", True),
        ("b", "2", True),
        ("a", "1", False),
    ]


# --- the folder


def test_the_folder_is_ours_unless_the_user_names_one(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGCAST_CACHE", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert prepare_folder() == tmp_path / "kernels"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "kernels")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    assert prepare_folder() == tmp_path / "other"


def test_a_folder_that_can_not_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    with pytest.raises(ConfigError, match=r"no folder for compiled kernels: .* RINGCAST_CACHE or"):
        prepare_folder()
