"""Vectors of sixteen numbers as numba intrinsics: what products of bytes need, written out because
LLVM's own vectoriser doesn't find it.

`Whole` (int32) and `Real` (float32) are numba types. Python compiled by numba can hold them in
variables and pass them to these functions, no more. LLVM makes them of whatever registers a
processor has: one of AVX-512, four of NEON.
"""

from __future__ import annotations

import functools
import platform

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

LANES = 16
_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
_WHOLE, _REAL = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)


@functools.cache
def products_available() -> bool:
    """Whether this processor sums products of bytes in 512-bit vectors."""
    features = llvm.get_host_cpu_features()
    x86 = platform.machine() in ("x86_64", "AMD64")
    return bool(x86 and features.get("avx512f") and features.get("avx512vnni"))


@functools.cache
def bfloat16_available() -> bool:
    """Whether this processor has arithmetic for bfloat16."""
    features = llvm.get_host_cpu_features()
    return any(features.get(name) for name in ("amx-bf16", "avx512bf16", "bf16"))


class Whole(types.Type):
    def __init__(self) -> None:
        super().__init__("Whole")


class Real(types.Type):
    def __init__(self) -> None:
        super().__init__("Real")


@register_model(Whole)
class _WholeModel(models.PrimitiveModel):
    def __init__(self, manager, numba_type) -> None:
        super().__init__(manager, numba_type, _WHOLE)


@register_model(Real)
class _RealModel(models.PrimitiveModel):
    def __init__(self, manager, numba_type) -> None:
        super().__init__(manager, numba_type, _REAL)


whole, real = Whole(), Real()


def _simple(signature, make):
    """An intrinsic whose code is `make(builder, *arguments)`."""

    def generate(context, builder, signature, args):
        value = make(builder, *args)
        return context.get_dummy_value() if value is None else value

    return signature, generate


def _place(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _all_lanes(builder, value):
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _each(0))


def _each(value: int) -> ir.Constant:
    return ir.Constant(_WHOLE, [value] * LANES)


def _call(builder, name, result, *args):
    kind = ir.FunctionType(result, [arg.type for arg in args])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, args)


@intrinsic
def zeros(typing_context):
    return _simple(whole(), lambda builder: ir.Constant(_WHOLE, None))


@intrinsic
def load(typing_context, address):
    """Addresses here may have any alignment."""
    return _simple(
        whole(types.int64), lambda b, address: b.load(_place(b, address, _WHOLE), align=1)
    )


@intrinsic
def load_real(typing_context, address):
    return _simple(real(types.int64), lambda b, address: b.load(_place(b, address, _REAL), align=1))


@intrinsic
def load_halves(typing_context, address):
    """Sixteen float16 as float32."""
    kind = ir.VectorType(ir.HalfType(), LANES)
    return _simple(
        real(types.int64),
        lambda b, address: b.fpext(b.load(_place(b, address, kind), align=1), _REAL),
    )


@intrinsic
def load_elements(typing_context, address, like):
    """Sixteen elements (scalars.py) of the type of `like` as float32."""
    _16 = ir.VectorType(_I16, LANES)

    def make(builder, address, like):
        if like.type == _F32:
            return builder.load(_place(builder, address, _REAL), align=1)
        bits = builder.load(_place(builder, address, _16), align=1)
        if is_half:
            return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), _REAL)
        return builder.bitcast(builder.shl(builder.zext(bits, _WHOLE), _each(16)), _REAL)

    is_half = like == types.int16
    return _simple(real(types.int64, like), make)


def _store_lowest(bits: int):
    kind = ir.VectorType(ir.IntType(bits), LANES)

    def store_lowest(typing_context, address, value):
        def make(builder, address, value):
            builder.store(builder.trunc(value, kind), _place(builder, address, kind), align=1)

        return _simple(types.void(types.int64, whole), make)

    return intrinsic(store_lowest)


store_bytes = _store_lowest(8)  # the lowest byte of each lane, sixteen in all
store_words = _store_lowest(16)  # the two lowest bytes of each


