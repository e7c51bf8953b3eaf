"""Whom a supervisor tells how it goes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Protocol

from ..mq import supervision
from . import effects as fx


class Reporter(Protocol):
    """Whoever is told how it goes: a terminal, or the process of an `LLM`."""

    def progress(self, actor: str, progress: supervision.Progress) -> None: ...

    def serving(self, details: dict[str, str | int | float], addresses: list[str]) -> None: ...

    def lost(self, death: fx.TellLost) -> None:
        """Something died and is being restarted. Once for each death."""

    def notice(self, text: str) -> None:
        """Something that people should know, of which nothing follows."""

    def back(self, names: Sequence[str], seconds: float) -> None:
        """It has come back, so long after it was lost."""

    def draining(self, timeout: float) -> None: ...

    def failed(self, death: fx.TellFailed) -> None: ...


def say(text: str) -> None:
    """A line on stderr."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        silence()


def silence() -> None:
    """Whoever read stderr is gone, which is no reason to end: from now on nobody hears it."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
