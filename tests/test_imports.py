"""Who loads what: nothing but the worker may pay for torch and its like."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "triton", "numba")
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
assert names
for name in names:
    if name != "ringcast.actors.worker":
        importlib.import_module(name)
"""
USE_PUBLIC_NAMES = """
import ringcast
for name in ringcast.__all__:
    getattr(ringcast, name)
"""
PRINT_HEAVY = f"\nprint(*(name for name in {HEAVY} if name in sys.modules))\n"


def loaded_by(code: str, *arguments: str) -> list[str]:
    """Which of the heavy packages a process has loaded after running `code`."""
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", f"import sys\n{code}{PRINT_HEAVY}", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("package", ["mq", "actors", "frontend"])
def test_no_module_loads_anything_heavy(package: str) -> None:
    assert loaded_by(IMPORT_ALL, f"ringcast.{package}") == []


def test_nor_do_the_public_names() -> None:
    assert loaded_by(USE_PUBLIC_NAMES) == []


def test_this_would_be_noticed() -> None:
    assert loaded_by("import numba") == ["numba"]
