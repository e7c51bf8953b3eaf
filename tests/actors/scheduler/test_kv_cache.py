"""Which blocks sequences get, share, copy and give back."""

import pytest

from ringcast.actors.scheduler.kv_cache import KVCache
from ringcast.actors.scheduler.request import Request
from ringcast.mq import codec, messages
from ringcast.mq.sampling_params import SamplingParams


@pytest.fixture
def kv():
    cache = KVCache(block_size=4, caching=True)
    cache.open(12)
    return cache


def sequences(prompt, n=1, salt=""):
    message = messages.AddRequest(
        "r",
        0,
        codec.pack(prompt),
        SamplingParams(n=n, seed=0),
        messages.OutputSpec(0),
        0.0,
        salt,
    )
    request = Request(message, range(n), [2], 512)
    for sequence in request.open.values():
        sequence.tokens = sequence.tokens.copy()
    return list(request.open.values())


def compute(kv, sequence):
    """What planner and core do for a whole prompt."""
    assert kv.admit(sequence)
    cached = sequence.num_computed
    assert kv.grow(sequence, len(sequence.tokens)) >= 0
    sequence.num_computed = len(sequence.tokens)
    kv.register(sequence, sequence.num_computed)
    return cached


def test_nothing_fits_before_the_workers_are_ready():
    cache = KVCache(block_size=4, caching=True)
    (sequence,) = sequences(range(1))
    assert not cache.admit(sequence)
    assert cache.grow(sequence, 1) == -1
    assert cache.usage == 0.0


