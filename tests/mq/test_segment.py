"""Segments: nameless at once, reserved, and reaped when a crash left the name."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets

import posix_ipc
import pytest

from ringcast.mq import segment as segments
from ringcast.mq.errors import ConfigError
from ringcast.mq.segment import Segment, reap


@pytest.fixture
def prefix(monkeypatch):
    """A prefix of this test's own, so that nobody else's reaper meets its names."""
    chosen = f"segment-test-{secrets.token_hex(8)}-"
    monkeypatch.setattr(segments, "PREFIX", chosen)
    yield chosen
    for name in names(chosen):
        posix_ipc.unlink_shared_memory(f"/{name}")


def names(prefix):
    return {name for name in os.listdir(segments.FOLDER) if name.startswith(prefix)}


def test_two_mappings_of_one_memory(prefix):
    ours = Segment.create(8192)
    theirs = Segment.attach(ours.fd)
    assert (len(ours.memory), len(theirs.memory)) == (8192, 8192)
    assert ours.memory[:] == bytes(8192)
    ours.memory[5000:5003] = b"abc"
    ours.close()
    assert theirs.memory[5000:5003] == b"abc"
    for segment in (ours, theirs):
        segment.close()


def test_a_segment_has_no_name_and_is_private_and_locked(prefix, monkeypatch):
    seen = []
    fallocate = os.posix_fallocate

    def look(fd, offset, size):
        seen.append((names(prefix), os.fstat(fd).st_mode & 0o777))
        with open(f"/proc/self/fd/{fd}", "rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fallocate(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", look)
    segment = Segment.create(100)
    assert seen == [(set(), 0o600)]
    assert os.fstat(segment.fd).st_blocks > 0  # reserved, not promised
    segment.close()


def test_too_little_shared_memory_says_how_much_and_what_to_do(prefix, monkeypatch):
    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError) as caught:
        Segment.create(123456)
    text = str(caught.value)
    disk = os.statvfs(segments.FOLDER)
    assert "ring_bytes: 123456 bytes" in text
    assert f"of {disk.f_blocks * disk.f_frsize};" in text
    assert "--ring-bytes" in text
    assert "--shm-size" in text
    assert names(prefix) == set()
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_reaper_that_is_quicker_does_no_harm(prefix, monkeypatch):
    flock = fcntl.flock

    def reap_first(fd, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        assert len(reap()) == 1
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", reap_first)
    segment = Segment.create(64)
    segment.memory[:3] = b"abc"
    segment.close()


def test_the_reaper_takes_what_nobody_holds_and_nothing_else(prefix):
    left, held = f"{prefix}1-left", f"{prefix}1-held"
    other = f"not-{prefix}"
    descriptors = {
        name: posix_ipc.SharedMemory(f"/{name}", flags=posix_ipc.O_CREX, mode=0o600).fd
        for name in (left, held, other)
    }
    try:
        fcntl.flock(descriptors[held], fcntl.LOCK_EX)
        os.close(descriptors.pop(left))
        assert reap() == [left]
        assert names(prefix) == {held}
        assert names(other) == {other}
        os.close(descriptors.pop(held))  # its holder has died
        assert reap() == [held]
        assert reap() == []
    finally:
        posix_ipc.unlink_shared_memory(f"/{other}")
        for fd in descriptors.values():
            os.close(fd)
