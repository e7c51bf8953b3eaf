"""How a batch does: a bar on a terminal, and one line at its end. Always on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from .run import Tally


class BatchProgress:
    """A context manager. total: lines of the input, done in earlier runs or not."""

    def __init__(self, tally: Tally, total: int, console: Console | None = None) -> None:
        console = console or Console(file=sys.stderr)
        self._tally = tally
        self._start = time.monotonic()
        self._bar = Progress(
            TextColumn("Batch"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[failed]}", style="red"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            "", total=total, completed=tally.earlier, speed="", failed=""
        )

    def update(self) -> None:
        """The tally has changed."""
        tally = self._tally
        failed = tally.failed + tally.earlier_failed
        self._bar.update(
            self._task,
            completed=tally.earlier + tally.answered + tally.failed,
            speed=f"{self._speed():,.0f} tok/s",
            failed=f"{failed} failed" if failed else "",
        )

    def summary(self) -> str:
        """What this run has done, in a line."""
        tally = self._tally
        before = f" ({tally.earlier:,} more in earlier runs)" if tally.earlier else ""
        return (
            f"{tally.answered:,} answered, {tally.failed:,} failed{before}; "
            f"{tally.prompt_tokens:,} prompt and {tally.output_tokens:,} output tokens in "
            f"{time.monotonic() - self._start:.1f} s, {self._speed():,.0f} tok/s"
        )

    def __enter__(self) -> BatchProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def _speed(self) -> float:
        """Output tokens a second; where there are none, as of embeddings, prompt tokens."""
        tokens = self._tally.output_tokens or self._tally.prompt_tokens
        return tokens / max(time.monotonic() - self._start, 1e-9)
