"""The block pool against a plain model of it: a list in eviction order, and two dicts."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ringcast.actors.scheduler.block_pool import NULL_BLOCK, BlockPool


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.free = list(range(1, num_blocks))
        self.references = {}
        self.hashes = {}

    @precondition(lambda self: self.free)
    @rule()
    def take(self):
        block = self.free.pop(0)
        self.hashes.pop(block, None)
        self.references[block] = 1
        assert self.pool.take() == block

    @precondition(lambda self: self.references or self.hashes)
    @rule(data=st.data())
    def share(self, data):
        block = data.draw(st.sampled_from(sorted({*self.references, *self.hashes})))
        if block in self.free:
            self.free.remove(block)
        self.references[block] = self.references.get(block, 0) + 1
        self.pool.share(block)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data):
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.references[block] -= 1
        if not self.references[block]:
            del self.references[block]
            self.free.insert(len(self.free) if block in self.hashes else 0, block)
        self.pool.release(block)

    @precondition(lambda self: self.references.keys() - self.hashes.keys())
    @rule(data=st.data(), content=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def register(self, data, content):
        block = data.draw(st.sampled_from(sorted(self.references.keys() - self.hashes.keys())))
        if content not in self.hashes.values():
            self.hashes[block] = content
        self.pool.register(block, content)

    @rule()
    def forget(self):
        self.hashes.clear()
        self.pool.forget()

    @invariant()
    def agrees(self):
        self.pool.check(self.references)
        assert list(self.pool.free_blocks()) == self.free
        assert self.pool.num_free == len(self.free)
        for block in range(1, self.pool.num_blocks):
            assert self.pool.references(block) == self.references.get(block, 0)
        by_hash = {content: block for block, content in self.hashes.items()}
        for content in (b"a", b"b", b"c", b"d"):
            assert self.pool.lookup(content) == by_hash.get(content, NULL_BLOCK)


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestPool = PoolMachine.TestCase


def test_the_null_block_is_never_given_out():
    pool = BlockPool(4)
    assert sorted(pool.take() for _ in range(3)) == [1, 2, 3]
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="no free block"):
        pool.take()


def test_releasing_tail_first_keeps_the_longest_prefix():
    pool = BlockPool(6)
    blocks = [pool.take() for _ in range(4)]
    for i, block in enumerate(blocks):
        pool.register(block, bytes([i]))
    for block in reversed(blocks):
        pool.release(block)
    taken = [pool.take() for _ in range(3)]
    assert taken[0] not in blocks  # what holds nothing goes first
    assert taken[1:] == [blocks[3], blocks[2]]
    assert [pool.lookup(bytes([i])) for i in range(4)] == [blocks[0], blocks[1], 0, 0]


def test_what_is_forgotten_is_free_and_can_be_registered_again():
    pool = BlockPool(4)
    held, idle = pool.take(), pool.take()
    pool.register(held, b"a")
    pool.register(idle, b"b")
    pool.release(idle)
    pool.forget()
    assert pool.lookup(b"a") == pool.lookup(b"b") == NULL_BLOCK
    assert (pool.references(held), pool.num_free) == (1, 2)
    pool.register(held, b"a")
    assert pool.lookup(b"a") == held
    pool.check({held: 1})


def test_misuse_is_noticed():
    pool = BlockPool(3)
    block = pool.take()
    pool.release(block)
    with pytest.raises(AssertionError, match="released too often"):
        pool.release(block)
    with pytest.raises(AssertionError, match="holds nothing to share"):
        pool.share(block)


def test_check_finds_a_leak():
    pool = BlockPool(3)
    block = pool.take()
    with pytest.raises(AssertionError, match=f"block {block} has 1 references"):
        pool.check({})