@pytest.mark.parametrize(
    ("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_a_hit_leaves_a_token_to_compute(kv, length, cached):
    (first,) = sequences(range(length))
    (second,) = sequences(range(length))
    assert compute(kv, first) == 0
    assert compute(kv, second) == cached
    assert second.block_ids[: cached // 4] == first.block_ids[: cached // 4]
    assert not set(second.block_ids[cached // 4 :]) & set(first.block_ids)
    kv.check([first, second])


def test_blocks_outlive_their_sequence_until_they_are_needed(kv):
    (first,) = sequences(range(9))
    compute(kv, first)
    blocks = first.block_ids
    kv.release(first)
    assert kv.usage == 0.0
    (again,) = sequences(range(9))
    assert compute(kv, again) == 8
    assert again.block_ids[:2] == blocks[:2]
    kv.release(again)
    (other,) = sequences(range(100, 140))
    compute(kv, other)  # 10 of 11 blocks: the tail of the cached prefix goes, its head stays
    kv.release(other)
    (once_more,) = sequences(range(9))
    assert compute(kv, once_more) == 4
    kv.check([once_more])


def test_only_computed_blocks_are_found(kv):
    (first,) = sequences(range(9))
    assert kv.admit(first)
    kv.grow(first, 9)
    kv.register(first, 7)
    (second,) = sequences(range(9))
    assert compute(kv, second) == 4


def test_salt_separates(kv):
    (first,) = sequences(range(9), salt="mine")
    (second,) = sequences(range(9), salt="yours")
    compute(kv, first)
    assert compute(kv, second) == 0
    (third,) = sequences(range(9), salt="mine")
    assert compute(kv, third) == 8


def count_digests(kv):
    """A list that grows by one for each block that is hashed."""
    digest, counted = kv._hasher.digest, []

    def counting(data):
        counted.append(data)
        return digest(data)

    kv._hasher.digest = counting
    return counted


def test_a_prompt_is_hashed_once_for_all_choices_and_attempts(kv):
    counted = count_digests(kv)
    (other,) = sequences(range(100, 130))
    compute(kv, other)
    before = len(counted)
    choices = sequences(range(19), n=3)
    for _ in range(50):  # it waits at the head of the queue
        assert not kv.admit(choices[0])
    assert len(counted) - before == 4
    kv.release(other)
    for sequence in choices:  # as resumed choices do, and forks that find no block
        compute(kv, sequence)
        kv.release(sequence)
    assert len(counted) - before == 4


def test_output_is_hashed_once_however_often_it_is_preempted(kv):
    counted = count_digests(kv)
    (sequence,) = sequences(range(6))
    compute(kv, sequence)
    for token in range(50, 61):
        sequence.tokens.append(token)
        assert kv.grow(sequence, len(sequence.tokens)) >= 0
        kv.register(sequence, len(sequence.tokens))
    assert len(counted) == 17 // 4
    for _ in range(3):
        kv.release(sequence)
        assert compute(kv, sequence) == 16
    assert len(counted) == 17 // 4


def test_a_reset_forgets_what_is_idle_and_what_is_held(kv):
    (idle,) = sequences(range(9))
    (held,) = sequences(range(100, 109))
    compute(kv, idle)
    kv.release(idle)
    compute(kv, held)
    kv.reset([held])
    for prompt in (range(9), range(100, 109)):
        (again,) = sequences(prompt)
        assert compute(kv, again) == 0
        kv.release(again)
        assert compute(kv, again) == 8  # what was computed after it is found
        kv.release(again)
    kv.check([held])


def test_what_rests_on_blocks_from_before_a_reset_is_not_found(kv):
    source, fork = sequences(range(9), n=2)
    compute(kv, source)
    kv.reset([source, fork])
    assert kv.fork(source, fork)
    kv.copied(fork)
    for sequence in (source, fork):
        sequence.tokens += range(20, 24)
        kv.grow(sequence, 13)
        sequence.num_computed = 13
        assert sequence.num_computed < sequence.cache_at
    (other,) = sequences(range(9))
    compute(kv, other)  # names the first two blocks anew: the third must not follow from them
    (again,) = sequences([*range(9), *range(20, 24)])
    assert kv.admit(again)
    assert again.num_computed == 8
    kv.release(source)
    compute(kv, source)  # from the beginning, so it counts again
    (last,) = sequences([*range(9), *range(20, 24)])
    assert kv.admit(last)
    assert last.num_computed == 12


def test_without_caching_nothing_is_hashed():
    kv = KVCache(block_size=4, caching=False)
    kv.open(12)
    (first,) = sequences(range(9))
    assert kv.admit(first)
    kv.grow(first, 9)
    assert first.cache_at > 1 << 60
    kv.release(first)
    (second,) = sequences(range(9))
    assert kv.admit(second)
    assert second.num_computed == 0
    assert second.hashes == []


def test_a_sequence_enters_only_if_all_of_it_fits(kv):
    (first,) = sequences(range(30))
    (second,) = sequences(range(100, 113))
    compute(kv, first)  # 8 of 11 blocks
    assert not kv.admit(second)  # it needs 4
    assert second.block_ids == []
    kv.check([first])


def test_a_cached_block_that_is_idle_counts_as_needed(kv):
    (first,) = sequences(range(9))
    compute(kv, first)
    kv.release(first)
    (other,) = sequences(range(100, 133))
    compute(kv, other)  # 9 of 11 blocks: of the two left, one is the head of the first's prefix
    (again,) = sequences(range(9))
    assert not kv.admit(again)
    kv.check([other])


@pytest.mark.parametrize(
    ("length", "num_shared", "copies"), [(1, 0, 0), (2, 0, 1), (4, 0, 1), (5, 1, 0), (8, 1, 1)]
)
def test_a_fork_shares_full_blocks_and_copies_the_last(kv, length, num_shared, copies):
    source, fork = sequences(range(length), n=2)
    compute(kv, source)
    assert kv.fork(source, fork)
    assert fork.block_ids[:num_shared] == source.block_ids[:num_shared]
    assert fork.block_ids[-1] not in source.block_ids
    assert len(fork.block_ids) == num_shared + 1
    assert fork.num_computed == length - 1
    assert fork.copy_sources == ([source.block_ids[num_shared]] if copies else [])
    kv.check([source, fork])
    kv.release(source)  # the source's end leaves the fork what it needs
    kv.check([fork])
    kv.copied(fork)
    kv.check([fork])
    kv.release(fork)
    kv.check([])


def test_a_fork_without_a_free_block_gets_nothing(kv):
    source, fork = sequences(range(44), n=2)
    compute(kv, source)
    assert not kv.fork(source, fork)
    kv.check([source])


def test_a_fork_that_gives_up_before_its_copy_gives_all_back(kv):
    source, fork = sequences(range(7), n=2)
    compute(kv, source)
    kv.fork(source, fork)
    kv.release(fork)
    assert fork.copy_sources == []
    kv.check([source])
