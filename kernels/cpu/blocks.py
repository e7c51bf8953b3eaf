"""Products of a few rows by 16 outputs or more, whose sums stay in registers, as numba intrinsics.
Which rows and outputs go together is part of the code, so each number of rows has code of its own,
and all of it is made by one function for each kind of weight.

A row's sum is made in the order of its inputs, by the same steps in the code for every number of
rows: the number of rows doesn't change its bits.

`multiply_elements` and `multiply_bfloat16` are plain arithmetic; the others need instructions, of
AVX2, but for bytes:

    bytes   fours of unsigned by signed ones are added up to int32 (vpdpbusd of AVX-512 with VNNI)
    words   pairs of int16 are multiplied and added up to int32 (vpmaddwd)
    halves  pairs of bytes, unsigned by signed, to int16 (vpmaddubsw), which saturates. A half of a
            byte is at most 15, so a pair comes to 3,810 at most, and the eight of a group fit. With
            VNNI as bytes (multiply_halves_512).
"""

from __future__ import annotations

import functools
import platform
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .emit import (
    by_rows,
    call,
    constant,
    emit,
    fused,
    load,
    moved,
    places,
    repeat,
    spread,
    store,
    vector,
)

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_OUTPUTS = 16
_HALF_OUTPUTS = 8  # what a register of AVX2 has
MOST_ROWS = 6  # whose sums stay in 12 of 16 registers
MOST_BYTE_ROWS = 12  # likewise in 24 of AVX-512's 32
MOST_HALVES_ROWS = 4
_PLACE = types.int64


@functools.cache
def available() -> bool:
    """Whether this processor has AVX2 and fused multiplication and addition."""
    features = llvm.get_host_cpu_features()
    x86 = platform.machine() in ("x86_64", "AMD64")
    return bool(x86 and features.get("avx2") and features.get("fma") and features.get("f16c"))


@functools.cache
def _has_avx512() -> bool:
    """Whether there are 32 registers of 512 bits, and not 16 of 256."""
    return available() and bool(llvm.get_host_cpu_features().get("avx512f"))


@functools.cache
def most_wide_rows() -> int:
    """How many rows `multiply_bfloat16` takes."""
    return 12 if _has_avx512() else MOST_ROWS


def _wide_strips(rows: int) -> list[int]:
    """How many strips of 16 outputs are computed together, of an even number: as often as that goes
    the first number, then the next. Sums of all rows stay in registers; and with AVX-512 no number
    of x is for one product alone, which would be one whose operand is in memory: those have half
    the rate.
    """
    if _has_avx512():
        return [4, 2] if rows <= 6 else [2]
    return [4, 2] if rows == 1 else [2] if rows == 2 else [1]


def _widened(b: ir.IRBuilder, place: ir.Value, element: Any, lanes: int) -> ir.Value:
    """So many elements (scalars.py) at this address, as float32."""
    if element == types.float32:
        return load(b, place, vector(_F32, lanes))
    if element == types.int16:
        return b.fpext(load(b, place, vector(ir.HalfType(), lanes)), vector(_F32, lanes))
    bits = b.zext(load(b, place, vector(_I16, lanes)), vector(_I32, lanes))
    return b.bitcast(b.shl(bits, constant(_I32, lanes, 16)), vector(_F32, lanes))


def _bytes(element: Any) -> int:
    return 4 if element == types.float32 else 2


