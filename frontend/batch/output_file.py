"""A batch's output: lines are appended, each whole, and what an earlier run wrote is read again.

1. A line counts as done when its line break is there. A run that was killed may have left the
   beginning of one more, which is cut off.
2. One run has the file at a time: it holds a lock, which ends with its process.
3. Nothing is changed in a file before all of it is known to be an output of this input.
4. After a failed write nothing more is written: what it left must stay the last.
"""

from __future__ import annotations

import fcntl
import io
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from ...mq.errors import ConfigError, RingcastError
from .lines import OUTPUT_START, Outcome, read_outcome

_SECONDS_BETWEEN_SYNCS = 5.0


class OutputFile:
    """Close it, or use it as a context manager.

    path: "-" is standard output. That, a pipe or a device only takes lines; nothing is resumed.
    overwrite: forget what is there. resumable: whether another run can go on with it.
    """

    def __init__(self, path: str, overwrite: bool) -> None:
        self.name = "standard output" if path == "-" else path
        self._broken = False
        self._synced = time.monotonic()
        try:
            self._file = _open(path)
            regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
            self.resumable = regular and path != "-"
            if self.resumable:
                self._lock()
                if overwrite:
                    self._file.truncate(0)
        except OSError as error:
            raise ConfigError(f"cannot write {self.name}: {error.strerror or error}") from None

    def resume(self, settle: Callable[[Outcome], bool]) -> Iterator[Outcome]:
        """What is done already, each as `settle` has taken it; then write after that.

        settle: False for an outcome of another input. Raises ConfigError if there is such a one,
        or a line that is no output of a batch, and then the file is as it was.
        """
        if not self.resumable:
            return
        end = 0
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    self._check_torn(line)
                    break
                outcome = self._read(line, number)
                if not settle(outcome):
                    raise self._refusal(
                        f"line {number} has custom_id {str(outcome.custom_id)[:200]!r}, which the "
                        "input hasn't"
                    )
                yield outcome
                end += len(line)
        self._file.truncate(end)
        self._file.seek(end)

    def write(self, line: bytes) -> None:
        """Append a line. When this returns, it outlives this process.

        Raises RingcastError when there is no room, BrokenPipeError when nobody reads on.
        """
        if self._broken:
            raise RingcastError(f"cannot write {self.name} any more")
        try:
            left = memoryview(line)
            while left:
                left = left[self._file.write(left) :]
            if time.monotonic() - self._synced > _SECONDS_BETWEEN_SYNCS:
                self._sync()
        except BrokenPipeError:
            self._broken = True
            raise
        except OSError as error:
            self._broken = True
            raise RingcastError(f"cannot write {self.name}: {error.strerror or error}") from None

    def close(self) -> None:
        if not self._file.closed:
            try:
                self._sync()
            finally:
                self._file.close()

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"{self.name} is being written by another run") from None

    def _read(self, line: bytes, number: int) -> Outcome:
        try:
            return read_outcome(line)
        except ValueError as error:
            raise self._refusal(f"line {number} is no output of a batch: {error}") from None

    def _check_torn(self, line: bytes) -> None:
        # Only what this program may have left is cut off.
        if line[: len(OUTPUT_START)] != OUTPUT_START[: len(line)]:
            raise self._refusal("its last line is no output of a batch")

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self.name} can't be resumed: {reason}. Give another file, or --overwrite to lose "
            "what is in it"
        )

    def _sync(self) -> None:
        if self.resumable:
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()


def _open(path: str) -> io.FileIO:
    if path == "-":
        sys.stdout.flush()
        return open(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    return open(fd, "r+b" if os.path.isfile(path) else "wb", buffering=0)
