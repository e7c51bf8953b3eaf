"""How a kernel is compiled, given its arguments, and run by many threads.

1. A kernel's body is a Python function of one argument, a pointer to a record of its arguments. Numba compiles it to
   machine code without Python. The record's fields are int64 (an address or a size) or float32, and one field,
   `element`, whose *type* is the element type of the model: the same body is compiled once for each.
2. The threads are those of the OpenMP library that torch has loaded, entered through GOMP_parallel (the entry point
   that GNU's, LLVM's and Intel's libraries share). A second pool of threads would compete with torch's for the same
   cores: both spin for a while after each region.
3. A body asks for its thread's number and the number of threads, and takes its share. Nothing else is shared out.
4. Many launches in a row become one `Tape`: one region, with a barrier between one launch and the next, so that a whole
   forward pass is one call from Python.

Compiled code is kept in a folder of its own for each version of the sources, because numba looks only at the file
that a body is in and not at those it takes functions from.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

ELEMENTS = {torch.float32: "f4", torch.bfloat16: "u2", torch.float16: "i2"}
FLAGS = {"reassoc", "contract", "nsz", "arcp"}  # not "nnan" and "ninf": unused cache slots hold anything
_OPENMP = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")

thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
thread_count = types.ExternalFunction("omp_get_num_threads", types.int32())
barrier = types.ExternalFunction("GOMP_barrier", types.void())


def cache_folder() -> Path | None:
    """Where compiled kernels are kept, or None where nothing can be written (they are compiled anew then)."""
    root = os.environ.get("RINGCAST_CACHE") or os.path.expanduser("~/.cache/ringcast")
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    folder = Path(root, "numba", digest.hexdigest()[:16])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return None
    return folder


@functools.cache
def _library() -> ctypes.CDLL:
    """The OpenMP library that torch uses. Its symbols are made known to LLVM, which links kernels against them."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "GOMP_parallel"):
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "omp" in line and ".so" in line}
        found = [loaded for loaded in map(ctypes.CDLL, sorted(paths)) if hasattr(loaded, "GOMP_parallel")]
        if not found:
            raise RuntimeError("this build of torch has loaded no OpenMP library with GOMP_parallel")
        library = found[0]
    for name in _OPENMP:
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.GOMP_parallel.restype = None
    return library


@functools.cache
def _caching() -> bool:
    if numba.config.CACHE_DIR:  # NUMBA_CACHE_DIR: the user has chosen
        return True
    folder = cache_folder()
    numba.config.CACHE_DIR = str(folder or "")
    return folder is not None


class Kernel:
    """A body and the names of its arguments, for every element type. Compiled at first use of each, or from the cache."""

    def __init__(self, body: Callable[[object], None], integers: str, floats: str = "") -> None:
        self.name = body.__name__
        self._body = body
        self._fields = [(name, "i8") for name in integers.split()] + [(name, "f4") for name in floats.split()]
        self._compiled: dict[torch.dtype, tuple[np.dtype, int, object]] = {}

    def compile(self, dtype: torch.dtype) -> None:
        if dtype in self._compiled:
            return
        _library()
        record = np.dtype([*self._fields, ("element", ELEMENTS[dtype])], align=True)
        signature = types.void(types.CPointer(numba.from_dtype(record)))
        code = numba.cfunc(signature, cache=_caching())(self._body)
        self._compiled[dtype] = (record, code.address, code)

    def bind(self, dtype: torch.dtype, **arguments: object) -> Launch:
        """This kernel on these arguments: tensors and arrays by address (kept alive), integers and floats by value."""
        self.compile(dtype)
        record, address, _ = self._compiled[dtype]
        assert {*arguments} == {*record.names} - {"element"}, (self.name, sorted(arguments))
        values = np.zeros(1, record)
        for name, value in arguments.items():
            values[name] = _address(value)
        return Launch(address, values, list(arguments.values()))


def _address(value: object) -> object:
    if value is None:
        return 0
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return value.ctypes.data if isinstance(value, np.ndarray) else value


class Launch:
    """A kernel bound to its arguments. Calling it runs it on `threads` threads, as many as torch uses."""

    def __init__(self, code: int, arguments: np.ndarray, alive: list[object]) -> None:
        self.code = code
        self.arguments = arguments
        self.threads = torch.get_num_threads()
        self._alive = alive
        self._address = arguments.ctypes.data
        self._parallel = _library().GOMP_parallel

    def __call__(self) -> None:
        self._parallel(self.code, self._address, self.threads, 0)


@intrinsic
def _call(typing_context, code, arguments):  # type: ignore[no-untyped-def]  # noqa: ANN
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(64)]).as_pointer()
        builder.call(builder.inttoptr(args[0], function), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _play(pointer):  # type: ignore[no-untyped-def]
    arguments = numba.carray(pointer, 1)[0]
    for i in range(arguments.length):
        codes = numba.carray(_as_pointer(arguments.codes), (arguments.length,))
        records = numba.carray(_as_pointer(arguments.records), (arguments.length,))
        _call(codes[i], records[i])
        barrier()


@intrinsic
def _as_pointer(typing_context, address):  # type: ignore[no-untyped-def]
    signature = types.CPointer(types.int64)(address)
    return signature, lambda context, builder, s, args: builder.inttoptr(
        args[0], context.get_value_type(s.return_type)
    )


_tape = Kernel(_play, "codes records length")


class Tape:
    """Launches that run one after the other within one parallel region."""

    def __init__(self, launches: Iterable[Launch]) -> None:
        self._launches = list(launches)
        codes = np.array([launch.code for launch in self._launches], np.int64)
        records = np.array([launch.arguments.ctypes.data for launch in self._launches], np.int64)
        self._run = _tape.bind(torch.float32, codes=codes, records=records, length=len(codes))

    def __call__(self, *unused: object) -> None:
        self._run()

    @staticmethod
    def compile() -> None:
        _tape.compile(torch.float32)