@intrinsic(prefer_literal=True)
def multiply_elements(
    typing_context,
    rows,
    x,
    x_stride,
    x_like,
    w,
    w_stride,
    w_step,
    w_like,
    inputs,
    strips,
    y,
    y_stride,
    adds,
):
    """y [rows, strips x 16] float32 from elements x and w, or, where it `adds`, that and y. At most
    MOST_ROWS rows, and an even number of strips. A weight's 16 elements for one input lie side by
    side, those for the next w_step bytes on, and the next strip's w_stride bytes on. Strides are in
    bytes.
    """
    lanes, does_add = (_OUTPUTS if _has_avx512() else _HALF_OUTPUTS), adds.literal_value
    real, every = vector(_F32, lanes), constant(_I32, lanes, 0)

    def multiply(b, num_rows, num_strips, x_rows, w_strips, w_step, inputs, y_rows):
        parts = [(strip, i) for strip in range(num_strips) for i in range(0, _OUTPUTS, lanes)]
        targets = [moved(b, own, strip * 64 + 4 * i) for own in y_rows for strip, i in parts]

        def turn(number, sums):
            x_offset, w_offset = b.mul(number, _I64(_bytes(x_like))), b.mul(number, w_step)
            sums = list(sums)

            def value(row):
                one = _widened(b, b.add(x_rows[row], x_offset), x_like, 1)
                return b.shuffle_vector(one, one, every)

            def weights(part):
                strip, i = parts[part]
                place = moved(b, b.add(w_strips[strip], w_offset), i * _bytes(w_like))
                return _widened(b, place, w_like, lanes)

            # The fewer are held, and the others come one after the other.
            outer, inner = (value, weights) if num_rows > len(parts) else (weights, value)
            counts = sorted([num_rows, len(parts)])
            held = [inner(j) for j in range(counts[0])]
            for i in range(counts[1]):
                this = outer(i)
                for j, other in enumerate(held):
                    row, part = (i, j) if outer is value else (j, i)
                    n = row * len(parts) + part
                    sums[n] = fused(b, this, other, sums[n])
            return sums

        starts = [
            load(b, place, real) if does_add else ir.Constant(real, None) for place in targets
        ]
        for place, value in zip(targets, repeat(b, inputs, starts, turn), strict=True):
            store(b, place, value)

    def make(
        b, rows, x, x_stride, x_one, w, w_stride, w_step, w_one, inputs, strips, y, y_stride, adds
    ):
        def case(num_rows):
            num_strips = 2 if _has_avx512() or num_rows * 2 <= MOST_ROWS else 1
            x_rows = places(b, x, x_stride, num_rows)

            def some(number, none):
                strip = b.mul(number, _I64(num_strips))
                w_strips = places(b, b.add(w, b.mul(strip, w_stride)), w_stride, num_strips)
                y_rows = places(b, b.add(y, b.mul(strip, _I64(64))), y_stride, num_rows)
                multiply(b, num_rows, num_strips, x_rows, w_strips, w_step, inputs, y_rows)
                return none

            repeat(b, b.sdiv(strips, _I64(num_strips)), [], some)

        by_rows(b, rows, range(1, MOST_ROWS + 1), case)

    numbers = [_PLACE] * 4
    kinds = [*numbers[:3], x_like, *numbers[:3], w_like, *numbers, adds]
    return emit(types.void(*kinds), make)


@intrinsic
def multiply_bfloat16(typing_context, rows, x, x_stride, w, w_stride, strips, pairs, y, y_stride):
    """y [rows, strips x 16] float32 from x float32 and `strips` times 16 outputs of a packed weight
    (tiles.pack), w_stride bytes apart; 2 x pairs inputs. At most most_wide_rows() rows, and an even
    number of strips. Strides are in bytes.

    A bfloat16 is the high half of a float32, and of two inputs that lie together one is there.
    """
    real, whole = vector(_F32, _OUTPUTS), vector(_I32, _OUTPUTS)

    def multiply(b, x_rows, w_strips, pairs, y_rows):
        num_strips = len(w_strips)

        def turn(number, sums):
            offset, w_offset = b.mul(number, _I64(8)), b.mul(number, _I64(64))
            sums = list(sums)

            def value(row, i):
                return spread(b, moved(b, b.add(x_rows[row], offset), 4 * i), _F32, _OUTPUTS)

            def weights(strip, i):
                both = load(b, b.add(w_strips[strip], w_offset), whole)
                if i:
                    bits = b.and_(both, constant(_I32, _OUTPUTS, 0xFFFF0000))
                else:
                    bits = b.shl(both, constant(_I32, _OUTPUTS, 16))
                return b.bitcast(bits, real)

            # The fewer are held, and the others come one after the other.
            if len(x_rows) < num_strips:
                held = [[value(row, i) for row in range(len(x_rows))] for i in range(2)]
                for strip in range(num_strips):
                    for i in range(2):
                        this = weights(strip, i)
                        for row, other in enumerate(held[i]):
                            n = row * num_strips + strip
                            sums[n] = fused(b, other, this, sums[n])
            else:
                for i in range(2):
                    held = [weights(strip, i) for strip in range(num_strips)]
                    for row in range(len(x_rows)):
                        this = value(row, i)
                        for strip, other in enumerate(held):
                            n = row * num_strips + strip
                            sums[n] = fused(b, this, other, sums[n])
            return sums

        zeros = [ir.Constant(real, None)] * (len(x_rows) * num_strips)
        sums = repeat(b, pairs, zeros, turn)
        for row, own in enumerate(y_rows):
            for strip in range(num_strips):
                store(b, moved(b, own, strip * 64), sums[row * num_strips + strip])

    def make(b, rows, x, x_stride, w, w_stride, strips, pairs, y, y_stride):
        def case(num_rows):
            x_rows, done = places(b, x, x_stride, num_rows), _I64(0)
            for together in _wide_strips(num_rows):

                def some(number, none, together=together, done=done):
                    strip = b.add(done, b.mul(number, _I64(together)))
                    w_strips = places(b, b.add(w, b.mul(strip, w_stride)), w_stride, together)
                    y_rows = places(b, b.add(y, b.mul(strip, _I64(64))), y_stride, num_rows)
                    multiply(b, x_rows, w_strips, pairs, y_rows)
                    return none

                turns = b.sdiv(b.sub(strips, done), _I64(together))
                with b.if_then(b.icmp_signed(">", turns, _I64(0))):
                    repeat(b, turns, [], some)
                done = b.add(done, b.mul(turns, _I64(together)))

        by_rows(b, rows, range(1, most_wide_rows() + 1), case)

    return emit(types.void(*[_PLACE] * 9), make)


