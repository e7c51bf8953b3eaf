"""Stands for the library of NCCL: ranks are threads of one process, whose memory all can read. What
is called takes effect at once, without a stream.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import defaultdict
from typing import Any

import numpy as np

from ringcast.executor.gpu import nccl

TYPES = {1: np.uint8, 2: np.int32, 4: np.int64, 6: np.float16, 7: np.float32}
TIMEOUT = 60


class Group:
    """What the ranks of one id have in common."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.shown: list[Any] = [None] * size
        self.sent: dict[tuple[int, int], queue.Queue[np.ndarray]] = defaultdict(queue.Queue)

    def of_all(self, rank: int, own: np.ndarray) -> list[np.ndarray]:
        self.barrier.wait()
        self.shown[rank] = own.copy()
        self.barrier.wait()
        shown = list(self.shown)
        assert len({(part.dtype, part.size) for part in shown}) == 1, (
            "ranks differ in what they give"
        )
        return shown


class FakeNccl:
    """calls: names of what was called, with the rank. fails: of these, names that fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.fails: set[str] = set()
        self.depth = threading.local()
        self._groups: dict[bytes, Group] = {}
        self._ranks: list[tuple[Group, int]] = [None]  # type: ignore[list-item]
        self._ids, self._lock = 0, threading.Lock()

    # The library's functions, with its own arguments

    def ncclGetVersion(self, version: Any) -> int:
        version._obj.value = 22800
        return 0

    def ncclGetUniqueId(self, made: Any) -> int:
        with self._lock:
            self._ids += 1
            made._obj.words[0], made._obj.words[nccl._ID_WORDS - 1] = self._ids, -self._ids
        return 0

    def ncclCommInitRank(self, handle: Any, size: int, unique_id: Any, rank: int) -> int:
        if "ncclCommInitRank" in self.fails:
            return 6
        assert isinstance(unique_id, nccl._Id)
        with self._lock:
            group = self._groups.setdefault(bytes(unique_id), Group(size))
            handle._obj.value = len(self._ranks)
            self._ranks.append((group, rank))
        assert group.size == size
        group.barrier.wait()
        return 0

    def ncclAllReduce(
        self, own: int, out: int, count: int, kind: int, op: int, handle: Any, stream: int
    ) -> int:
        group, rank = self._called("all_reduce", handle, op == 0)
        parts = group.of_all(rank, _array(own, count, kind))
        _array(out, count, kind)[:] = np.sum(parts, 0)
        return 0

    def ncclAllGather(
        self, own: int, out: int, count: int, kind: int, handle: Any, stream: int
    ) -> int:
        group, rank = self._called("all_gather", handle)
        parts = group.of_all(rank, _array(own, count, kind))
        _array(out, count * group.size, kind)[:] = np.concatenate(parts)
        return 0

    def ncclBroadcast(
        self, own: int, out: int, count: int, kind: int, root: int, handle: Any, stream: int
    ) -> int:
        group, rank = self._called("broadcast", handle)
        parts = group.of_all(rank, _array(own, count, kind))
        _array(out, count, kind)[:] = parts[root]
        return 0

    def ncclSend(self, own: int, count: int, kind: int, peer: int, handle: Any, stream: int) -> int:
        group, rank = self._called("send", handle)
        group.sent[rank, peer].put(_array(own, count, kind).copy())
        return 0

    def ncclRecv(self, out: int, count: int, kind: int, peer: int, handle: Any, stream: int) -> int:
        group, rank = self._called("receive", handle)
        item = group.sent[peer, rank].get(timeout=TIMEOUT)
        assert len(item) == count, f"{len(item)} were sent, and {count} are received"
        _array(out, count, kind)[:] = item
        return 0

    def ncclGroupStart(self) -> int:
        self.depth.value = getattr(self.depth, "value", 0) + 1
        return 0

    def ncclGroupEnd(self) -> int:
        self.depth.value -= 1
        return 0

    def ncclGetErrorString(self, result: int) -> bytes:
        return b"remote process exited or there was a network error"

    def ncclGetLastError(self, handle: Any) -> bytes:
        return b"no route"

    def _called(self, name: str, handle: Any, is_right: bool = True) -> tuple[Group, int]:
        assert is_right
        group, rank = self._ranks[handle.value]
        self.calls.append((name, rank))
        return group, rank


def _array(at: int, count: int, kind: int) -> np.ndarray:
    dtype = np.dtype(TYPES[kind])
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(at)
    return np.frombuffer(memory, dtype)
