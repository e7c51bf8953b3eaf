"""Kernels compiled in other processes while this one measures."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor

from ringcast.executor.gpu.compile_ahead import ENVIRONMENT, Job, prepare_folder
from ringcast.executor.gpu.variants import Variant, collect, current_target, settle_digests


def _prepare() -> None:
    os.environ.update(ENVIRONMENT)
    os.dup2(2, 1)  # Triton prints what ptxas refuses
    from ringcast.executor.gpu.compile_server import prepare

    prepare()


def _compile(job: Job, target: tuple[str, int, int]) -> str:
    """What went wrong, or nothing."""
    from triton.backends.compiler import GPUTarget

    from ringcast.executor.gpu.compile_server import compile_job

    try:
        compile_job(job, GPUTarget(*target))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


class CompilePool:
    """Comes before the first launch, since it says where compiled kernels are kept."""

    def __init__(self, processes: int) -> None:
        prepare_folder()
        settle_digests()
        self._pool = ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), initializer=_prepare
        )
        self._futures: dict[str, Future[str]] = {}
        self._signatures: set[str] = set()
        self._target = current_target()

    def __len__(self) -> int:
        return len(self._futures)

    def start(self, launch: Callable[[], object]) -> list[Future[str]]:
        """Begin to compile what `launch` would launch. A result is what went wrong, or empty."""
        with collect() as found:
            launch()
        return [self._start(variant) for variant in found.values()]

    def _start(self, variant: Variant) -> Future[str]:
        if variant.data not in self._futures:
            new = variant.signature not in self._signatures
            self._signatures.add(variant.signature)
            job = Job(variant.name, variant.data, new)
            self._futures[variant.data] = self._pool.submit(_compile, job, self._target)
        return self._futures[variant.data]

    def stop(self) -> None:
        """Without waiting for what is being compiled."""
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


def say(text: str) -> None:
    print(text, flush=True, file=sys.stdout)