@intrinsic
def multiply_bytes(typing_context, rows, x, x_stride, w, w_stride, fours, out):
    """out [rows, 2, 16] int32 from signed bytes x and twice 16 outputs of a weight of unsigned
    bytes [fours, 16, 4], w_stride bytes apart. An even number of rows, at most MOST_BYTE_ROWS.
    """
    whole = vector(_I32, _OUTPUTS)

    def make(b, rows, x, x_stride, w, w_stride, fours, out):
        strips = places(b, w, w_stride, 2)

        def case(num_rows):
            x_rows = places(b, x, x_stride, num_rows)

            def turn(number, sums):
                x_offset, w_offset = b.mul(number, _I64(4)), b.mul(number, _I64(64))
                weights = [load(b, b.add(place, w_offset), whole) for place in strips]
                sums = list(sums)
                for row, own in enumerate(x_rows):
                    four = spread(b, b.add(own, x_offset), _I32, _OUTPUTS)
                    for strip, this in enumerate(weights):
                        n = 2 * row + strip
                        name = "llvm.x86.avx512.vpdpbusd.512"
                        sums[n] = call(b, name, whole, sums[n], this, four)
                return sums

            zeros = [ir.Constant(whole, None)] * (2 * num_rows)
            for n, value in enumerate(repeat(b, fours, zeros, turn)):
                store(b, moved(b, out, n * 64), value)

        by_rows(b, rows, range(2, MOST_BYTE_ROWS + 1, 2), case)

    return emit(types.void(*[_PLACE] * 7), make)


@intrinsic(prefer_literal=True)
def multiply_words(typing_context, rows, strips, x, x_stride, w, w_stride, pairs, out):
    """out [rows, strips, 16] int32 from x int16 and `strips` times 16 outputs of a weight of signed
    bytes [pairs, 16, 2], w_stride bytes apart.
    """
    num_rows, num_strips = rows.literal_value, strips.literal_value
    lanes, words = 2 * _HALF_OUTPUTS, vector(_I16, 2 * _HALF_OUTPUTS)
    whole = vector(_I32, _HALF_OUTPUTS)

    def make(b, rows, strips, x, x_stride, w, w_stride, pairs, out):
        x_rows, w_strips = places(b, x, x_stride, num_rows), places(b, w, w_stride, num_strips)

        def turn(number, sums):
            sums = list(sums)
            x_offset, w_offset = b.mul(number, _I64(4)), b.mul(number, _I64(32))
            for strip, place in enumerate(w_strips):
                parts = []
                for half in range(2):
                    there = moved(b, b.add(place, w_offset), half * 16)
                    parts.append(b.sext(load(b, there, vector(_I8, lanes)), words))
                for row, own in enumerate(x_rows):
                    pair = spread(b, b.add(own, x_offset), _I32, _HALF_OUTPUTS)
                    pair = b.bitcast(pair, words)
                    for half, weights in enumerate(parts):
                        n = (row * num_strips + strip) * 2 + half
                        product = call(b, "llvm.x86.avx2.pmadd.wd", whole, weights, pair)
                        sums[n] = b.add(sums[n], product)
            return sums

        zeros = [ir.Constant(whole, None)] * (num_rows * num_strips * 2)
        for n, value in enumerate(repeat(b, pairs, zeros, turn)):
            store(b, moved(b, out, n * 32), value)

    return emit(types.void(rows, strips, *[_PLACE] * 6), make)


