"""A process that compiles kernels for an engine that starts, as many at a time as there are cores.

    python -P -m ringcast.executor.gpu.compile_server

It imports what compiling needs. Then it reads an Order (compile_ahead.py), one line of JSON, from
its standard input, forks a process for each job, and writes an Answer to its standard output as
each one ends, in any order. It ends when all jobs have, or at its input's end of file: the engine
is dead, or wants no more of it. So that forks are sound it has one thread, and no device.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import sys
import time
import warnings
from collections import deque

import msgspec
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import make_backend
from triton.runtime.cache import triton_key

from .compile_ahead import Answer, Job, Order
from .variants import Variant, settle_digests

_INPUT = 0
_LONGEST_JOB = 120.0  # seconds; most take one
_LONGEST_ERROR = 500  # characters: an Answer is written in one piece (PIPE_BUF)


def prepare() -> None:
    """What each job would do otherwise: imports, and the digest of Triton itself."""
    settle_digests()
    for name in ("compiler.code_generator", "language.extra.cuda.libdevice"):
        importlib.import_module(f"triton.{name}")
    triton_key()


def compile_job(job: Job, target: GPUTarget) -> None:
    """Into Triton's folder."""
    source, options = Variant(job.name, job.data).source()
    compiled = triton.compile(source, target=target, options=options)
    if job.launcher:
        CudaLauncher(compiled.src, compiled.metadata)


class Server:
    """output: the descriptor that answers go to."""

    def __init__(self, order: Order, output: int) -> None:
        self._order, self._output = order, output
        self._target = GPUTarget(*order.target)
        self._waiting = deque(range(len(order.jobs)))
        self._running: dict[int, tuple[int, int]] = {}  # pidfd: (pid, job)
        self._ends: dict[int, float] = {}  # pid: when it is ended, if it hangs
        self._poll = select.poll()
        self._poll.register(_INPUT, select.POLLIN)

    def run(self) -> int:
        """The exit status: 0 if all jobs have been answered."""
        make_backend(self._target).hash()  # asks ptxas for its version, once for all
        while self._waiting or self._running:
            while self._waiting and len(self._running) < self._order.processes:
                self._start(self._waiting.popleft())
            for fd, _ in self._poll.poll(1000):
                if fd == _INPUT:
                    self._end(list(self._ends))
                    for pid in self._ends:
                        os.waitpid(pid, 0)
                    return 1
                self._reap(fd)
            self._end([pid for pid, end in self._ends.items() if time.monotonic() > end])
        return 0

    def _start(self, job: int) -> None:
        pid = os.fork()
        if not pid:
            self._run(job)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # ptxas and the C compiler end with it
        fd = os.pidfd_open(pid)
        self._running[fd] = (pid, job)
        self._ends[pid] = time.monotonic() + _LONGEST_JOB
        self._poll.register(fd, select.POLLIN)

    def _run(self, job: int) -> None:
        """In the job's own process. Doesn't return."""
        status = 1
        try:
            os.setpgid(0, 0)
            error = ""
            try:
                compile_job(self._order.jobs[job], self._target)
            except Exception as reason:
                error = f"{type(reason).__name__}: {reason}"
            self._answer(job, error)
            status = 0
        finally:
            os._exit(status)

    def _reap(self, fd: int) -> None:
        pid, job = self._running.pop(fd)
        del self._ends[pid]
        self._poll.unregister(fd)
        os.close(fd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            self._answer(job, f"its process ended with {status}")

    def _answer(self, job: int, error: str) -> None:
        answer = Answer(job, error[:_LONGEST_ERROR])
        os.write(self._output, msgspec.json.encode(answer) + b"\n")

    def _end(self, pids: list[int]) -> None:
        """With all that they have started."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def main() -> int:
    # Ctrl-C reaches the whole group; whoever started us decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    output = os.dup(1)
    os.dup2(2, 1)  # Triton prints what ptxas refuses
    prepare()
    line = sys.stdin.buffer.readline()
    return Server(msgspec.json.decode(line, type=Order), output).run() if line else 1


if __name__ == "__main__":
    sys.exit(main())
