"""A .gguf file as a model: converted once into the cache."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from ...mq.errors import ModelLoadError
from . import children
from .cache import OnProgress, Source, Workspace, ensure, ignore_progress

CONVERTER_VERSION = (
    1  # raise it when what the converter writes changes: cached models are then made anew
)
CONVERTER = (sys.executable, "-P", "-m", "ringcast.executor.convert_gguf")


def model_of(path: Path, on_progress: OnProgress = ignore_progress) -> Path:
    """The folder of the model in the file at `path`, converted if it changed since it last was.

    Raises ModelLoadError for a file that is no GGUF, truncated, or of an unknown architecture.
    """
    path = path.resolve()
    _refuse_foreign(path)
    stat = path.stat()
    source = Source(
        origin=str(path),
        fingerprint=f"{stat.st_size} bytes, mtime {stat.st_mtime_ns}",
        converter=CONVERTER_VERSION,
    )
    key = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()

    def make(work: Workspace, on_progress: OnProgress) -> None:
        convert(path, work, on_progress)

    return ensure(f"{path.stem}-{key}", source, make, on_progress)


def convert(path: Path, work: Workspace, on_progress: OnProgress) -> None:
    """Convert the file at `path` into work.out, in a process of its own."""

    def on_line(line: str) -> None:
        word, _, numbers = line.partition(" ")
        if word == "progress":
            done, total = map(int, numbers.split())
            on_progress("convert", done, total)

    on_progress("convert", 0, 0)
    try:
        children.run(
            [*CONVERTER, str(path), str(work.out)],
            on_line,
            work=work.folder,
            keep_open=[work.lock],
        )
    except children.ChildFailedError as error:
        raise ModelLoadError(f"cannot convert {path}: {error}") from error


def _refuse_foreign(path: Path) -> None:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelLoadError(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
