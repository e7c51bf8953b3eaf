"""Names of blocks: equal exactly where everything up to the block's end is equal."""

import hashlib
import random
import sys
import types

import pytest

from ringcast.actors.scheduler.block_hash import BlockHasher
from ringcast.mq import codec
from ringcast.mq.errors import ConfigError

ALGORITHMS = ["blake2b", "sha256", "xxh3_128"]


def stand_in(data):
    """For xxhash, which need not be installed."""
    return hashlib.md5(data, usedforsecurity=False).digest()


@pytest.fixture(autouse=True)
def _xxhash(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", types.SimpleNamespace(xxh3_128_digest=stand_in))


def hashes_of(tokens, block_size=4, salt=b"", algorithm="blake2b"):
    hashes = []
    BlockHasher(algorithm, block_size).extend(hashes, tokens, len(tokens) // block_size, salt)
    return hashes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_full_blocks_have_names(algorithm):
    counts = [len(hashes_of(range(n), algorithm=algorithm)) for n in (3, 4, 7, 8)]
    assert counts == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("algorithm", "digest", "size"),
    [
        ("blake2b", lambda data: hashlib.blake2b(data, digest_size=16).digest(), 16),
        ("sha256", lambda data: hashlib.sha256(data).digest(), 32),
        ("xxh3_128", stand_in, 16),
    ],
)
def test_the_chain_is_what_it_says(algorithm, digest, size):
    first = digest(bytes(size) + codec.pack([0, 1, 2, 3]) + b"salt")
    second = digest(first + codec.pack([4, 5, 6, 7]))
    assert hashes_of(range(8), salt=b"salt", algorithm=algorithm) == [first, second]


def test_xxhash_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match=r"xxh3_128' needs the package xxhash: .* blake2b"):
        BlockHasher("xxh3_128", 4)
    BlockHasher("blake2b", 4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_names_part_where_tokens_part_and_never_meet_again(algorithm):
    tokens = list(range(40))
    for place in range(40):
        other = tokens.copy()
        other[place] += 1000
        pairs = zip(
            hashes_of(tokens, algorithm=algorithm),
            hashes_of(other, algorithm=algorithm),
            strict=True,
        )
        assert [a == b for a, b in pairs] == [block < place // 4 for block in range(10)]


def test_equal_blocks_behind_different_prefixes_have_different_names():
    assert len(set(hashes_of([7] * 400))) == 100


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_salts_separate_all_blocks(algorithm):
    for block in range(3):
        names = {
            hashes_of(range(12), salt=salt, algorithm=algorithm)[block]
            for salt in (b"", b"a", b"b", b"ab")
        }
        assert len(names) == 4


def test_a_longer_list_goes_on_where_the_shorter_ended():
    rng = random.Random(1)
    tokens = [rng.randrange(1 << 31) for _ in range(50)]
    hashes, seen = [], []
    for num_blocks in (1, 1, 4, 12):
        BlockHasher("blake2b", 4).extend(hashes, tokens[: num_blocks * 4], num_blocks, b"")
        assert hashes[: len(seen)] == seen
        seen = hashes.copy()
    assert hashes == hashes_of(tokens)
