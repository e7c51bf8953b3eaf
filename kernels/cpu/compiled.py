"""Where compiled kernels are kept: a folder of the user's, one for each version of the sources.

Numba notices changes only in the file that a compiled function is in, not in those that it takes
functions from, so the folder's name has a digest of all of them.

Ranks and replicas that start together want the same kernels. The first compiles one, and the others
wait for it and find it in the folder: to compile takes seconds of a core, to load milliseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numba

from ...mq.paths import cache_root


@functools.cache
def cache_folder() -> Path | None:
    """None where nothing can be written: kernels are compiled anew at every start then."""
    if numba.config.CACHE_DIR:  # NUMBA_CACHE_DIR: the user has chosen
        return Path(numba.config.CACHE_DIR)
    folder = cache_root() / "numba" / _digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return None
    return folder


@functools.cache
def prepare_cache() -> bool:
    """Make numba use the folder; False if there is none."""
    folder = cache_folder()
    numba.config.CACHE_DIR = str(folder or "")
    return folder is not None


@contextlib.contextmanager
def one_at_a_time(kernel: str) -> Iterator[None]:
    """Within, no other process that shares the folder is within with the same kernel."""
    folder = cache_folder()
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{kernel}.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, or its process has died
        yield


def _digest() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
