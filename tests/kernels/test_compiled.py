"""Where compiled kernels are kept."""

from __future__ import annotations

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
