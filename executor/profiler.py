"""torch's profiler in a worker: a trace of what its processor and its device do, from one message
to another.

The trace is for chrome://tracing or https://ui.perfetto.dev. A table beside it says in short what
is in it (trace_summary.py).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from . import trace_summary


class ProfilerError(Exception):
    """What was asked for can't be done, in words for whoever asked. refused: it was his mistake."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Profiler:
    """folder: of the traces; None where none has been named. name: the worker's.

    `start`, `step` and `stop` are called by the thread that runs the steps.
    """

    def __init__(self, folder: str | None, name: str) -> None:
        self._folder, self._name = folder, name
        self._profile: Any = None

    def start(self) -> None:
        """Raises ProfilerError."""
        folder = self._check_folder()
        if self._profile is not None:
            raise ProfilerError("a profile is being recorded; stop it first", refused=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProfilerError(f"torch_profiler_dir = {self._folder!r}: {error}") from error
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        made = profile(activities=activities)
        made.start()
        self._profile = made

    def step(self, number: int) -> AbstractContextManager[object]:
        """Around a step's launch."""
        if self._profile is None:
            return contextlib.nullcontext()
        from torch.profiler import record_function

        return record_function(trace_summary.annotation(number))

    def stop(self) -> Callable[[], str]:
        """Ends the recording. What it returns writes the files, which may take long, on any thread,
        and returns where they are and the table. Both raise ProfilerError.
        """
        folder = self._check_folder()
        made, self._profile = self._profile, None
        if made is None:
            raise ProfilerError("no profile is being recorded; start one first", refused=True)
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        made.stop()
        path = folder / f"{self._name}.{time.time_ns()}.pt.trace.json.gz"
        return lambda: self._write(made, path)

    def _write(self, made: Any, path: Path) -> str:
        try:
            made.export_chrome_trace(str(path))
            with gzip.open(path, "rb") as file:
                events = json.load(file)["traceEvents"]
            table = trace_summary.summarise(events).table()
            path.with_suffix("").with_suffix(".txt").write_text(f"{table}\n")
        except (OSError, RuntimeError) as error:
            raise ProfilerError(f"torch_profiler_dir = {self._folder!r}: {error}") from error
        return f"{self._name}: {path}\n{table}"

    def _check_folder(self) -> Path:
        if self._folder is None:
            raise ProfilerError(
                "there is no folder for profiles: set torch_profiler_dir "
                "(--torch-profiler-dir FOLDER) when the engine is started",
                refused=True,
            )
        return Path(self._folder)
