"""What holds for every test: nothing is left behind, chance is fixed, markers are obeyed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from interpreted_triton import choose_triton

choose_triton()
# OpenMP's threads that have nothing to do sleep at once: they would spin for milliseconds on cores
# that other processes want. Read when torch is imported, here and in what the tests start.
os.environ["GOMP_SPINCOUNT"] = "0"
settings.register_profile("ringcast", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("ringcast")

SHARED_MEMORY = "/dev/shm/ringcast"
GRACE_SECONDS = 2.0
# Threads that libraries start once and keep.
LIBRARIES = ("tqdm", "zmq", "concurrent", "torch")


def pytest_configure() -> None:
    # A job in a shell's background begins with Ctrl-C ignored, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# --- markers --------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked slow")
    parser.addoption("--fail-on-skip", action="store_true", help="a skipped test is a failed one")
    parser.addoption(
        "--one-of-each", action="store_true", help="of a test with parameters, the first case alone"
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.skipped and item.config.getoption("--fail-on-skip"):
        report.outcome = "failed"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    stand_ins = [item for item in items if item.get_closest_marker("interpreted")]
    if stand_ins and _what_lacks("gpu", config) is None:
        items[:] = [item for item in items if item not in stand_ins]
        config.hook.pytest_deselected(items=stand_ins)
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    for marker, needed in (("two_devices", 2), ("four_devices", 4)):
        several = [item for item in items if item.get_closest_marker(marker)]
        if several and present < needed:
            items[:] = [item for item in items if item not in several]
            config.hook.pytest_deselected(items=several)
    if config.getoption("--one-of-each"):
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        others = [item for item in items if first[item.nodeid.partition("[")[0]] is not item]
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=others)
    if _what_lacks("gpu", config) is not None:
        _leave_types_to_devices(items)
    lacking: dict[str, str | None] = {}
    for item in items:
        for marker in ("slow", "gpu", "model", "browser"):
            if item.get_closest_marker(marker):
                if marker not in lacking:
                    lacking[marker] = _what_lacks(marker, config)
                if reason := lacking[marker]:
                    item.add_marker(pytest.mark.skip(reason=reason))


def _leave_types_to_devices(items: list[pytest.Item]) -> None:
    """What runs under the interpreter does so for one element type of a kernel's test, and for one
    model of an engine's; the others are slow.
    """
    first: dict[str, object] = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        folder = item.path.parent.as_posix()
        what = "dtype" if folder.endswith("kernels/gpu") else "name"
        if what in params and folder.endswith("/gpu") and not item.get_closest_marker("slow"):
            test, value = item.nodeid.partition("[")[0], params[what]
            if first.setdefault(test, value) is not value:
                item.add_marker(pytest.mark.slow)


def _what_lacks(marker: str, config: pytest.Config) -> str | None:
    """Why tests with this marker can't run now, or None if they can."""
    if marker == "slow":
        return None if config.getoption("--all") else "slow: run with --all"
    if marker == "gpu":
        import torch

        return None if torch.cuda.is_available() else "needs a CUDA device"
    if marker == "browser":
        missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
        return f"needs {' and '.join(missing)}" if missing else None
    from ringcast.frontend.hub.cache import models_folder
    from ringcast.mq.config import DEFAULT_MODEL

    there = (models_folder() / DEFAULT_MODEL / "config.json").exists()
    return None if there else f"needs weights: run `ringcast pull {DEFAULT_MODEL}`"


# --- nothing left behind --------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a child process, a segment, a thread or a task of its own.

    What was there before it, such as the server of a fixture with a wider scope, is not its own.
    """
    before = _present()
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while left := _present().keys() - before.keys():
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + "; ".join(_describe(thing) for thing in sorted(left)))
        time.sleep(0.01)  # what was told to end may take a moment


def _present() -> dict[str, object]:
    """Everything that a test may leave behind, by a key that names it."""
    found: dict[str, object] = dict.fromkeys(_children())
    found |= dict.fromkeys(_segments())
    for thread in threading.enumerate():
        if not type(thread).__module__.startswith(LIBRARIES) and thread.name != "MainThread":
            found[f"thread {thread.name} ({thread.ident})"] = thread
    for task in _unfinished_tasks():
        found[f"task {task.get_name()} of {task.get_coro()}"] = task
    return found


def _children() -> Iterator[str]:
    """Processes whose parent is this one, zombies among them."""
    for task in os.scandir("/proc/self/task"):
        try:
            with open(f"{task.path}/children", "rb") as file:
                yield from (f"process {pid}" for pid in file.read().decode().split())
        except FileNotFoundError:  # the thread has just ended
            continue


def _segments() -> Iterator[str]:
    """Names in /dev/shm of ours that no living process else made, and descriptors of segments."""
    for name in os.listdir("/dev/shm"):
        if name.startswith("ringcast"):
            maker = name.partition("-")[2].partition("-")[0]
            if maker == str(os.getpid()) or not os.path.exists(f"/proc/{maker}"):
                yield f"segment /dev/shm/{name}"
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # that of listdir itself
            continue
        if target.startswith(SHARED_MEMORY):
            yield f"open segment {target} (descriptor {fd})"


def _unfinished_tasks() -> list[asyncio.Task[object]]:
    # all_tasks() wants a running loop; a test's loop has ended by now, and its tasks should have.
    everything = getattr(asyncio.tasks, "_scheduled_tasks", None)  # since Python 3.12
    if everything is None:
        everything = asyncio.tasks._all_tasks  # type: ignore[attr-defined]
    return [task for task in list(everything) if not task.done()]


def _describe(thing: str) -> str:
    kind, _, pid = thing.partition(" ")
    if kind != "process":
        return thing
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except FileNotFoundError:
        command = ""
    return f"{thing} ({command or 'ended, but never waited for'})"
