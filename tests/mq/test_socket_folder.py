"""Folders of sockets: private, removed by their makers, or by others when these were killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from ringcast.mq.socket_folder import SocketFolder, reap


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_its_maker_removes_it():
    folder = SocketFolder()
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    assert reap() == []
    folder.remove()
    folder.remove()
    assert not os.path.exists(folder.path)


def test_of_a_maker_that_was_killed_it_is_reaped(place):
    code = (
        "import os, signal, tempfile; from ringcast.mq.socket_folder import SocketFolder;"
        f"tempfile.tempdir = {str(place)!r}; SocketFolder(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=False)
    left = [str(path) for path in place.iterdir()]
    assert len(left) == 1
    living = SocketFolder()
    assert reap() == left
    assert os.listdir(place) == [os.path.basename(living.path)]
    living.remove()
