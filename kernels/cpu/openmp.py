"""How a kernel is compiled, given its arguments, and run by many threads.

1. A kernel's body is a Python function `body(pointer, chunk, chunks)`: a pointer to a record of its
   arguments, and which part of the work to do. Numba compiles it to machine code without Python.
   The record's fields are int64 (an address or a size) or float32, and one field, `element`, whose
   *type* is the element type of activations: the same body is compiled once for each. Kernels that
   read or write the KV cache have another, `cached`, for its element type.
2. The threads are those of the OpenMP library that torch has loaded, entered through GOMP_parallel
   (the entry point that GNU's, LLVM's and Intel's libraries share). A second pool of threads would
   compete with torch's for the same cores.
3. Threads take chunks off a counter. A kernel is done when all its chunks are done, not when all
   threads have come: where other processes want the cores too, a thread that was put aside holds up
   the rest only if it holds a chunk. (With barriers and busy neighbours on two cores, a decode step
   of 270 kernels took twice as long as it does so.)
4. Many launches in a row become one `Tape`: one parallel region, one call from Python.

A launch has rows x per_row chunks, as `rows` says when it runs, but at most `most`.

    given   chunks given out   added to by a thread that wants one
    done    chunks finished    added to after a chunk's last write (release); read before the next
                               kernel's first read (acquire), by every thread
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .compiled import one_at_a_time, prepare_cache
from .scalars import pointer, read, take

ELEMENTS = {torch.float32: "f4", torch.bfloat16: "u2", torch.float16: "i2"}
FLAGS = {
    "reassoc",
    "contract",
    "nsz",
    "arcp",
}  # not "nnan" and "ninf": unused cache slots hold anything
CHUNKS_PER_THREAD = 4
UNLIMITED = 1 << 62
_SPINS = 400  # about 20 µs, then the core is offered to others
_LINE = 64  # bytes of a cache line: `given` and `done` don't share one
_I64 = np.int64(0)

thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
offer_core = types.ExternalFunction("sched_yield", types.int32())


class Chunks(NamedTuple):
    """rows: int64 [1] that is read when the kernel runs, or a number that is known now."""

    rows: np.ndarray | int
    per_row: int = 1
    most: int | None = None  # some for each thread


@functools.cache
def _library() -> ctypes.CDLL:
    """The OpenMP library that torch uses. Its symbols are made known to LLVM, which links kernels
    against them.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "GOMP_parallel"):
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "omp" in line and ".so" in line}
        found = [
            loaded for loaded in map(ctypes.CDLL, sorted(paths)) if hasattr(loaded, "GOMP_parallel")
        ]
        if not found:
            raise RuntimeError(
                "this build of torch has loaded no OpenMP library with GOMP_parallel"
            )
        library = found[0]
    llvm.add_symbol(
        "omp_get_thread_num", ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p).value
    )
    library.GOMP_parallel.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint,
        ctypes.c_uint,
    ]
    library.GOMP_parallel.restype = None
    return library


class Code:
    """A body compiled for its element types: its machine code's address, and the record of its
    arguments.
    """

    def __init__(
        self,
        body: Callable[..., None],
        fields: list[tuple[str, str]],
        elements: dict[str, str],
        extra: int,
    ) -> None:
        _library()
        self._elements = elements
        self.record = np.dtype([*fields, *elements.items()], align=True)
        signature = types.void(
            types.CPointer(numba.from_dtype(self.record)), *[types.int64] * extra
        )
        is_cached = prepare_cache()
        with one_at_a_time(" ".join([f"{body.__module__}.{body.__name__}", *elements.values()])):
            self._compiled = numba.cfunc(signature, cache=is_cached)(body)
        self.address: int = self._compiled.address

    def fill(self, arguments: dict[str, object]) -> np.ndarray:
        """Tensors and arrays go by address, None as 0, numbers as they are."""
        assert {*arguments} == {*self.record.names} - {*self._elements}, (
            self._compiled,
            sorted(arguments),
        )
        values = np.zeros(1, self.record)
        for name, value in arguments.items():
            values[name] = _address(value)
        return values


def _address(value: Any) -> Any:
    if value is None:
        return 0
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return value.ctypes.data if isinstance(value, np.ndarray) else value


def _by_rows(arguments: dict[str, Any]) -> Chunks:
    return Chunks(arguments["rows"])


