"""Names of blocks: equal exactly where everything up to the block's end is equal."""

import random

from ringcast.actors.scheduler.block_hash import HASH_BYTES, ROOT, block_hash, extend
from ringcast.mq import codec


def hashes_of(tokens, block_size=4, salt=b""):
    hashes = []
    extend(hashes, tokens, len(tokens) // block_size, block_size, salt)
    return hashes


def test_only_full_blocks_have_names():
    assert [len(hashes_of(range(n))) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]


def test_the_chain_is_what_it_says():
    first = block_hash(ROOT, codec.pack([0, 1, 2, 3]), b"salt")
    second = block_hash(first, codec.pack([4, 5, 6, 7]))
    assert hashes_of(range(8), salt=b"salt") == [first, second]
    assert len(first) == HASH_BYTES


def test_names_part_where_tokens_part_and_never_meet_again():
    tokens = list(range(40))
    for place in range(40):
        other = tokens.copy()
        other[place] += 1000
        same = [a == b for a, b in zip(hashes_of(tokens), hashes_of(other), strict=True)]
        assert same == [block < place // 4 for block in range(10)]


def test_equal_blocks_behind_different_prefixes_have_different_names():
    assert len(set(hashes_of([7] * 400))) == 100


def test_salts_separate_all_blocks():
    for block in range(3):
        names = {hashes_of(range(12), salt=salt)[block] for salt in (b"", b"a", b"b", b"ab")}
        assert len(names) == 4


def test_a_longer_list_goes_on_where_the_shorter_ended():
    rng = random.Random(1)
    tokens = [rng.randrange(1 << 31) for _ in range(50)]
    hashes, seen = [], []
    for num_blocks in (1, 1, 4, 12):
        extend(hashes, tokens[: num_blocks * 4], num_blocks, 4, b"")
        assert hashes[: len(seen)] == seen
        seen = hashes.copy()
    assert hashes == hashes_of(tokens)
