"""The KV cache's logical half: which blocks a sequence has. What is in them lies in the workers.

Layers come in groups that share the pool (mq/kv_groups.py). Token i of a sequence has its keys and
values of group g, of G, in block block_ids[i // block_size * G + g], at place i % block_size. A
full, computed block is registered under the hash of its content and of everything before it
(block_hash.py) and its group, and other sequences that begin alike share it. A shared block is
never written: sequences share only full blocks, and where one is to write into a block that another
has written (a fork, whose last prompt token lies in the middle of a block), it gets a copy.

A group with a sliding window needs no block that ends before the window of the next token. A
sequence gives such a block back when it takes new ones: once it is registered, or at once if too
few are free. A prefix that is found in the cache needs only the blocks of its last window.

A sequence that leaves gives all its blocks back, the tail first: what is evicted first then is the
end of the longest prefix.

A prompt is hashed once, when the first of its request's choices looks for it; a sequence goes on
from there as its output fills blocks. Neither waiting nor preemption hashes anything again.

`reset` forgets what all blocks hold. A sequence that has blocks then keeps them, and computes on;
but what it computes rests on what was computed before, so none of it is registered until it has
been preempted and begins anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Series
from itertools import zip_longest

from ...mq.kv_groups import longest_sequence, most_blocks, window_of
from ...mq.messages import FullAttentionSpec, KVSpec
from .block_hash import BlockHasher
from .block_pool import NULL_BLOCK, BlockPool
from .sequence import NEVER, Sequence


class KVCache:
    """Before `open` there is no block to give out.

    longest_chunk: tokens that one sequence computes in one step at most. Raises ConfigError if the
    hash algorithm isn't installed.
    """

    def __init__(
        self,
        block_size: int,
        caching: bool,
        hash_algorithm: str = "blake2b",
        longest_chunk: int = NEVER,
    ) -> None:
        self.block_size = block_size
        self.caching = caching
        self._chunk = longest_chunk
        self._hasher = BlockHasher(hash_algorithm, block_size)
        self.open(1)

    def open(self, num_blocks: int, groups: Series[KVSpec] = (FullAttentionSpec(),)) -> None:
        """There are so many blocks, the null block included, and these groups of layers.

        num_slots: how many tokens a sequence can have.
        """
        self.pool = BlockPool(num_blocks)
        chunk, size = self._chunk, self.block_size
        windows = [window_of(spec) for spec in groups]
        self._num_groups = len(groups)
        self._windows = [(g, window) for g, window in enumerate(windows) if window]
        self._full = [g for g, window in enumerate(windows) if not window]
        self._most = [most_blocks(spec, chunk, size) for spec in groups]
        self.num_slots = longest_sequence(groups, self.pool.num_usable, chunk, size)
        self._suffixes = [g.to_bytes(2 if g else 0, "little") for g in range(len(groups))]

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
        shared = [block for block in hits if block != NULL_BLOCK]
        idle_hits = sum(not pool.references(block) for block in shared)
        if self._needed(sequence, hits) + idle_hits > pool.num_free:
            return False
        for block in shared:
            pool.share(block)
        self._hold(sequence, hits)
        sequence.num_computed = sequence.capacity
        return True

    def fits_beside(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """Whether `admit` would succeed if nobody but these held blocks."""
        held = {block for other in others for block in (*other.block_ids, *other.copy_sources)}
        held.discard(NULL_BLOCK)
        hits = self._cached_prefix(sequence)
        idle_hits = len({*hits} - held - {NULL_BLOCK})
        return len(held) + idle_hits + self._needed(sequence, hits) <= self.pool.num_usable

    def grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Give it blocks for so many tokens. Returns how many are new, or -1: too few are free."""
        pool, blocks = self.pool, sequence.block_ids
        missing = -(-num_tokens // self.block_size) * self._num_groups - len(blocks)
        if missing <= 0:
            return 0
        if self._windows:
            self._give_back(sequence, missing)
        if missing > pool.num_free:
            return -1
        blocks.extend([pool.take() for _ in range(missing)])
        sequence.capacity = len(blocks) // self._num_groups * self.block_size
        return missing

    def fork(self, source: Sequence, fork: Sequence) -> bool:
        """Give `fork` what `source` has computed of their prompt, but for the last token.

        They share the blocks before the last prompt token's; that one is new, and to be copied from
        copy_sources if it holds more tokens of the prompt. The fork holds copy_sources until its
        `copied`. False if too few blocks are free, or the source has given back what it needs.
        """
        pool, width = self.pool, self._num_groups
        last = fork.num_prompt - 1
        num_shared, place = divmod(last, self.block_size)
        blocks = source.block_ids[: num_shared * width]
        sources = source.block_ids[num_shared * width :][:width] if place else []
        if pool.num_free < width or NULL_BLOCK in sources or not self._narrow(blocks, last):
            return False
        for block in (*blocks, *sources):
            if block != NULL_BLOCK:
                pool.share(block)
        fork.copy_sources = sources
        fork.hashes = source.hashes[:num_shared]
        self._hold(fork, [*blocks, *(pool.take() for _ in range(width))], num_shared)
        if source.cache_at == NEVER:
            fork.cache_at = NEVER
        fork.num_computed = last
        return True

    def copied(self, fork: Sequence) -> None:
        """The plan that copies copy_sources is made: their next owners write after the copy."""
        for block in fork.copy_sources:
            self.pool.release(block)
        fork.copy_sources = []

    def register(self, sequence: Sequence, num_computed: int) -> None:
        """So many of its tokens are computed: others may find the blocks that are full of them."""
        first, full = sequence.num_registered, num_computed // self.block_size
        self._hash(sequence, full)
        blocks = iter(sequence.block_ids[first * self._num_groups :])
        for content in sequence.hashes[first:full]:
            for suffix in self._suffixes:
                block = next(blocks)
                if block != NULL_BLOCK:
                    self.pool.register(block, content + suffix)
        sequence.num_registered = full
        sequence.cache_at = (full + 1) * self.block_size

    def release(self, sequence: Sequence) -> None:
        """It has no blocks after this, and nothing computed. So nothing is due to be cached."""
        self.copied(sequence)
        release = self.pool.release
        for block in reversed(sequence.block_ids):
            if block != NULL_BLOCK:
                release(block)
        self._hold(sequence, [])
        sequence.num_computed = 0
        sequence.cache_at = NEVER

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Let nothing computed so far be found again. `sequences`: all that may have blocks."""
        self.pool.forget()
        for sequence in sequences:
            if sequence.block_ids:
                sequence.cache_at = NEVER

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that these sequences hold all that is held, and that the pool is sound."""
        expected: Counter[int] = Counter()
        for sequence in sequences:
            blocks, width = sequence.block_ids, self._num_groups
            if not blocks:
                assert sequence.capacity == sequence.num_computed == len(sequence.copy_sources) == 0
                continue
            held = [block for block in (*blocks, *sequence.copy_sources) if block != NULL_BLOCK]
            assert len(set(held)) == len(held), "it has a block twice"
            expected.update(held)
            assert sequence.capacity * width == len(blocks) * self.block_size
            assert sequence.num_computed <= sequence.capacity
            assert all(NULL_BLOCK not in blocks[g::width] for g in self._full)
            seen = sequence.num_computed
            for g, window in self._windows:
                first = max(0, seen - window + 1) // self.block_size
                assert NULL_BLOCK not in blocks[first * width + g :: width]
            self._check_hashes(sequence)
        self.pool.check(expected)

    def _check_hashes(self, sequence: Sequence) -> None:
        """Its blocks have the hashes of its content, or none: another one like it was first."""
        caches = sequence.cache_at != NEVER
        assert self.caching or not caches
        full = sequence.num_registered if caches else 0
        assert full * self.block_size <= sequence.num_computed
        assert full <= len(sequence.hashes)
        names = [content + s for content in sequence.hashes[:full] for s in self._suffixes]
        for block, name in zip_longest(sequence.block_ids, names):
            assert self.pool.content(block) in (None, name), f"block {block} has a stale hash"

    def _needed(self, sequence: Sequence, hits: list[int]) -> int:
        """How many blocks it takes at most until its known tokens are computed, behind the hits."""
        whole, width = -(-len(sequence.tokens) // self.block_size), self._num_groups
        needed = 0
        for g, most in enumerate(self._most):
            of_group = hits[g::width]
            shared = len(of_group) - of_group.count(NULL_BLOCK)
            needed += min(whole - len(of_group) + shared, most) - shared
        return needed

    def _give_back(self, sequence: Sequence, missing: int) -> None:
        """What the next token's windows don't reach; of that, as long as `missing` blocks are free
        without, not what is yet to be registered, nor what a fork is yet to share.
        """
        place = fork_place = sequence.num_computed
        if sequence.request.held:
            fork_place = min(place, sequence.num_prompt - 1)
        registered = sequence.num_registered if sequence.cache_at != NEVER else NEVER
        self._release_before(sequence, fork_place, registered)
        if missing > self.pool.num_free:
            self._release_before(sequence, place, NEVER)

    def _release_before(self, sequence: Sequence, place: int, most: int) -> None:
        """Of each group's first `most` blocks, those before the window of the token at `place`."""
        blocks, width = sequence.block_ids, self._num_groups
        for g, window in self._windows:
            end = min(max(0, place - window + 1) // self.block_size, most)
            for i in range((end - 1) * width + g, -1, -width):
                if blocks[i] == NULL_BLOCK:
                    break  # and so is all that is before it
                self.pool.release(blocks[i])
                blocks[i] = NULL_BLOCK

    def _narrow(self, blocks: list[int], place: int) -> bool:
        """Leave only what the token at `place`, behind these blocks, sees. False if that isn't
        there.
        """
        width = self._num_groups
        for g, window in self._windows:
            first = max(0, place - window + 1) // self.block_size
            for i in range(g, len(blocks), width):
                if i < first * width:
                    blocks[i] = NULL_BLOCK
                elif blocks[i] == NULL_BLOCK:
                    return False
        return True

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        if not self.caching or sequence.owes_prompt_logprobs:
            return []
        most = (len(sequence.tokens) - 1) // self.block_size
        self._hash(sequence, most)
        hashes, lookup = sequence.hashes, self.pool.lookup
        for g in self._full:
            suffix, found = self._suffixes[g], []
            for content in hashes[:most]:
                block = lookup(content + suffix)
                if block == NULL_BLOCK:
                    break
                found.append(block)
            if self._num_groups == 1:
                return found
            most = len(found)
        if self._windows:
            most = self._longest_seen(hashes, most)
        hits = [lookup(content + s) for content in hashes[:most] for s in self._suffixes]
        self._narrow(hits, most * self.block_size)
        return hits

    def _longest_seen(self, hashes: list[bytes], most: int) -> int:
        """The largest number of blocks, `most` or less, whose last windows are in the cache.

        A block that is missing is in the window of all longer prefixes that were not yet ruled out,
        so none of these will do, and the search goes on with those that end before it.
        """
        lookup, size = self.pool.lookup, self.block_size
        seen = [(self._suffixes[g], window) for g, window in self._windows]
        end, i = most, most - 1
        while i >= 0:
            needed = [s for s, w in seen if i >= max(0, end * size - w + 1) // size]
            if not needed:
                break
            if any(lookup(hashes[i] + suffix) == NULL_BLOCK for suffix in needed):
                end = i
            i -= 1
        return end

    def _hash(self, sequence: Sequence, num_blocks: int) -> None:
        request, hashes = sequence.request, sequence.hashes
        if not hashes:
            in_prompt = sequence.num_prompt // self.block_size
            self._hasher.extend(request.hashes, request.prompt, in_prompt, request.salt)
            hashes += request.hashes
        self._hasher.extend(hashes, sequence.tokens, num_blocks, request.salt)

    def _hold(
        self, sequence: Sequence, blocks: list[int], num_registered: int | None = None
    ) -> None:
        whole = len(blocks) // self._num_groups
        registered = whole if num_registered is None else num_registered
        sequence.block_ids = blocks
        sequence.capacity = whole * self.block_size
        sequence.num_registered = registered
        sequence.cache_at = (registered + 1) * self.block_size if self.caching else NEVER
