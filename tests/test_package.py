"""The wheel holds the whole package, and the package's public face is what it says."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ringcast

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mq", "kernels", "executor", "actors", "frontend")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Built from a copy, so that no build/ stays in the tree."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=left_out)
    build = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(source)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(source.glob("*.whl"))) as archive:
        yield archive


def page() -> set[str]:
    """The files of the page at /, which are no modules."""
    return {str(path.relative_to(ROOT)) for path in (ROOT / "frontend/http/page").iterdir()}


def modules() -> set[str]:
    found = {"__init__.py", "py.typed"}
    for package in PACKAGES:
        found |= {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
    return found


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {(ROOT / module).parent for module in modules()}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_every_module_and_the_page_is_in_the_wheel_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    in_wheel = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert in_wheel == {f"ringcast/{name}" for name in modules() | page()}


def test_the_wheel_carries_licence_and_command(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    entry_points = next(name for name in names if name.endswith("/entry_points.txt"))
    assert b"ringcast = ringcast.frontend.cli.main:main" in wheel.read(entry_points)


def test_version_is_the_projects(project: dict[str, Any]) -> None:
    assert ringcast.__version__ == project["project"]["version"]


def test_every_dependency_is_pinned(project: dict[str, Any]) -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pinned = {
        canonicalize_name(Requirement(line).name)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    }
    wanted = project["project"]["dependencies"].copy()
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    names = {canonicalize_name(Requirement(line).name) for line in wanted} - {"ringcast"}
    assert names - pinned == set()


@pytest.mark.parametrize("name", ringcast.__all__)
def test_public_names_are_there(name: str) -> None:
    assert getattr(ringcast, name) is not None


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Llm'"):
        _ = ringcast.Llm
