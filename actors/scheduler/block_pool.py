"""The workers' KV blocks, as numbers: which are in use, and what the idle ones still hold.

A block is in one of three states:

    state            references  hash    in the free list  leaves it
    free             0           no      at the front      by `take` -> referenced
    referenced       >= 1        or not  no                by the last `release` -> free without a
                                                           hash, cached-and-free with one
    cached-and-free  0           yes     at the back       by `share` (a prefix hit: its hash stays)
                                                           or `take` (evicted: its hash goes)
                                                           -> referenced

`register` gives a referenced block its hash, once, when it is full and computed; from then on it is
never written. Of several blocks with the same content only the first is registered. `forget` drops
all hashes at once.

The free list is doubly linked, in two arrays indexed by block, so that a block leaves its middle in
O(1). `take` takes from the front: free blocks first, then cached ones, the longest unused first.
Block 0 is the null block: it is never given out, and as the list's head it is before the first and
behind the last. So 0 also stands for "no block".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 .. num_blocks - 1. Every operation is O(1), but where it says otherwise."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, "block 0 always exists"
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}
        self._next: list[int] = [*range(1, num_blocks), NULL_BLOCK]
        self._previous: list[int] = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def take(self) -> int:
        """A block with one reference and no content. There must be a free one."""
        assert self.num_free, "no free block"
        block = self._next[NULL_BLOCK]
        self._unlink(block)
        content = self._hashes[block]
        if content is not None:
            del self._blocks[content]
            self._hashes[block] = None
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block that has an owner or is cached."""
        if not self._references[block]:
            assert self._hashes[block] is not None, f"block {block} holds nothing to share"
            self._unlink(block)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One reference less. Of cached blocks, the one released first is evicted first."""
        references = self._references[block] - 1
        assert references >= 0, f"block {block} was released too often"
        self._references[block] = references
        if not references:
            after = self._next[NULL_BLOCK] if self._hashes[block] is None else NULL_BLOCK
            self._link_before(after, block)

    def register(self, block: int, content: bytes) -> None:
        """Let `lookup` find this full and computed block, unless it finds another like it."""
        assert self._references[block], f"block {block} has no owner"
        assert self._hashes[block] is None, f"block {block} has a hash already"
        if content not in self._blocks:
            self._blocks[content] = block
            self._hashes[block] = content

    def forget(self) -> None:
        """Drop all hashes: cached-and-free blocks become free. O(num_blocks)."""
        self._blocks.clear()
        self._hashes = [None] * self.num_blocks

    def lookup(self, content: bytes) -> int:
        """The block with this content, or NULL_BLOCK."""
        return self._blocks.get(content, NULL_BLOCK)

    def references(self, block: int) -> int:
        return self._references[block]

    def content(self, block: int) -> bytes | None:
        """The hash that it is registered under."""
        return self._hashes[block]

    def free_blocks(self) -> Iterator[int]:
        """In the order in which `take` would take them."""
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            yield block
            block = self._next[block]

    def check(self, expected: Mapping[int, int]) -> None:
        """Assert that blocks have the expected references, and the table above. O(num_blocks)."""
        free = list(self.free_blocks())
        assert len(free) == len(set(free)) == self.num_free, "the free list has lost count"
        assert set(free) == {b for b in range(1, self.num_blocks) if not self._references[b]}
        for block in range(self.num_blocks):
            found, wanted = self._references[block], expected.get(block, 0)
            assert found == wanted, f"block {block} has {found} references, its users say {wanted}"
        assert self._hashes[NULL_BLOCK] is None, "the null block holds something"
        cached = [self._hashes[block] is not None for block in free]
        assert cached == sorted(cached), "a cached block lies before a free one"
        named = {
            content: block for block, content in enumerate(self._hashes) if content is not None
        }
        assert named == self._blocks, "blocks and their hashes disagree"
        for block in (NULL_BLOCK, *free):
            assert self._previous[self._next[block]] == block, "the free list is torn"

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1

    def _link_before(self, after: int, block: int) -> None:
        before = self._previous[after]
        self._next[before] = self._previous[after] = block
        self._previous[block] = before
        self._next[block] = after
        self.num_free += 1
