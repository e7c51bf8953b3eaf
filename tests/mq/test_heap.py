"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from ringcast.mq.heap import give_back_freed

PIECE, PIECES = 1000, 40_000  # too small for pages of their own


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_what_is_freed_is_given_back():
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [library.malloc(PIECE) for _ in range(PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    for piece in pieces[:-1]:  # the last one holds the heap's end where it is
        library.free(piece)
    before = resident_bytes()
    give_back_freed()
    assert before - resident_bytes() > PIECE * PIECES // 2
    library.free(pieces[-1])


def test_another_c_library_has_nothing_to_give(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    give_back_freed()
