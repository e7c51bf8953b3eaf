"""Kernels compiled side by side, before the first of them is launched.

Triton compiles a variant when it is first launched, one after the other: half a minute of a start
with an empty cache, on one core of many. So a start collects what it will launch (variants.py),
lets another process compile what the folder of compiled kernels hasn't got (compile_server.py), and
then launches: Triton finds all of it in the folder.

    engine                                         compile server
    starts it                                      imports
    loads weights, makes buffers, collects         reads its Order
    writes an Order                       ----->   forks a process for each job
    counts                                <-----   an Answer for each
    ends it

What isn't compiled ahead, for whatever reason, is compiled when it is launched: that takes longer
and is logged, and is no error. If it can't be compiled at all, its launch says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from ...mq.errors import ConfigError
from ...mq.paths import cache_root

if TYPE_CHECKING:
    from .variants import Variant

log = logging.getLogger(__name__)

FOLDER = "TRITON_CACHE_DIR"
MOST_PROCESSES = 32  # some 200 MB each
COMMAND = (sys.executable, "-P", "-m", "ringcast.executor.gpu.compile_server")
# It must have no thread but one, and has no business with a device.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

Progress = Callable[[int, int], None]
Target = tuple[str, int, int]


class Job(msgspec.Struct, frozen=True):
    """A Variant. launcher: compile, too, what launches those of its signature."""

    name: str
    data: str
    launcher: bool


class Order(msgspec.Struct, frozen=True):
    """target: backend, architecture and size of a warp, as Triton has them."""

    target: Target
    processes: int
    jobs: list[Job]


class Answer(msgspec.Struct, frozen=True):
    """job: its place in the order. error: empty if all went well."""

    job: int
    error: str


def compile_variants(
    server: CompileServer, collect: Callable[[], list[Variant]], progress: Progress
) -> dict[str, int]:
    """Ahead of the launches, which do it themselves where this fails: it rests on what is inside of
    Triton, and another version may have other insides. What is wrong with a launch is raised again
    there. Returns how many variants steps need, and how many were compiled.
    """
    counts = {}
    try:
        kernels, compiled, errors = server.compile_missing(collect, progress)
        counts = {"kernels": kernels, "kernels_compiled": compiled}
    except (ImportError, AttributeError, TypeError, ValueError, KeyError) as error:
        errors = [f"all of them: {type(error).__name__}: {error}"]
    for error in errors:
        log.warning("a kernel is compiled where it is launched, not ahead: %s", error)
    return counts


def prepare_folder() -> Path:
    """Where compiled kernels are kept: TRITON_CACHE_DIR where the user has set it. Comes before the
    first launch. Raises ConfigError if nothing can be written there.
    """
    folder = Path(os.environ.setdefault(FOLDER, str(cache_root() / "kernels")))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"nothing can be written to {folder}")
    except OSError as error:
        raise ConfigError(
            f"there is no folder for compiled kernels: {error}. RINGCAST_CACHE or {FOLDER} names "
            "another one"
        ) from error
    return folder


class CompileServer:
    """The process, from `with` on, for one order.

    command: another program that reads an Order and writes Answers, for tests.
    """

    def __init__(self, folder: Path, command: tuple[str, ...] = COMMAND) -> None:
        self._folder, self._command = folder, command
        self._process: subprocess.Popen[bytes] | None = None
        self._has_order = False
        self._preparing = threading.Thread(target=_prepare_triton, name="preparing triton")

    def __enter__(self) -> CompileServer:
        self._preparing.start()
        with contextlib.suppress(OSError):  # it is missed when it is needed
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | ENVIRONMENT,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._preparing.join()
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        if not self._has_order:
            process.kill()  # it may still import
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()
        process.stdout.close()

    def compile_missing(
        self, collect: Callable[[], list[Variant]], progress: Progress
    ) -> tuple[int, int, list[str]]:
        """How many variants `collect` finds, how many of them the folder hadn't got, and what could
        not be done about those. With several engines or ranks starting together, the first one
        compiles, and the others find it done.
        """
        from .variants import current_target, settle_digests

        self._preparing.join()
        settle_digests()
        variants, target = collect(), current_target()
        with _locked(self._folder / "lock"):
            missing = [each for each in variants if not each.is_compiled(target)]
            errors = self._compile(jobs_of(missing), target, progress) if missing else []
        return len(variants), len(missing), errors

    def _compile(self, jobs: list[Job], target: Target, progress: Progress) -> list[str]:
        process = self._process
        if process is None:
            return ["the compile server did not start"]
        assert process.stdin is not None
        assert process.stdout is not None
        errors, answered = [], 0
        progress(0, len(jobs))
        self._has_order = True
        try:
            order = Order(target, num_processes(), jobs)
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            process.stdin.flush()
            for line in process.stdout:
                answer = msgspec.json.decode(line, type=Answer)
                answered += 1
                progress(answered, len(jobs))
                if answer.error:
                    errors.append(f"{jobs[answer.job].name}: {answer.error}")
        except (BrokenPipeError, msgspec.MsgspecError):  # it is dead, or isn't what it should be
            pass
        if answered < len(jobs):
            errors.append(f"the compile server ended with {len(jobs) - answered} kernels left")
        return errors


def jobs_of(variants: list[Variant]) -> list[Job]:
    """In reverse, since those for sampling are launched last and take longest to compile. The first
    of each signature compiles its launcher.
    """
    jobs, signatures = [], set()
    for each in reversed(variants):
        jobs.append(Job(each.name, each.data, each.signature not in signatures))
        signatures.add(each.signature)
    return jobs


def num_processes() -> int:
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def _prepare_triton() -> None:
    """What Triton does once, and then remembers: it reads all of itself (400 MB) to know whose its
    cache is, and compiles its way to the driver. Weights can be loaded meanwhile.
    """
    with contextlib.suppress(Exception):  # what it is will be seen where it is needed
        from triton.runtime.cache import triton_key
        from triton.runtime.driver import driver

        triton_key()
        _ = driver.active.utils


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
