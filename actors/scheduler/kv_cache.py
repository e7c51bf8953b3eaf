"""The KV cache's logical half: which blocks a sequence has. What is in them lies in the workers.

Token i of a sequence has its keys and values in block block_ids[i // block_size], at place i %
block_size. A full, computed block is registered under the hash of its content and of everything
before it (block_hash.py), and other sequences that begin alike share it. A shared block is never
written: sequences share only full blocks, and where one is to write into a block that another has
written (a fork, whose last prompt token lies in the middle of a block), it gets a copy.

A sequence that leaves gives all its blocks back, the tail first: what is evicted first then is the
end of the longest prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .block_hash import extend
from .block_pool import NULL_BLOCK, BlockPool
from .sequence import NEVER, Sequence


class KVCache:
    """Before `open` there is no block to give out."""

    def __init__(self, block_size: int, caching: bool) -> None:
        self.block_size = block_size
        self.caching = caching
        self.pool = BlockPool(1)

    def open(self, num_blocks: int) -> None:
        """There are so many blocks, the null block included."""
        self.pool = BlockPool(num_blocks)

    @property
    def num_slots(self) -> int:
        """How many tokens fit in all blocks."""
        return self.pool.num_usable * self.block_size

    @property
    def usage(self) -> float:
        """The share of blocks in use, from 0 to 1."""
        usable = self.pool.num_usable
        return (usable - self.pool.num_free) / usable if usable else 0.0

    def admit(self, sequence: Sequence) -> bool:
        """Give it the cached blocks that it begins with, if all its known tokens would fit now.

        At least one token is left to compute, as its next token is sampled from that one's output.
        Sets num_computed.
        """
        pool = self.pool
        if not pool.num_free:
            return False
        hits = self._cached_prefix(sequence)
        needed = -(-len(sequence.tokens) // self.block_size) - len(hits)
        idle_hits = sum(not pool.references(block) for block in hits)
        if needed + idle_hits > pool.num_free:
            return False
        for block in hits:
            pool.share(block)
        self._hold(sequence, hits)
        sequence.num_computed = sequence.capacity
        return True

    def fits_beside(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """Whether `admit` would succeed if nobody but these held blocks."""
        held = {block for other in others for block in (*other.block_ids, other.copy_source)}
        held.discard(NULL_BLOCK)
        num_shared = sum(block in held for block in self._cached_prefix(sequence))
        needed = -(-len(sequence.tokens) // self.block_size) - num_shared
        return len(held) + needed <= self.pool.num_usable

    def grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Give it blocks for so many tokens. Returns how many are new, or -1: too few are free."""
        pool, blocks = self.pool, sequence.block_ids
        missing = -(-num_tokens // self.block_size) - len(blocks)
        if missing <= 0:
            return 0
        if missing > pool.num_free:
            return -1
        blocks.extend([pool.take() for _ in range(missing)])
        sequence.capacity = len(blocks) * self.block_size
        return missing

    def fork(self, source: Sequence, fork: Sequence) -> bool:
        """Give `fork` what `source` has computed of their prompt, but for the last token.

        They share the blocks before the last prompt token's; that one is new, and to be copied from
        copy_source if it holds more tokens of the prompt. The fork holds copy_source until its
        `copied`. False if no block is free.
        """
        pool = self.pool
        if not pool.num_free:
            return False
        last = fork.num_prompt - 1
        num_shared, place = divmod(last, self.block_size)
        blocks = source.block_ids[:num_shared]
        for block in blocks:
            pool.share(block)
        if place:
            fork.copy_source = source.block_ids[num_shared]
            pool.share(fork.copy_source)
        fork.hashes = source.hashes[:num_shared]
        self._hold(fork, [*blocks, pool.take()], num_shared)
        fork.num_computed = last
        return True

    def copied(self, fork: Sequence) -> None:
        """The plan that copies copy_source is made: its next owner writes after the copy."""
        if fork.copy_source != NULL_BLOCK:
            self.pool.release(fork.copy_source)
            fork.copy_source = NULL_BLOCK

    def register(self, sequence: Sequence, num_computed: int) -> None:
        """So many of its tokens are computed: others may find the blocks that are full of them."""
        full = num_computed // self.block_size
        blocks, register = sequence.block_ids, self.pool.register
        self._hash(sequence, full)
        for i in range(sequence.num_registered, full):
            register(blocks[i], sequence.hashes[i])
        sequence.num_registered = full
        sequence.cache_at = (full + 1) * self.block_size

    def release(self, sequence: Sequence) -> None:
        """It has no blocks after this, and nothing computed."""
        self.copied(sequence)
        release = self.pool.release
        for block in reversed(sequence.block_ids):
            release(block)
        self._hold(sequence, [])
        sequence.num_computed = 0

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that these sequences hold all that is held, and that the pool is sound."""
        expected: Counter[int] = Counter()
        for sequence in sequences:
            expected.update(sequence.block_ids)
            if sequence.copy_source != NULL_BLOCK:
                expected[sequence.copy_source] += 1
            assert sequence.capacity == len(sequence.block_ids) * self.block_size
            assert sequence.num_computed <= sequence.capacity
        assert NULL_BLOCK not in expected
        self.pool.check(expected)

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        if not self.caching or sequence.owes_prompt_logprobs:
            return []
        most = (len(sequence.tokens) - 1) // self.block_size
        self._hash(sequence, most)
        hits: list[int] = []
        for content in sequence.hashes[:most]:
            block = self.pool.lookup(content)
            if block == NULL_BLOCK:
                break
            hits.append(block)
        return hits

    def _hash(self, sequence: Sequence, num_blocks: int) -> None:
        extend(sequence.hashes, sequence.tokens, num_blocks, self.block_size, sequence.request.salt)

    def _hold(
        self, sequence: Sequence, blocks: list[int], num_registered: int | None = None
    ) -> None:
        registered = len(blocks) if num_registered is None else num_registered
        sequence.block_ids = blocks
        sequence.capacity = len(blocks) * self.block_size
        sequence.num_registered = registered
        sequence.cache_at = (registered + 1) * self.block_size if self.caching else NEVER
