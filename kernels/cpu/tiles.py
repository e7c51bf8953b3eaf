"""The matrix tiles of x86 processors (AMX): whether they are there, and their instructions as numba
intrinsics.

A processor has eight tile registers, each of up to 16 rows of 64 bytes. `multiply(c, a, b)` adds to
the float32 tile c (rows x columns) the product of the bfloat16 tiles a (rows x 32) and b (16 x
columns x 2): b holds *pairs* of rows of the right-hand matrix, side by side. So the right-hand
matrix must be stored in pairs; see `pack`. `multiply_bytes(c, a, b)` does the same in int32 with
signed bytes a (rows x 64) and unsigned bytes b (16 x columns x 4).

Configurations are 64 bytes in memory, made ahead by `configurations` for every number of rows that
may be needed.
"""

from __future__ import annotations

import ctypes
import functools
import platform

import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

ROWS = 16  # rows of a tile
COLUMNS = 16  # float32 columns of a tile
DEPTH = 32  # bfloat16 columns of a tile: what one multiplication sums over

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
_I8, _I64, _POINTER = ir.IntType(8), ir.IntType(64), ir.IntType(8).as_pointer()


@functools.cache
def available() -> bool:
    """Whether processor and kernel let this process use bfloat16 tiles. Asks the kernel for
    permission.
    """
    return _permitted("amx-bf16")


@functools.cache
def bytes_available() -> bool:
    """The same, for tiles of bytes."""
    return _permitted("amx-int8")


def _permitted(feature: str) -> bool:
    features = llvm.get_host_cpu_features()
    if platform.system() != "Linux" or not (features.get("amx-tile") and features.get(feature)):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def configurations(shapes: list[list[tuple[int, int]]]) -> np.ndarray:
    """One 64-byte configuration for each list of eight (rows, bytes per row). uint8 [len(shapes),
    64].
    """
    table = np.zeros((len(shapes), 64), np.uint8)
    table[:, 0] = 1
    for i, tiles in enumerate(shapes):
        assert len(tiles) == 8
        for tile, (rows, width) in enumerate(tiles):
            table[i, 16 + 2 * tile] = width
            table[i, 48 + tile] = rows
    return table


def padded(size: int) -> int:
    """A size as packed matrices have it: the next multiple of 32."""
    return -(-size // 32) * 32


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A bfloat16 weight [N, K] as tiles: [N/16, K/32, 16 pairs of K, 16 of N, 2], zero-padded to
    multiples of 32.
    """
    n, k = weight.shape
    if padded(n) != n or padded(k) != k:
        weight = torch.nn.functional.pad(weight, (0, padded(k) - k, 0, padded(n) - n))
    pairs = weight.contiguous().view(torch.int32).view(-1, COLUMNS, padded(k) // DEPTH, DEPTH // 2)
    return pairs.permute(0, 2, 3, 1).contiguous().view(torch.bfloat16)


def unpack(tiles: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The inverse of `pack`."""
    pairs = tiles.view(torch.int32).permute(0, 3, 1, 2).contiguous()
    return pairs.view(padded(n), -1).view(torch.bfloat16)[:n, :k]


def _instruction(name: str, builder, tiles, operands):
    arguments = [_I8(tile) for tile in tiles] + list(operands)
    kinds = [argument.type for argument in arguments]
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name)
    builder.call(function, arguments)


@intrinsic
def configure(typing_context, address):
    """Load a configuration; all tiles are zero after it."""

    def generate(context, builder, signature, args):
        _instruction("llvm.x86.ldtilecfg", builder, [], [builder.inttoptr(args[0], _POINTER)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def release(typing_context):
    """Give the tiles back, so that context switches need not save them."""

    def generate(context, builder, signature, args):
        _instruction("llvm.x86.tilerelease", builder, [], [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)
def zero(typing_context, tile):
    number = tile.literal_value

    def generate(context, builder, signature, args):
        _instruction("llvm.x86.tilezero", builder, [number], [])
        return context.get_dummy_value()

    return types.void(tile), generate


def _transfer(name: str):
    def transfer(typing_context, tile, address, stride):
        number = tile.literal_value

        def generate(context, builder, signature, args):
            operands = [builder.inttoptr(args[1], _POINTER), args[2]]
            _instruction(name, builder, [number], operands)
            return context.get_dummy_value()

        return types.void(tile, types.int64, types.int64), generate

    return transfer


load = intrinsic(prefer_literal=True)(_transfer("llvm.x86.tileloadd64"))
store = intrinsic(prefer_literal=True)(_transfer("llvm.x86.tilestored64"))


def _product(name: str):
    def product(typing_context, c, a, b):
        numbers = [tile.literal_value for tile in (c, a, b)]

        def generate(context, builder, signature, args):
            _instruction(name, builder, numbers, [])
            return context.get_dummy_value()

        return types.void(c, a, b), generate

    return product


multiply = intrinsic(prefer_literal=True)(_product("llvm.x86.tdpbf16ps"))
multiply_bytes = intrinsic(prefer_literal=True)(_product("llvm.x86.tdpbsud"))
