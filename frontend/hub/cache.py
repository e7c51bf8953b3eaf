"""The cache folder: models that were fetched or converted, each whole or not there at all.

    CACHE/models/NAME/               a whole model; ringcast.json in it says what it was made from
    CACHE/models/.NAME.lock          flock held while NAME is made; the empty file stays
    CACHE/models/.NAME.making-XXXX/  where it is made

1. A model is made in a folder beside its place and renamed into it at the end.
2. Only the holder of the lock makes, replaces or cleans up. Children inherit the lock: if their
   parent is killed, the next process waits for them to end, then removes what they left.
3. A model is used if its ringcast.json names the same source and the same converter, and every
   file has the size written there. Otherwise it is made anew.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ...mq.errors import ModelLoadError
from ...mq.paths import cache_root

OnProgress = Callable[[str, int, int], None]
"""Called with (stage, done, total), total 0 if not known. Stages: download, check, convert."""

_MARKER = "ringcast.json"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """What a cached model was made from. Another source under the same name means: make it anew."""

    origin: str
    fingerprint: str
    converter: int


class _Marker(msgspec.Struct, frozen=True):
    source: Source
    sizes: dict[str, int]


class Workspace(msgspec.Struct, frozen=True):
    """Where a model is made.

    folder: for anything temporary. out: becomes the model. lock: for children to inherit.
    """

    folder: Path
    out: Path
    lock: int


def ignore_progress(stage: str, done: int, total: int) -> None:
    """The OnProgress of those who don't watch."""


def models_folder() -> Path:
    """Where models are kept, a folder each."""
    return cache_root() / "models"


def is_whole(folder: Path, source: Source) -> bool:
    """Whether `folder` holds all of a model made from `source`."""
    try:
        marker = msgspec.json.decode((folder / _MARKER).read_bytes(), type=_Marker)
        sizes = {name: (folder / name).stat().st_size for name in marker.sizes}
    except (OSError, msgspec.DecodeError):
        return False
    return marker.source == source and sizes == marker.sizes


def ensure(
    name: str,
    source: Source,
    make: Callable[[Workspace, OnProgress], None],
    on_progress: OnProgress = ignore_progress,
) -> Path:
    """The folder of model `name`, made by `make` if it isn't there yet.

    Blocks while another process makes it. Raises ModelLoadError where the cache folder can't be
    written, and what `make` raises.
    """
    folder = models_folder() / name
    if is_whole(folder, source):
        return folder
    try:
        with _locked(folder, on_progress) as lock:
            _clean_up(folder)
            if not is_whole(folder, source):
                _make(folder, source, make, on_progress, lock)
    except OSError as error:
        raise ModelLoadError(f"cannot write the model {name} to {folder}: {error}") from error
    return folder


@contextmanager
def _locked(folder: Path, on_progress: OnProgress) -> Iterator[int]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress("wait for another process that makes it", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _clean_up(folder: Path) -> None:
    for left in folder.parent.glob(f".{folder.name}.making-*"):
        shutil.rmtree(left)


def _make(
    folder: Path,
    source: Source,
    make: Callable[[Workspace, OnProgress], None],
    on_progress: OnProgress,
    lock: int,
) -> None:
    with tempfile.TemporaryDirectory(
        prefix=f".{folder.name}.making-", dir=folder.parent, ignore_cleanup_errors=True
    ) as temporary:
        work = Workspace(Path(temporary), Path(temporary) / "model", lock)
        work.out.mkdir()
        make(work, on_progress)
        _write_marker(work.out, source)
        if folder.exists():
            folder.rename(work.folder / "replaced")
        work.out.rename(folder)


def _write_marker(out: Path, source: Source) -> None:
    sizes = {}
    for file in sorted(path for path in out.rglob("*") if path.is_file()):
        file.chmod(0o644)  # safetensors writes 0600, but a cache may be shared
        sizes[str(file.relative_to(out))] = file.stat().st_size
    (out / _MARKER).write_bytes(msgspec.json.format(msgspec.json.encode(_Marker(source, sizes))))
