"""What intrinsics are written with: vectors, loops and addresses of LLVM. Addresses are int64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import ir

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def vector(kind: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(kind, lanes)


def constant(kind: ir.Type, lanes: int, value: int) -> ir.Constant:
    return ir.Constant(vector(kind, lanes), [value] * lanes)


def moved(b: ir.IRBuilder, place: ir.Value, offset: int) -> ir.Value:
    return b.add(place, _I64(offset)) if offset else place


def load(b: ir.IRBuilder, place: ir.Value, kind: ir.Type) -> ir.Value:
    return b.load(b.inttoptr(place, kind.as_pointer()), align=1)


def store(b: ir.IRBuilder, place: ir.Value, value: ir.Value) -> None:
    b.store(value, b.inttoptr(place, value.type.as_pointer()), align=1)


def spread(b: ir.IRBuilder, place: ir.Value, kind: ir.Type, lanes: int) -> ir.Value:
    """What is at this address in every lane."""
    undefined = ir.Constant(vector(kind, lanes), ir.Undefined)
    first = b.insert_element(undefined, load(b, place, kind), _I32(0))
    return b.shuffle_vector(first, undefined, constant(_I32, lanes, 0))


def call(b: ir.IRBuilder, name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [value.type for value in values])
    function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    return b.call(function, values)


def fused(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once."""
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


def repeat(
    b: ir.IRBuilder,
    times: ir.Value,
    values: list[ir.Value],
    turn: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
) -> list[ir.Value]:
    """`values` after `times` (1 or more) turns, each of which gets its number."""
    before, again = b.block, b.append_basic_block("turn")
    after = b.append_basic_block("after")
    b.branch(again)
    b.position_at_end(again)
    number, kept = b.phi(_I64), [b.phi(value.type) for value in values]
    results = turn(number, list(kept))
    following, last = b.add(number, _I64(1)), b.block
    starts, ends = [_I64(0), *values], [following, *results]
    for phi, start, end in zip([number, *kept], starts, ends, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(end, last)
    b.cbranch(b.icmp_signed("<", following, times), again, after)
    b.position_at_end(after)
    return results


def by_rows(
    b: ir.IRBuilder, rows: ir.Value, numbers: Iterable[int], make: Callable[[int], None]
) -> None:
    """What `make` makes for the number that `rows` is."""
    after = b.append_basic_block("multiplied")
    cases = b.switch(rows, after)
    for number in numbers:
        case = b.append_basic_block(f"rows{number}")
        cases.add_case(_I64(number), case)
        b.position_at_end(case)
        make(number)
        b.branch(after)
    b.position_at_end(after)


def places(b: ir.IRBuilder, first: ir.Value, stride: ir.Value, count: int) -> list[ir.Value]:
    return [b.add(first, b.mul(stride, _I64(i))) for i in range(count)]


def emit(signature: Any, make: Callable[..., None]) -> Any:
    def generate(context, builder, signature, args):
        make(builder, *args)
        return context.get_dummy_value()

    return signature, generate
