"""Every message that is ever said survives its way; nothing else is taken for one."""

from __future__ import annotations

import re
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from ringcast.actors.topology import EDGES
from ringcast.mq import codec, messages, supervision
from ringcast.mq.errors import CorruptRecordError
from ringcast.mq.sampling_params import SamplingParams

UNIONS = sorted({edge.messages for edge in EDGES} | {"ActorToSupervisor", "SupervisorToActor"})

SAMPLING = st.builds(
    SamplingParams,
    n=st.integers(1, 128),
    temperature=st.floats(0, 10),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 2**31 - 1),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3),
    ignore_eos=st.booleans(),
    max_tokens=st.none() | st.integers(100, 2**31 - 1),
    min_tokens=st.integers(0, 100),
    logprobs=st.none() | st.integers(0, 20),
)

SCALARS = {
    inspect.IntType: st.integers(-(2**63), 2**63 - 1),
    inspect.FloatType: st.floats(allow_nan=False),
    inspect.StrType: st.text(max_size=20),
    inspect.BytesType: st.binary(max_size=40),
    inspect.BoolType: st.booleans(),
    inspect.NoneType: st.none(),
}


def values(kind: inspect.Type) -> st.SearchStrategy:
    """Anything that a field of this type may hold."""
    if type(kind) in SCALARS:
        return SCALARS[type(kind)]
    if isinstance(kind, inspect.LiteralType):
        return st.sampled_from(kind.values)
    if isinstance(kind, inspect.UnionType):
        return st.one_of([values(one) for one in kind.types])
    if isinstance(kind, inspect.ListType):
        return st.lists(values(kind.item_type), max_size=3)
    if isinstance(kind, inspect.TupleType):
        return st.tuples(*map(values, kind.item_types))
    if isinstance(kind, inspect.VarTupleType):
        return st.lists(values(kind.item_type), max_size=3).map(tuple)
    if isinstance(kind, inspect.DictType):
        return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
    assert isinstance(kind, inspect.StructType), kind
    if kind.cls is SamplingParams:
        return SAMPLING
    return st.builds(kind.cls, **{field.name: values(field.type) for field in kind.fields})


def union_named(name: str):
    return getattr(messages, name, None) or getattr(supervision, name)


def members(union: str) -> tuple[type, ...]:
    types = union_named(union)
    return get_args(types) or (types,)


def messages_of(union: str) -> st.SearchStrategy:
    return st.one_of([values(inspect.type_info(member)) for member in members(union)])


@pytest.mark.parametrize("union", UNIONS)
def test_every_message_of_an_edge_comes_back_equal(union):
    decode = codec.Decoder(union_named(union))
    seen = set()

    @settings(max_examples=20 * len(members(union)))
    @given(messages_of(union))
    def check(message):
        came_back = decode(codec.encode(message))
        assert came_back == message
        assert type(came_back) is type(message)
        assert decode(memoryview(codec.encode(message))) == message
        seen.add(type(message))

    check()
    assert seen == set(members(union))


# Edges with one message only.
ALONE = (
    messages.Rejected,
    messages.StepPlan,
    messages.StopStream,
    messages.Chunks,
    messages.Load,
    messages.Loads,
)


def test_every_union_in_messages_is_an_edge():
    unions = {
        name
        for name, value in (vars(messages) | vars(supervision)).items()
        if re.fullmatch("[A-Z][a-z]+To[A-Z][a-z]+", name) and (get_args(value) or value in ALONE)
    }
    assert unions == set(UNIONS)


@pytest.mark.parametrize("union", UNIONS)
def test_garbage_is_an_error(union):
    decode = codec.Decoder(union_named(union))

    @settings(max_examples=60)
    @given(st.binary(max_size=64))
    def check(garbage):
        with pytest.raises(CorruptRecordError, match=f"^{len(garbage)} bytes are no message"):
            decode(garbage)

    check()


@pytest.mark.parametrize("union", UNIONS)
def test_a_message_cut_short_is_an_error(union):
    decode = codec.Decoder(union_named(union))

    @settings(max_examples=40)
    @given(messages_of(union), st.data())
    def check(message, data):
        whole = codec.encode(message)
        with pytest.raises(CorruptRecordError):
            decode(whole[: data.draw(st.integers(0, len(whole) - 1))])

    check()


def test_another_edges_message_is_an_error():
    decode = codec.Decoder(messages.SchedulerToWorker)
    with pytest.raises(CorruptRecordError, match="no message of this edge"):
        decode(codec.encode(messages.Abort("a", 1)))


def test_sampling_params_out_of_bounds_are_an_error():
    encoded = codec.encode(SamplingParams(n=2))
    spoiled = msgspec.msgpack.encode({**msgspec.msgpack.decode(encoded), "n": 0})
    with pytest.raises(CorruptRecordError, match="n must be"):
        codec.Decoder(SamplingParams)(spoiled)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_integers_come_back(numbers):
    packed = codec.pack(numbers)
    assert len(packed) == 4 * len(numbers)
    assert codec.ints(packed).tolist() == numbers
    assert codec.pack(np.array(numbers, dtype=np.int64)) == packed
    assert codec.pack(codec.ints(packed)) == packed


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
@pytest.mark.parametrize("kind", [list, np.array])
def test_integers_that_do_not_fit_are_an_error(number, kind):
    with pytest.raises(OverflowError):
        codec.pack(kind([0, number]))


def test_views_are_read_only():
    assert not codec.ints(codec.pack([1, 2])).flags.writeable
    floats = codec.floats(np.array([0.5, -2.0], dtype=np.float32).tobytes())
    assert floats.tolist() == [0.5, -2.0]
    assert not floats.flags.writeable
