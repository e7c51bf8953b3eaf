"""What kernels need of single numbers: typed pointers, element types to float32 and back, exp, an
atomic counter.

Elements are float32, bfloat16 (held as uint16) or float16 (held as int16); all arithmetic is in
float32.

To be vectorised, a loop over an array must start at 0: numba lets negative indices count from the
end, and the test for that goes away only where the index is plainly not negative. Slice first, then
loop.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F16, _F32 = ir.HalfType(), ir.FloatType()


@intrinsic
def pointer(typing_context, address, like):
    """The address as a pointer to values of the type of `like`."""
    signature = types.CPointer(like)(address, like)
    return signature, lambda context, builder, s, args: builder.inttoptr(
        args[0], context.get_value_type(s.return_type)
    )


@intrinsic
def widen(typing_context, value):
    """An element as float32."""

    def generate(context, builder, signature, args):
        if value == types.float32:
            return args[0]
        if value == types.int16:
            return builder.fpext(builder.bitcast(args[0], _F16), _F32)
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _F32)

    return types.float32(value), generate


@intrinsic
def narrow(typing_context, value, like):
    """A float32 as an element of the type of `like`, rounded to nearest, ties to even; infinities
    and NaN stay what they are.
    """

    def generate(context, builder, signature, args):
        if like == types.float32:
            return args[0]
        if like == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], _F16), _I16)
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.add(bits, builder.add(odd, _I32(0x7FFF)))
        is_nan = builder.icmp_unsigned(">", builder.and_(bits, _I32(0x7FFFFFFF)), _I32(0x7F800000))
        # Rounding would carry a NaN's last bits into the sign, or take its only ones away.
        quiet = builder.or_(bits, _I32(0x400000))
        chosen = builder.select(is_nan, quiet, rounded)
        return builder.trunc(builder.lshr(chosen, _I32(16)), _I16)

    return like(types.float32, like), generate


@intrinsic
def bytes_of(typing_context, element):
    """How many an element has."""
    size = _I64(4 if element == types.float32 else 2)
    return types.int64(element), lambda context, builder, s, args: size


@intrinsic
def bits_of(typing_context, value):
    """A float32's bits as an int32."""
    return types.int32(types.float32), lambda c, builder, s, args: builder.bitcast(args[0], _I32)


@intrinsic
def _from_bits(typing_context, value):
    return types.float32(types.int32), lambda c, builder, s, args: builder.bitcast(args[0], _F32)


@intrinsic
def take(typing_context, counter):
    """Add one to the int64 at this address, atomically, and return what it was. What was written
    before is seen by whoever reads the new count.
    """

    def generate(context, builder, signature, args):
        place = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", place, _I64(1), "acq_rel")

    return types.int64(types.int64), generate


@intrinsic
def read(typing_context, counter):
    """The int64 at this address. What comes after sees all that was written before that count was
    reached (see take).
    """

    def generate(context, builder, signature, args):
        place = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(types.int64), generate


def _extreme(name: str, flags: tuple[str, ...]):
    def extreme(typing_context, a, b):
        def generate(context, builder, signature, args):
            kind = ir.FunctionType(_F32, [_F32, _F32])
            function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
            return builder.call(function, args, fastmath=flags)

        return types.float32(types.float32, types.float32), generate

    return extreme


# Python's own min and max become branches, which LLVM doesn't vectorise.
largest = intrinsic(
    _extreme("llvm.maxnum.f32", ("nnan", "nsz"))
)  # of numbers that are none of them NaN
_at_least = intrinsic(_extreme("llvm.maxnum.f32", ()))
_at_most = intrinsic(_extreme("llvm.minnum.f32", ()))


@intrinsic
def prefetch(typing_context, address):
    """Ask for the cache line at this address; it is read later."""

    def generate(context, builder, signature, args):
        place = _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [place, _I32, _I32, _I32])
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(function, [builder.inttoptr(args[0], place), _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693145751953125)  # its product with |n| < 256 is exact
_LN2_LOW = np.float32(1.42860677e-06)
_ROUND = np.float32(
    12582912.0
)  # 1.5 * 2**23: adding it rounds to an integer, which is then in the low bits
_ROUND_BITS = np.int32(0x4B400000)
_TAYLOR = tuple(np.float32(1 / f) for f in (5040, 720, 120, 24, 6, 2))
_C7, _C6, _C5, _C4, _C3, _C2 = _TAYLOR
_ONE = np.float32(1)
_LEAST, _MOST = np.float32(-87), np.float32(88)


@njit(error_model="numpy", fastmath={"contract"})
def exp(x: np.float32) -> np.float32:
    """e**x within 2 units in the last place, x clamped to -87 .. 88. Written so that LLVM can
    vectorise it.

    x = n ln 2 + r with |r| <= ln 2 / 2; e**r by its Taylor series, 2**n by its bits. The reduction
    breaks if terms are reassociated, so this function is compiled without that flag.
    """
    x = _at_most(_at_least(x, _LEAST), _MOST)
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    series = _C7 * r + _C6
    series = series * r + _C5
    series = series * r + _C4
    series = series * r + _C3
    series = series * r + _C2
    series = series * r + _ONE
    series = series * r + _ONE
    power = (bits_of(shifted) - _ROUND_BITS + np.int32(127)) << np.int32(23)
    return series * _from_bits(np.int32(power))
