"""How far a start has come: bars on a terminal, a few plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from ...actors.reporter import silence

_MEGABYTE = 1_000_000
_SECONDS_BETWEEN_LINES = 5.0


class _Stderr(Console):
    def on_broken_pipe(self) -> None:  # rich's ends the process
        silence()


class StartProgress:
    """A context manager to which everyone who is slow to start reports, from any thread.

    A bar is one stage of one reporter; it goes when that reporter names another stage. Without a
    terminal a stage prints one line as it begins, and one every few seconds if it takes that long.
    """

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or _Stderr(file=sys.stderr)
        self._display: _Bars | _Lines = (
            _Bars(self._console) if self._console.is_terminal else _Lines(self._console, clock)
        )
        self._lock = threading.Lock()
        self._stopped = False

    def update(self, who: str, what: str, done: int, total: int) -> None:
        """`who` has done so much of the stage `what`. total: bytes or a count; 0 if not known."""
        with self._lock:
            if not self._stopped:
                self._display.update(who, what, done, total)

    def on_model(self, what: str, done: int, total: int) -> None:
        """`update` in the form that hub.resolve_model takes."""
        self.update("model", what, done, total)

    def stop(self) -> None:
        """Take the bars away. Later updates are ignored; stopping twice is nothing new."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._display.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class _Bars:
    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            console=console,
            transient=True,
            refresh_per_second=8,
        )
        self._tasks: dict[str, tuple[str, TaskID]] = {}  # by reporter: its stage
        self._started = False

    def update(self, who: str, what: str, done: int, total: int) -> None:
        if not self._started:  # not before there is something to show
            self._started = True
            self._progress.start()
        stage, task = self._tasks.get(who, ("", None))
        if task is not None and stage != what:
            self._progress.remove_task(task)
            task = None
        if task is None:
            task = self._progress.add_task(_label(who, what), total=None, amount="")
            self._tasks[who] = (what, task)
        self._progress.update(
            task, completed=done, total=total or None, amount=_amount(done, total)
        )

    def stop(self) -> None:
        if self._started:
            self._progress.stop()


class _Lines:
    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._stages: dict[str, tuple[str, float]] = {}  # by reporter: its stage, last line's time

    def update(self, who: str, what: str, done: int, total: int) -> None:
        now = self._clock()
        stage, printed = self._stages.get(who, ("", 0.0))
        if stage == what and now - printed < _SECONDS_BETWEEN_LINES:
            return
        self._stages[who] = (what, now)
        amount = (_amount(done, total) if stage == what else "") or "..."
        self._console.print(_label(who, what), amount, markup=False, highlight=False)

    def stop(self) -> None:
        pass


def _label(who: str, what: str) -> str:
    return what if who in ("model", what) else f"{who}: {what}"


def _amount(done: int, total: int) -> str:
    if total <= 0:
        return ""
    if total < _MEGABYTE:
        return f"{done} of {total}"
    return f"{done / _MEGABYTE:.1f} of {total / _MEGABYTE:.1f} MB"