@intrinsic
def store(typing_context, address, value):
    def make(builder, address, value):
        builder.store(value, _place(builder, address, value.type), align=1)

    return _simple(types.void(types.int64, value), make)


@intrinsic
def broadcast(typing_context, address):
    """The four bytes at this address in every lane."""
    return _simple(
        whole(types.int64),
        lambda b, address: _all_lanes(b, b.load(_place(b, address, _I32), align=1)),
    )


@intrinsic
def broadcast_real(typing_context, address):
    """The float32 at this address in every lane."""
    return _simple(
        real(types.int64),
        lambda b, address: _all_lanes(b, b.load(_place(b, address, _F32), align=1)),
    )


@intrinsic
def spread(typing_context, value):
    """An int32 or float32 in every lane."""
    signature = real(value) if value == types.float32 else whole(types.int32)
    return _simple(signature, _all_lanes)


@intrinsic
def add(typing_context, a, b):
    return _simple(
        a(a, a), lambda builder, a, b: builder.fadd(a, b) if a.type == _REAL else builder.add(a, b)
    )


@intrinsic
def subtract(typing_context, a, b):
    return _simple(whole(whole, whole), lambda builder, a, b: builder.sub(a, b))


@intrinsic
def multiply(typing_context, a, b):
    return _simple(real(real, real), lambda builder, a, b: builder.fmul(a, b))


@intrinsic
def multiply_add(typing_context, a, b, c):
    """a * b + c, rounded once."""
    return _simple(
        real(real, real, real), lambda builder, *abc: _call(builder, "llvm.fma.v16f32", _REAL, *abc)
    )


@intrinsic
def largest_size(typing_context, a, b):
    """The larger of |a| and |b| in each lane; NaN is larger than anything."""

    def make(builder, a, b):
        sizes = [_call(builder, "llvm.fabs.v16f32", _REAL, value) for value in (a, b)]
        a, b = (builder.bitcast(size, _WHOLE) for size in sizes)  # their order is that of the bits
        most = builder.select(builder.icmp_unsigned(">", a, b), a, b)
        return builder.bitcast(most, _REAL)

    return _simple(real(real, real), make)


@intrinsic
def largest_lane(typing_context, value):
    """Of numbers that are not negative; NaN is larger than anything."""

    def make(builder, value):
        bits = builder.bitcast(value, _WHOLE)
        most = _call(builder, "llvm.vector.reduce.umax.v16i32", _I32, bits)
        return builder.bitcast(most, _F32)

    return _simple(types.float32(real), make)


@intrinsic
def sum_lanes(typing_context, value):
    return _simple(
        types.int32(whole),
        lambda builder, value: _call(builder, "llvm.vector.reduce.add.v16i32", _I32, value),
    )


@intrinsic
def as_whole(typing_context, value):
    """The same bits."""
    return _simple(whole(real), lambda builder, value: builder.bitcast(value, _WHOLE))


@intrinsic
def to_real(typing_context, value):
    return _simple(real(whole), lambda builder, value: builder.sitofp(value, _REAL))


@intrinsic
def as_real(typing_context, value):
    """The same bits."""
    return _simple(real(whole), lambda builder, value: builder.bitcast(value, _REAL))


@intrinsic
def low(typing_context, halves):
    """The low half of each byte."""
    return _simple(whole(whole), lambda builder, v: builder.and_(v, _each(0x0F0F0F0F)))


@intrinsic
def high(typing_context, halves):
    """The high half of each byte."""
    return _simple(whole(whole), lambda b, v: b.and_(b.lshr(v, _each(4)), _each(0x0F0F0F0F)))


@intrinsic
def add_products(typing_context, total, unsigned, signed):
    """total + the sum of four products in each lane, of unsigned bytes by signed bytes. Plain
    arithmetic: blocks.py has the instructions for it.
    """

    def make(builder, total, unsigned, signed):
        for place in range(4):
            u = builder.and_(builder.lshr(unsigned, _each(8 * place)), _each(255))
            s = builder.ashr(builder.shl(signed, _each(24 - 8 * place)), _each(24))
            total = builder.add(total, builder.mul(u, s))
        return total

    return _simple(whole(whole, whole, whole), make)