class Kernel:
    """A body and the names of its arguments, for every element type. Compiled at first use, or read
    from the cache.

    `chunks` tells from a launch's arguments how to cut its work; by default by `rows`. has_cache:
    it reads or writes the KV cache, whose element type is another than activations' if it is named.
    """

    def __init__(
        self,
        body: Callable[..., None],
        integers: str,
        floats: str = "",
        chunks: Callable[[dict[str, Any]], Chunks] = _by_rows,
        has_cache: bool = False,
    ) -> None:
        self.name = body.__name__
        self._body, self._chunks, self._has_cache = body, chunks, has_cache
        self._fields = [(name, "i8") for name in integers.split()] + [
            (name, "f4") for name in floats.split()
        ]
        self._codes: dict[tuple[torch.dtype, ...], Code] = {}

    def compile(self, dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> Code:
        key = (dtype, cache_dtype or dtype) if self._has_cache else (dtype,)
        if key not in self._codes:
            names = dict(zip(("element", "cached"), map(ELEMENTS.get, key), strict=False))
            self._codes[key] = Code(self._body, self._fields, names, extra=2)
        return self._codes[key]

    def bind(
        self, dtype: torch.dtype, cache_dtype: torch.dtype | None = None, **arguments: Any
    ) -> Launch:
        """This kernel on these arguments, which are kept alive: tensors, arrays, integers, floats,
        None for no address.
        """
        code = self.compile(dtype, cache_dtype)
        return Launch(code.address, code.fill(arguments), self._chunks(arguments), arguments)


class Launch:
    """A kernel bound to its arguments."""

    def __init__(
        self, code: int, record: np.ndarray, chunks: Chunks, alive: dict[str, Any]
    ) -> None:
        self.code, self.record, self._alive = code, record, alive
        rows = chunks.rows
        self.rows = np.array([rows], np.int64) if isinstance(rows, int) else rows
        self.per_row = chunks.per_row
        self.most = chunks.most or CHUNKS_PER_THREAD * torch.get_num_threads()

    def __call__(self) -> None:
        self._tape()

    @functools.cached_property
    def _tape(self) -> Tape:
        return Tape([self])


@intrinsic
def _call(typing_context, code, record, chunk, chunks):
    def generate(context, builder, signature, args):
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 3).as_pointer()
        builder.call(builder.inttoptr(args[0], function), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def pause(typing_context):
    """Tell the processor that this is a waiting loop."""

    def generate(context, builder, signature, args):
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(
                builder.module.globals.get(name) or ir.Function(builder.module, kind, name), []
            )
        return context.get_dummy_value()

    return types.void(), generate


def _play(p):
    a = numba.carray(p, 1)[0]
    codes = numba.carray(pointer(a.codes, _I64), (a.length,))
    records = numba.carray(pointer(a.records, _I64), (a.length,))
    rows = numba.carray(pointer(a.rows, _I64), (a.length,))
    per_row = numba.carray(pointer(a.per_row, _I64), (a.length,))
    most = numba.carray(pointer(a.most, _I64), (a.length,))
    for i in range(a.length):
        chunks = min(numba.carray(pointer(rows[i], _I64), (1,))[0] * per_row[i], most[i])
        given = a.counters + i * 2 * _LINE
        done = given + _LINE
        chunk = take(given)
        while chunk < chunks:
            _call(codes[i], records[i], chunk, chunks)
            take(done)
            chunk = take(given)
        spins = 0
        while read(done) < chunks:
            spins += 1
            if spins < _SPINS:
                pause()
            else:
                offer_core()


@functools.cache
def _player() -> Code:
    names = "codes records rows per_row most counters length"
    return Code(_play, [(name, "i8") for name in names.split()], {}, extra=0)


class Tape:
    """Launches that run one after the other within one parallel region, on as many threads as torch
    uses.
    """

    def __init__(self, launches: Iterable[Launch]) -> None:
        self.launches = list(launches)
        self._threads = torch.get_num_threads()
        self._counters = np.zeros((len(self.launches), 2, _LINE // 8), np.int64)
        columns = {
            "codes": [launch.code for launch in self.launches],
            "records": [launch.record.ctypes.data for launch in self.launches],
            "rows": [launch.rows.ctypes.data for launch in self.launches],
            "per_row": [launch.per_row for launch in self.launches],
            "most": [launch.most for launch in self.launches],
        }
        self._columns = {name: np.array(values, np.int64) for name, values in columns.items()}
        code = _player()
        length = len(self.launches)
        self._record = code.fill({**self._columns, "counters": self._counters, "length": length})
        self._arguments = code.address, self._record.ctypes.data, self._threads, 0
        self._parallel = _library().GOMP_parallel

    def __call__(self, *unused: object) -> None:
        self._counters.fill(0)
        self._parallel(*self._arguments)

    @staticmethod
    def compile() -> None:
        _player()
