"""A batch's input: read twice, once to know what it asks for and once to ask it.

The first reading finds duplicates and makes resuming safe. Of it there remains one byte a line, so
that a file may be of any size.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import BinaryIO, NamedTuple

from ...mq.errors import ConfigError
from .custom_ids import CustomIds
from .lines import Outcome, custom_id_of

# What is left to do of a line.
_NOTHING = 0
_REQUEST = 1
_NAMELESS = 2  # to be refused: no custom_id
_DUPLICATE = 3  # to be refused: its custom_id is that of an earlier line

_LINES_BETWEEN_REPORTS = 10_000


class InputLine(NamedTuple):
    number: int
    text: bytes
    duplicate: bool


class InputFile:
    """Close it, or use it as a context manager. `survey` comes first, then `settle` as often as
    there are outcomes of earlier runs, then `unsettled`.

    path: "-" is standard input, which is read to its end, as is any pipe.
    num_lines: lines that aren't blank. num_settled: those that are done.
    """

    def __init__(self, path: str) -> None:
        self.name = "standard input" if path == "-" else path
        self.num_lines = 0
        self.num_settled = 0
        self._states = bytearray()
        self._ids = CustomIds()
        try:
            file = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
            self._file = _seekable(file)
        except OSError as error:
            raise ConfigError(f"cannot read {self.name}: {error.strerror or error}") from None
        self.size = os.fstat(self._file.fileno()).st_size

    def is_same_as(self, path: str) -> bool:
        return os.path.exists(path) and os.path.samestat(
            os.fstat(self._file.fileno()), os.stat(path)
        )

    def survey(self, on_progress: Callable[[int], None]) -> None:
        """Read all of it once. on_progress: told how many bytes have been read, now and then.

        Raises ConfigError if no line of it is a request.
        """
        self._file.seek(0)
        num_bytes = 0
        for place, text in enumerate(self._file):
            num_bytes += len(text)
            self._states.append(self._look_at(text, place))
            if (place + 1) % _LINES_BETWEEN_REPORTS == 0:
                on_progress(num_bytes)
        for place in self._ids.close():
            self._states[place] = _DUPLICATE
        self.num_lines = len(self._states) - self._states.count(_NOTHING)
        if _REQUEST not in self._states:
            raise ConfigError(f"{self.name} has no line that is a request with a custom_id")

    def settle(self, outcome: Outcome) -> bool:
        """Take an outcome of an earlier run. False if it is of another input."""
        if outcome.custom_id is not None:
            place = self._ids.find(outcome.custom_id)
            if place is None:
                return False
        else:
            place = outcome.line - 1
            if not 0 <= place < len(self._states):
                return True
            if self._states[place] not in (_NAMELESS, _DUPLICATE):
                return True  # this line has been mended since
        if self._states[place] != _NOTHING:
            self._states[place] = _NOTHING
            self.num_settled += 1
        return True

    def unsettled(self) -> Iterator[InputLine]:
        """The lines that are left to do, in order. What was appended since `survey` isn't read."""
        self._ids = CustomIds()  # not needed any more, and the largest thing here
        self._file.seek(0)
        for place, state in enumerate(self._states):
            text = self._file.readline()
            if state != _NOTHING:
                yield InputLine(place + 1, text, state == _DUPLICATE)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> InputFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _look_at(self, text: bytes, place: int) -> int:
        if not text.strip():
            return _NOTHING
        custom_id = custom_id_of(text)
        if custom_id is None:
            return _NAMELESS
        self._ids.add(custom_id, place)
        return _REQUEST


def _seekable(file: BinaryIO) -> BinaryIO:
    """The file itself, or a copy on disk of what comes out of a pipe."""
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    copy = tempfile.TemporaryFile(prefix="ringcast-batch-")  # noqa: SIM115
    with file:
        shutil.copyfileobj(file, copy)
    copy.seek(0)
    return copy
