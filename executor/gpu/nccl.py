"""NCCL for ranks that can't map each other's memory, as those on several hosts can't: the library
that torch has loaded, called directly.

Everything is a launch on the current stream, so a graph can hold it. Torch's process groups launch
on a stream of their own, and a thread watches them, which nobody needs here: who waits in vain is
ended with its process, by the supervisor.

How a group comes together:

    1. Its first rank makes an id, which has the address that it listens at.
    2. The id goes to the others through memory that ranks share. Over hosts that is mirrored on
       their link (../mirror.py), which is encrypted; what NCCL itself sends is not.
    3. All connect, and add something up once: nothing is left to be set up within a capture.

Sends and receives are connected when they are first made: make each once before a capture. There is
no way to take a group apart: NCCL would wait for all graphs that have launches of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ...mq.errors import ConfigError, RingcastError
from ..interfaces import interface_towards
from ..parallel import HostGroup
from .parallel import ENVIRONMENT

log = logging.getLogger(__name__)

LIBRARY = "libnccl.so.2"
_ID_WORDS = 32  # of four bytes
_SUM = 0
_TYPES = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}


class _Id(ctypes.Structure):
    _fields_ = (("words", ctypes.c_int32 * _ID_WORDS),)


_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_ARGUMENTS: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(_INT)],
    "ncclGetUniqueId": [ctypes.POINTER(_Id)],
    "ncclCommInitRank": [ctypes.POINTER(_POINTER), _INT, _Id, _INT],
    "ncclAllReduce": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclAllGather": [_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER],
    "ncclBroadcast": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclSend": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclRecv": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
}


class NcclError(RingcastError):
    """NCCL has refused a call, and says why. Often it can't reach another rank."""


@functools.cache
def library() -> Any:
    """Raises ConfigError where there is none."""
    try:
        found = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise ConfigError(
            f"device = 'cuda': workers on several hosts need NCCL, and {error}"
        ) from None
    for name, arguments in _ARGUMENTS.items():
        getattr(found, name).argtypes = arguments
        getattr(found, name).restype = _INT
    found.ncclGetErrorString.argtypes, found.ncclGetErrorString.restype = [_INT], ctypes.c_char_p
    found.ncclGetLastError.argtypes, found.ncclGetLastError.restype = [_POINTER], ctypes.c_char_p
    return found


def _call(name: str, *arguments: Any) -> None:
    found = library()
    if result := getattr(found, name)(*arguments):
        reasons = found.ncclGetErrorString(result), found.ncclGetLastError(None)
        said = ": ".join(reason.decode(errors="replace") for reason in reasons if reason)
        raise NcclError(f"{name}: {said} (NCCL_DEBUG=INFO says more)")


def prepare(address: str) -> None:
    """The environment, before NCCL is called first; what the user has set stays. address: of the
    master, towards which is the network that NCCL is to use.
    """
    for name, value in ENVIRONMENT.items():
        if name != "NCCL_SOCKET_IFNAME":
            os.environ.setdefault(name, value)
    if "NCCL_SOCKET_IFNAME" not in os.environ:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_towards(address)}"
    # All ways of adding up are connected at once, and not in the middle of a capture.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")


class Communicator:
    """One rank's end of a group. Tensors are in one piece, on its device. All ranks make the same
    calls in the same order, with tensors of the same type and size.

    Nothing waits for the device, nor for other ranks, but for what is made for the first time.
    Raises NcclError.
    """

    def __init__(self, rank: int, size: int, unique_id: np.ndarray, device: torch.device) -> None:
        """unique_id: int32 [32]. Waits for all ranks."""
        self.rank, self.size, self._device = rank, size, device
        words = _Id((ctypes.c_int32 * _ID_WORDS)(*unique_id.tolist()))
        handle = _POINTER()
        _call("ncclCommInitRank", ctypes.byref(handle), size, words, rank)
        self._handle = handle

    def all_reduce(self, x: torch.Tensor) -> None:
        """x, in place, becomes the sum of all ranks' x."""
        at = x.data_ptr()
        _call("ncclAllReduce", at, at, x.numel(), _type_of(x), _SUM, *self._where())

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out = all ranks' x, one behind the other."""
        assert (out.numel(), out.dtype) == (self.size * x.numel(), x.dtype)
        _type_of(out)
        _call("ncclAllGather", x.data_ptr(), out.data_ptr(), x.numel(), _type_of(x), *self._where())

    def broadcast(self, x: torch.Tensor, root: int = 0) -> None:
        """x becomes that of rank `root`."""
        at = x.data_ptr()
        _call("ncclBroadcast", at, at, x.numel(), _type_of(x), root, *self._where())

    def send(self, x: torch.Tensor, peer: int) -> None:
        _call("ncclSend", x.data_ptr(), x.numel(), _type_of(x), peer, *self._where())

    def receive(self, x: torch.Tensor, peer: int) -> None:
        """x becomes what rank `peer` sends, which is of the same size."""
        _call("ncclRecv", x.data_ptr(), x.numel(), _type_of(x), peer, *self._where())

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is called within is one launch, so its order doesn't matter."""
        _call("ncclGroupStart")
        try:
            yield
        finally:
            _call("ncclGroupEnd")

    def _where(self) -> tuple[Any, int]:
        on_gpu = self._device.type == "cuda"
        return self._handle, torch.cuda.current_stream(self._device).cuda_stream if on_gpu else 0


def _type_of(x: torch.Tensor) -> int:
    if not x.is_contiguous() or x.dtype not in _TYPES:
        raise ValueError(f"{x.dtype} {tuple(x.shape)} of strides {x.stride()} can't be exchanged")
    return _TYPES[x.dtype]


def connect(
    host: HostGroup, members: Sequence[int], device: torch.device, timeout: float
) -> Communicator | None:
    """The group of these ranks of `host`, in this order; None for one alone. All ranks of `host`
    call it, each with the members of its own group. timeout: seconds to wait for all.

    Raises TimeoutError, and ConfigError as `library`.
    """
    rank, own = members.index(host.rank), np.zeros(_ID_WORDS, np.int32)
    if not rank and len(members) > 1:
        made = _Id()
        _call("ncclGetUniqueId", ctypes.byref(made))
        own = np.array(made.words, np.int32)
    unique_id = host.all_gather(own)[members[0]]
    if len(members) == 1:
        return None
    network = os.environ.get("NCCL_SOCKET_IFNAME", "any")
    what = f"workers {', '.join(map(str, members))} over NCCL (NCCL_SOCKET_IFNAME: {network})"
    on_gpu = device.type == "cuda"
    stream = torch.cuda.current_stream(device) if on_gpu else None

    def join() -> Communicator:
        if on_gpu:
            torch.cuda.set_device(device)
        with torch.cuda.stream(stream):
            found = Communicator(rank, len(members), unique_id, device)
            ones = torch.ones(1, dtype=torch.int32, device=device)
            found.all_reduce(ones)
            assert ones.item() == len(members), what
        return found

    found = _in_time(join, timeout, what)
    version = _INT()
    _call("ncclGetVersion", ctypes.byref(version))
    log.info("NCCL %d connects %s", version.value, what)
    return found


def _in_time(join: Callable[[], Communicator], timeout: float, what: str) -> Communicator:
    """In a thread, which is left behind if it takes longer."""
    found: list[Communicator] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.append(join())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="connect", daemon=True)
    thread.start()
    thread.join(timeout)
    if errors:
        raise errors[0]
    if not found:
        raise TimeoutError(
            f"{what} have waited {timeout:g} s for each other: can their hosts reach one another "
            "on any port there?"
        )
    return found[0]