class _Halves:
    """How halves of bytes are multiplied, for some strips of 16 outputs together.

    sum: of a vector of fours of unsigned bytes by signed ones, added to what there is.
    finish: such a sum as int32.
    """

    strips = 1
    lanes = _HALF_OUTPUTS

    def __init__(self, b: ir.IRBuilder) -> None:
        self.b = b
        self.whole, self.real = vector(_I32, self.lanes), vector(_F32, self.lanes)
        self.small, self.words = vector(_I8, 4 * self.lanes), vector(_I16, 2 * self.lanes)
        self.parts = [(s, i) for s in range(self.strips) for i in range(0, _OUTPUTS, self.lanes)]

    def unpack(self, strips: list[ir.Value]) -> list[list[ir.Value]]:
        """Of 64 bytes of each strip: inputs 8i .. 8i + 3, then the next four, for all parts."""
        b, low = self.b, constant(_I8, 4 * self.lanes, 15)
        both = [load(b, moved(b, strips[strip], 4 * i), self.small) for strip, i in self.parts]
        four = constant(_I16, 2 * self.lanes, 4)
        shifted = [b.bitcast(b.lshr(b.bitcast(v, self.words), four), self.small) for v in both]
        return [[b.and_(value, low) for value in values] for values in (both, shifted)]

    def sum(self, known: ir.Value | None, weights: ir.Value, four: ir.Value) -> ir.Value:
        four = self.b.bitcast(four, self.small)
        product = call(self.b, "llvm.x86.avx2.pmadd.ub.sw", self.words, weights, four)
        return self.b.add(known, product) if known else product

    def finish(self, total: ir.Value) -> ir.Value:
        ones = constant(_I16, 2 * self.lanes, 1)
        return call(self.b, "llvm.x86.avx2.pmadd.wd", self.whole, total, ones)


class _HalvesOf512(_Halves):
    strips = 2
    lanes = _OUTPUTS

    def sum(self, known: ir.Value | None, weights: ir.Value, four: ir.Value) -> ir.Value:
        known, weights = known or ir.Constant(self.whole, None), self.b.bitcast(weights, self.whole)
        return call(self.b, "llvm.x86.avx512.vpdpbusd.512", self.whole, known, weights, four)

    def finish(self, total: ir.Value) -> ir.Value:
        return total


def _halves_intrinsic(how: type[_Halves]) -> Any:
    def make(b, rows, out, x, x_stride, scales, totals, stride, w, w_stride, groups, g_stride, num):
        halves = how(b)
        real, parts, lanes = halves.real, halves.parts, halves.lanes
        w_strips = places(b, w, w_stride, halves.strips)
        group_strips = places(b, groups, g_stride, halves.strips)

        def case(num_rows):
            x_rows, scale_rows, total_rows = (
                places(b, place, step, num_rows)
                for place, step in ((x, x_stride), (scales, stride), (totals, stride))
            )

            def turn(number, results):
                results, sums = list(results), {}
                x_offset, offset = b.mul(number, _I64(32)), b.mul(number, _I64(4))
                w_offset, g_offset = b.mul(number, _I64(256)), b.mul(number, _I64(64))
                for i in range(4):
                    here = [moved(b, b.add(place, w_offset), 64 * i) for place in w_strips]
                    for j, weights in enumerate(halves.unpack(here)):
                        for row, own in enumerate(x_rows):
                            there = moved(b, b.add(own, x_offset), 8 * i + 4 * j)
                            four = spread(b, there, _I32, lanes)
                            for part, this in enumerate(weights):
                                known = sums.get((row, part))
                                sums[row, part] = halves.sum(known, this, four)
                for part, (strip, first) in enumerate(parts):
                    own = moved(b, b.add(group_strips[strip], g_offset), 2 * first)
                    steps, bases = (
                        b.fpext(load(b, moved(b, own, 32 * i), vector(ir.HalfType(), lanes)), real)
                        for i in range(2)
                    )
                    for row in range(num_rows):
                        n = row * len(parts) + part
                        total = b.sitofp(halves.finish(sums[row, part]), real)
                        scale = spread(b, b.add(scale_rows[row], offset), _F32, lanes)
                        results[n] = fused(b, b.fmul(total, scale), steps, results[n])
                        x_total = spread(b, b.add(total_rows[row], offset), _F32, lanes)
                        results[n] = fused(b, x_total, bases, results[n])
                return results

            zeros = [ir.Constant(real, None)] * (num_rows * len(parts))
            for n, value in enumerate(repeat(b, num, zeros, turn)):
                store(b, moved(b, out, n * 4 * lanes), value)

        by_rows(b, rows, range(1, MOST_HALVES_ROWS + 1), case)

    @intrinsic
    def multiply(
        typing_context,
        rows,
        out,
        x,
        x_stride,
        scales,
        totals,
        stride,
        w,
        w_stride,
        groups,
        groups_stride,
        num_groups,
    ):
        """out [rows, strips, 16] float32: the groups' sums of int4_linear.py, added up by the same
        steps as there. x int8, x_stride bytes a row; scales and totals of its groups, `stride`
        bytes a row; w and groups of strips of 16 outputs. At most MOST_HALVES_ROWS rows.
        """
        return emit(types.void(*[_PLACE] * 12), make)

    return multiply


multiply_halves = _halves_intrinsic(_Halves)
multiply_halves_512 = _halves_intrinsic(_HalvesOf512)
