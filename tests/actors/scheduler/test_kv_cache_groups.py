"""Groups of layers that share one pool: what windows give back, what is found of them, and room."""

import pytest

from ringcast.actors.scheduler.kv_cache import KVCache
from ringcast.actors.scheduler.request import Request
from ringcast.mq import codec, messages
from ringcast.mq.kv_groups import spec_of
from ringcast.mq.sampling_params import SamplingParams

SIZE = 2
FULL, SLIDING = 0, 1  # groups of HYBRID
HYBRID = [0, 5]


def make_cache(windows, num_blocks, chunk=4, caching=True):
    kv = KVCache(SIZE, caching, longest_chunk=chunk)
    kv.open(num_blocks, [spec_of(window) for window in windows])
    return kv


def sequences(prompt, n=1):
    params = SamplingParams(n=n, seed=0)
    output = messages.OutputSpec(0)
    message = messages.AddRequest("r", 0, codec.pack(prompt), params, output, 0.0)
    request = Request(message, range(n), [2], 512)
    for sequence in request.open.values():
        sequence.tokens = sequence.tokens.copy()
    return list(request.open.values())


def compute(kv, sequence, end, chunk=4, register=True):
    """In chunks, up to token `end`; their outputs come back at once, or never."""
    while sequence.num_computed < end:
        target = min(sequence.num_computed + chunk, end)
        sequence.tokens += range(len(sequence.tokens), target)
        if kv.grow(sequence, target) < 0:
            return False
        sequence.num_computed = target
        if register and target >= sequence.cache_at:
            kv.register(sequence, target)
        kv.check([sequence])
    return True


def of_group(kv, sequence, g):
    return sequence.block_ids[g :: kv._num_groups]


def test_a_window_gives_back_what_it_does_not_reach():
    kv = make_cache(HYBRID, 100)
    (sequence,) = sequences(range(9))
    assert kv.admit(sequence)
    assert compute(kv, sequence, 40)
    assert 0 not in of_group(kv, sequence, FULL)
    # The chunk 36 .. 39 saw from 32 on, when it took its blocks.
    assert [block > 0 for block in of_group(kv, sequence, SLIDING)] == [False] * 16 + [True] * 4
    assert kv.pool.num_usable - kv.pool.num_free == 20 + 4
    kv.release(sequence)
    kv.check([])


def test_what_is_not_registered_yet_is_kept_as_long_as_there_is_room():
    kv = make_cache(HYBRID, 100)
    (sequence,) = sequences(range(40))
    assert kv.admit(sequence)
    assert compute(kv, sequence, 36, register=False)
    assert 0 not in sequence.block_ids
    kv.register(sequence, 20)
    assert compute(kv, sequence, 40, register=False)
    assert [b > 0 for b in of_group(kv, sequence, SLIDING)] == [False] * 10 + [True] * 10


def test_without_room_it_goes_at_once():
    kv = make_cache(HYBRID, 1 + 20 + 5)
    assert kv.num_slots == 40
    (sequence,) = sequences(range(40))
    assert kv.admit(sequence)
    assert compute(kv, sequence, 40, register=False)


@pytest.mark.parametrize("windows", [[0, 5], [5, 5, 0], [3], [2, 9]])
def test_the_longest_sequence_fits_alone(windows):
    for num_blocks in range(12, 40):
        kv = make_cache(windows, num_blocks)
        length = min(kv.num_slots, 60)
        if not length:
            continue
        (sequence,) = sequences(range(length))
        for _ in range(2):  # the second time with what is left of the first in the cache
            assert kv.admit(sequence)
            assert compute(kv, sequence, length)
            kv.release(sequence)


def test_a_prefix_needs_only_its_last_window():
    kv = make_cache(HYBRID, 30)
    (first,) = sequences(range(21))
    assert kv.admit(first)
    assert compute(kv, first, 21)
    gone = kv.pool.num_free
    kv.release(first)
    (other,) = sequences(range(100, 100 + gone // 2))
    assert kv.admit(other)
    assert compute(kv, other, gone // 2)  # takes the early blocks of the window first
    (again,) = sequences(range(21))
    assert kv.admit(again)
    assert again.num_computed == 20
    assert [block > 0 for block in of_group(kv, again, SLIDING)] == [False] * 8 + [True] * 2
    kv.check([other, again])


def test_a_hole_in_the_window_is_a_shorter_hit():
    kv = make_cache(HYBRID, 100)
    (first,) = sequences(range(30))
    assert kv.admit(first)
    assert kv.grow(first, 30) > 0
    first.num_computed = 30
    kv.register(first, 30)
    for hole, found in ((14, 28), (13, 26), (12, 24), (7, 24)):
        block = of_group(kv, first, SLIDING)[hole]
        content = kv.pool._hashes[block]
        if content is not None:
            del kv.pool._blocks[content]
            kv.pool._hashes[block] = None
        (again,) = sequences(range(30))
        assert kv.admit(again)
        assert again.num_computed == found
        kv.release(again)


def test_a_fork_gets_what_its_token_sees():
    kv = make_cache(HYBRID, 100)
    source, fork = sequences(range(20), n=2)
    assert kv.admit(source)
    assert compute(kv, source, 20)
    source.tokens.append(20)
    assert compute(kv, source, 21)  # ahead of its output: its choices are still held
    assert kv.fork(source, fork)
    assert fork.num_computed == 19
    assert [block > 0 for block in of_group(kv, fork, SLIDING)] == [False] * 7 + [True] * 3
    assert len(fork.copy_sources) == 2
    assert not set(fork.copy_sources) & set(fork.block_ids)
    kv.check([source, fork])
    kv.copied(fork)
    kv.release(source)
    kv.check([fork])


def test_a_fork_of_a_source_without_its_window_computes_for_itself():
    kv = make_cache([3], 7)
    source, fork = sequences(range(9), n=2)
    assert kv.admit(source)
    assert compute(kv, source, 19)
    assert kv.pool.num_free == 3
    assert not kv.fork(source, fork)
    kv.check([source])
    kv.release(source)
    assert kv.admit(fork)
    assert compute(kv, fork, 9)


def test_idle_hits_of_a_window_do_not_count_twice():
    """Else nobody would run, and it would wait for ever."""
    kv = make_cache([9], 1 + 7)  # (9 - 1 + 4) / 2 + 1
    (sequence,) = sequences(range(40))
    assert kv.admit(sequence)
    assert compute(kv, sequence, 24)
    kv.release(sequence)
    assert kv.admit(sequence)
    assert sequence.num_computed == 24
    assert compute(kv, sequence, 40)


def test_one_pool_serves_all_groups():
    kv = make_cache([0, 0], 9)
    first, second = sequences([1, 1, 1]), sequences([1, 1, 2])
    assert kv.admit(first[0])
    assert compute(kv, first[0], 3)
    assert kv.admit(second[0])
    assert second[0].num_computed == 2
    shared = second[0].block_ids[:2]
    assert shared == first[0].block_ids[:2]
    assert shared[0] != shared[1], "one content, but two groups"
