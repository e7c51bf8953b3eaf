"""Where compiled kernels are kept."""

from __future__ import annotations

import subprocess
import sys

import numba
import pytest

from ringcast.kernels.cpu import compiled


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    compiled.cache_folder.cache_clear()
    compiled.prepare_cache.cache_clear()
    yield
    compiled.cache_folder.cache_clear()
    compiled.prepare_cache.cache_clear()


def test_the_folder_follows_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("RINGCAST_CACHE", str(tmp_path))
    folder = compiled.cache_folder()
    assert folder.parent == tmp_path / "numba"
    assert folder.is_dir()
    assert not list(folder.iterdir())
    assert compiled.prepare_cache()
    assert str(folder) == numba.config.CACHE_DIR


def test_numbas_own_setting_comes_first(monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert compiled.cache_folder() == tmp_path


def test_nothing_is_kept_where_nothing_can_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RINGCAST_CACHE", str(tmp_path / "file"))
    assert compiled.cache_folder() is None
    assert not compiled.prepare_cache()


def test_a_kernel_is_compiled_by_one_process_at_a_time(monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "new"))
    ask = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"

    def is_free(kernel: str) -> bool:
        command = [sys.executable, "-c", ask, tmp_path / "new" / f"{kernel}.lock"]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0

    with compiled.one_at_a_time("other"):
        pass
    with compiled.one_at_a_time("one"):
        assert not is_free("one")
        assert is_free("other")
    assert is_free("one")
